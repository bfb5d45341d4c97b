"""A text as read by the sources that copy from it: once for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from specllama.history import Follower, History
from specllama.speculative.drafting.backoff import Backoff
from specllama.speculative.matches import Matches


class TextFollower:
    """A reader of one text: it tracks the earlier places of its end, and its habits."""

    def __init__(self) -> None:
        self._seen = Follower()
        self.habits = Backoff()
        self.matches = Matches(self._seen.text)

    @property
    def text(self) -> History:
        return self.matches.within

    def follow(self, tokens: Sequence[int]) -> History:
        """Read the new part of ``tokens``."""
        read, edited = self._seen.follow(tokens)
        text = self._seen.text
        if text is not self.matches.within:
            self.matches = Matches(text)
        elif read == len(text) and not edited:
            return text  # another source asked before
        self.matches.follow(text)
        self.habits.follow(text)
        return text

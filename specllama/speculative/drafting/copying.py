"""A text as the sources that copy from it read it: once, whoever asks first."""

from __future__ import annotations

from collections.abc import Sequence

from specllama.history import History
from specllama.speculative.drafting.backoff import Backoff
from specllama.speculative.matches import Matches


class Reader:
    """Follows one text: where its end stood before, and what its habits are."""

    def __init__(self) -> None:
        self._own = History()  # for callers that have plain lists
        self.habits = Backoff()
        self.matches = Matches(self._own)

    @property
    def text(self) -> History:
        return self.matches.within

    def follow(self, tokens: Sequence[int]) -> History:
        """Read what is new in ``tokens``."""
        if isinstance(tokens, History):
            text = tokens
        else:
            text = self._own
            text.replace(tokens)
        if text is not self.matches.within:
            self.matches = Matches(text)
        self.matches.follow(text)
        self.habits.follow(text)
        return text

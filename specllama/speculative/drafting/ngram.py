"""Prompt lookup: the tokens after the previous occurrence of the last n tokens.

The longest match of n_max down to n_min tokens counts; of several the newest.
"""

from __future__ import annotations

from collections.abc import Sequence

from specllama.speculative.drafting.copying import TextFollower
from specllama.speculative.drafting.drafter import Copier, Request
from specllama.speculative.drafting.method import Method
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import Draft, Guess, Room, Verdict

LONG_MATCH = 32  # beyond this a longer match says nothing more


class NgramDrafter(Copier):
    """A drafter that copies from the prompt and the reply so far.

    Args:
        n_max: longest n-gram looked up.
        n_min: shortest; 2 finds more and is wrong more often, 3 is calmer.
        reader: of the text, to share with other copying sources.
    """

    name = "ngram"

    def __init__(
        self, *, n_max: int = 6, n_min: int = 2, reader: TextFollower | None = None
    ) -> None:
        self._sizes = range(n_max, n_min - 1, -1)
        self._reader = reader or TextFollower()
        self._hits: dict[int, list[int]] = {n: [0, 0] for n in self._sizes}
        self._sent = 0  # the size of this round's match, where it was sent

    def start(self, request: Request) -> None:
        super().start(request)
        self._hits = {n: [0, 0] for n in self._sizes}

    def guesses(self, tokens: Sequence[int], chain: SamplerChain, most: int) -> list[Guess]:
        """Return the continuation of the best match, up to the end of a turn; [] without one."""
        self._sent = 0
        at, agreement = self.lookup(tokens)
        if not agreement:
            return []
        copied = self._reader.text[at : at + most]
        is_eog = self.request.is_eog
        copied = copied[: next((n for n, t in enumerate(copied, 1) if is_eog(t)), None)]
        shares = self._reader.habits.likely(copied)
        return [Guess(self.name, tuple(copied), agreement, shares)]

    def send(self, guess: Guess, length: int, room: Room) -> Draft:
        self._sent = min(guess.match_length, self._sizes[0])
        hits, tries = self._hits[self._sent]
        score = (hits + 1.0) / (tries + 2.0)
        return Draft.chain(guess.tokens[:length], self.name, confidence=[score] * length)

    def lookup(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return (position of the continuation, tokens that agree up to LONG_MATCH) of the best
        match; 0 tokens for none."""
        self._reader.follow(tokens)
        matches = self._reader.matches
        size = min(matches.longest, self._sizes[0])
        if size < self._sizes[-1]:
            return 0, 0
        newest = int((matches.lengths >= size).nonzero()[0][-1])
        return int(matches.places[newest]) + 1, min(int(matches.lengths[newest]), LONG_MATCH)

    def commit(self, tokens: Sequence[int], draft: Draft, verdict: Verdict) -> None:
        if self._sent and len(draft) and draft.sources[0] == self.name:
            hits = self._hits[self._sent]
            # only tested positions count: what lies after a rejection was never judged
            hits[0] += len(verdict.path)
            hits[1] += min(len(verdict.path) + 1, len(draft))
        self._sent = 0


METHOD = Method(
    name="ngram",
    label="N-gram / prompt lookup",
    short="n-gram",
    letter="n",
    blurb="Copies what followed the last few tokens the last time they occurred. "
    "Free; works best on edits, quotes and code.",
    open=lambda kit: NgramDrafter(reader=kit.reader),
    auto=True,
)

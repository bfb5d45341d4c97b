"""The reply that the caller expects, copied as long as the real one keeps to it.

An edited file is mostly the old one. So the expected text is followed from its beginning, without a
match, and over its differences: where the reply departs from it, the longest match of the reply's
end goes on, of several the nearest to where it was left. Until there is one, a token is taken to
have been replaced; before the first, something to stand in front of the text. Other copies need a
match of some length, and know no place (``suffix``).

What is expected is as likely as what came of it so far, beside the length of the match: a text that
is wrong is dropped after its first guesses.
"""

from __future__ import annotations

from collections.abc import Sequence

from specllama.speculative.drafting.drafter import Copier, Request, written
from specllama.speculative.drafting.method import Method
from specllama.speculative.matches import Matches
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import Draft, Guess, Verdict
from specllama.text_history import History

_WORD = 8  # tokens of a match that the caller's word is worth, before anything was written
_SURE = 16  # tokens in a row that agree, from which on no other place is looked for
_KEPT, _FIRST, _MEMORY = 0.75, 4, 64  # share of tokens that came as expected: a running mean


class Aligned:
    """The position of a reply in the text that is expected of it.

    Attributes:
        at: the place of the expected token that comes next.
        run: tokens in a row that agreed up to there, or what stands for them.
        kept: the share of the reply that came as expected.
    """

    def __init__(self, expected: Sequence[int]) -> None:
        self.expected = History(expected)
        self.at, self.run, self.kept = 0, _WORD, _KEPT
        self._begun, self._seen = False, _FIRST
        self._reply = History()
        self._matches = Matches(self.expected)

    def follow(self, tokens: Sequence[int]) -> None:
        """Follow the reply through ``tokens``."""
        for token in tokens:
            agrees = self.at < len(self.expected) and self.expected[self.at] == token
            self.run = self.run + 1 if agrees else 0
            self._begun = self._begun or agrees
            self.at += self._begun
            self._seen = min(self._seen + 1, _MEMORY)
            self.kept += (agrees - self.kept) / self._seen
        self._reply.extend(tokens)
        self._matches.follow(self._reply)
        if self.run < _SURE and len(self._matches.places):
            self._find()

    def _find(self) -> None:
        """Move to the place where most tokens agree."""
        behind, lengths = self._matches.places + 1, self._matches.lengths
        if (most := min(int(lengths.max()), _SURE)) > self.run:
            behind = behind[lengths >= most]
            self.at = int(behind[abs(behind - self.at).argmin()])
            self.run, self._begun = most, True


class PredictionDrafter(Copier):
    """A drafter that copies the text that the caller expects."""

    name = "prediction"

    def __init__(self) -> None:
        self._aligned: Aligned | None = None
        self._new: list[int] = []  # tokens that were not looked at yet

    def start(self, request: Request) -> None:
        super().start(request)
        self._aligned = Aligned(request.prediction) if len(request.prediction) else None
        self._new = []

    def guesses(self, tokens: Sequence[int], chain: SamplerChain, most: int) -> list[Guess]:
        """Return the expected text from the reply's position in it; [] without one."""
        aligned, new = self._aligned, self._new
        if aligned is None:
            return []
        self._new = []
        if self.request.thinking():
            return []
        aligned.follow(new)
        copied = aligned.expected[aligned.at : aligned.at + most]
        if not copied:
            return []
        kept = (aligned.kept,) * len(copied)
        return [Guess(self.name, tuple(copied), aligned.run, kept, kind="prediction")]

    def commit(self, tokens: Sequence[int], draft: Draft, verdict: Verdict) -> None:
        if self._aligned is not None:
            self._new += written(tokens, verdict)


METHOD = Method(
    name="prediction",
    label="Prediction",
    short="prediction",
    letter="p",
    blurb="Copies what the caller expects the reply to be, such as the old text of an edited file; "
    "free, and found again after each difference.",
    open=lambda kit: PredictionDrafter(),
    auto=True,
)

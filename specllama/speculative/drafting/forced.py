"""Text that a constraint fully determines: keys of a schema, frames of calls, constants.

The constraint tells what comes next, spelled as its vocabulary does; nothing here knows grammars.
Where the spelling may go on differently, what was right before is learnt by token.
"""

from __future__ import annotations

from collections.abc import Sequence

from specllama.speculative.drafting.drafter import Copier, Request, written
from specllama.speculative.drafting.method import Method
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import Draft, Guess, Room, Verdict

KNOWN = 8  # tokens of a match that would be as sure: two in three, before anything was seen
_DOUBT = 2.0  # tested guesses that what the constraint says of its doubts is worth


class ForcedDrafter(Copier):
    """A drafter of the only tokens that may follow."""

    name = "forced"

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._habits: dict[bytes, dict[bytes, float]] = {}
        self._end: int | None = None  # which token ended the last constrained text
        self._tested: dict[int, list[float]] = {}  # token in doubt: [right, tested]
        self._guess: list[tuple[int, float]] = []  # of this round

    def start(self, request: Request) -> None:
        super().start(request)
        self._guess = []

    def guesses(self, tokens: Sequence[int], chain: SamplerChain, most: int) -> list[Guess]:
        """Return one guess, or none if there is a choice."""
        self._guess = []
        if chain.constraint is None:
            return []
        ahead = chain.constraint.ahead(most, self._habits)
        if ahead and ahead[-1][0] < 0:
            ahead = [*ahead[:-1], *([] if self._end is None else [(self._end, 1.0)])]
        if not ahead:
            return []
        self._guess = list(ahead)
        found, shares = zip(*((token, self._likely(token, p)) for token, p in ahead), strict=True)
        return [Guess(self.name, found, KNOWN, shares)]

    def _likely(self, token: int, said: float) -> float:
        right, tested = self._tested.get(token, (0.0, 0.0))
        return 1.0 if said == 1.0 else (right + _DOUBT * said) / (tested + _DOUBT)

    def send(self, guess: Guess, length: int, room: Room) -> Draft:
        shares = guess.shares[:length]
        return Draft.chain(guess.tokens[:length], self.name, confidence=shares)

    def commit(self, tokens: Sequence[int], draft: Draft, verdict: Verdict) -> None:
        for (token, said), truth in zip(self._guess, written(tokens, verdict), strict=False):
            if said < 1.0:
                tested = self._tested.setdefault(token, [0.0, 0.0])
                tested[0] += token == truth
                tested[1] += 1.0
            if token != truth:
                break
        self._guess = []
        if self.request.is_eog(tokens[-1]):
            self._end = tokens[-1]


METHOD = Method(
    name="forced",
    label="Forced text",
    short="forced",
    letter="g",
    blurb="Writes what a JSON schema, a grammar or a tool leaves no choice about. "
    "Free; silent where nothing constrains the reply.",
    open=lambda kit: ForcedDrafter(),
    auto=True,
)

"""Several sources compete for every round: copies of the text, and one source that costs time.

The window sees everything that the free sources would write, learns from all of it, sent or not,
and picks what should gain most for its time. The source that costs time (a draft model, or a head
of the target) is asked where no copy promises as much. Where it stays out, the best copy that still
pays is sent.

The choice depends on the text so far and on what earlier rounds taught, never on a token sampled
in this round, so it is exact under every verification rule.
"""

from __future__ import annotations

from collections.abc import Sequence

from specllama.speculative.drafting.drafter import Copier, Drafter, Joined
from specllama.speculative.drafting.method import Kit, Method, methods
from specllama.speculative.effects import Steps
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import EMPTY_DRAFT, Draft, Guess, Room

CALM = 3  # tokens of a match that is taken where no window weighs it against the paying source


class MixedDrafter(Joined):
    """A drafter that uses whichever of its sources promises most.

    Args:
        sources: free ones (copiers) and others, each kind in order of preference.
    """

    name = "mixed"

    def __init__(self, sources: Sequence[Drafter]) -> None:
        super().__init__(sources)
        self._copiers = [source for source in sources if isinstance(source, Copier)]
        self._paid = [source for source in sources if not isinstance(source, Copier)]
        self.needs = next((s.needs for s in sources if s.needs != "nothing"), "nothing")
        self.paid = self._paid[0].name if self._paid else ""

    def reusable(self, tokens: Sequence[int], cached: int) -> int:
        return min((s.reusable(tokens, cached) for s in self._paid), default=cached)

    def read_prompt(self, tokens: Sequence[int], n: int) -> Steps[None]:
        for source in self._paid:
            yield from source.read_prompt(tokens, n)

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Steps[Draft]:
        owned = self._guesses(tokens, chain, room)
        guesses = [guess for guess, _ in owned]
        which, length = room.judge.pick(guesses) if guesses else (0, 0)
        if length == 0:
            for source in self._paid:
                draft = yield from source.draft(tokens, chain, room)
                if len(draft):
                    return draft
            if guesses and self._paid:
                which, length = room.judge.pick(guesses)
        return owned[which][1].send(guesses[which], length, room) if length else EMPTY_DRAFT

    def _guesses(
        self, tokens: Sequence[int], chain: SamplerChain, room: Room
    ) -> list[tuple[Guess, Copier]]:
        """Return every guess, and its source."""
        least = 0 if room.judge.weighs or not self._paid else CALM
        return [
            (guess, source)
            for source in self._copiers
            for guess in source.guesses(tokens, chain, room.n)
            if guess.match_length >= least
        ]


def _open(kit: Kit) -> Drafter:
    """Open the copiers, and the first paying source that the pair has."""
    free = [kit.drafter(m.name) for m in methods() if m.auto and m.cost == "free"]
    paid = (kit.drafter(m.name) for m in methods() if m.auto and m.cost != "free")
    sources = [*free, next((drafter for drafter in paid if drafter), None)]
    return MixedDrafter([drafter for drafter in sources if drafter])


METHOD = Method(
    name="mixed",
    label="Mixed",
    short="mixed",
    letter="",
    blurb="Forced text, suffix and n-gram copies compete with the draft model (or a head of the "
    "target). Each round uses the one that should save the most time.",
    cost="of its sources",
    open=_open,
)

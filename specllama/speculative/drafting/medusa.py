"""Medusa: extra heads on the target's hidden state guess the next tokens all at once.

Drafting runs no model: the hidden state comes from the target's last pass, and a head costs two
small matrix products and one with an output matrix. The guesses are point masses: under ``match``
and at temperature 0 the front-runners of the race in which the target draws its token, under
``rejection`` the likeliest tokens. What a guess is worth is its share in the race, or in the head's
law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specllama.arrays import Row
from specllama.backend.base import Out
from specllama.errors import EngineError, UsageError
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.drafting.likeliest import likeliest
from specllama.speculative.drafting.method import NO_HEAD, Kit, Method, with_own
from specllama.speculative.effects import HeadPlace, Pass, Steps
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.selection import confidence
from specllama.speculative.tree import BestFirst
from specllama.speculative.types import EMPTY_DRAFT, Draft, Room

Hidden = Callable[[Sequence[int]], Row | None]


class MedusaDrafter(Drafter):
    """A drafter with extra heads of the target.

    Args:
        lane: of the heads of this target.
        hidden: tells the target's final hidden state [width] behind the last of some cached
            tokens, None where it is not known.
        ranks: most guesses per head.
    """

    name = "medusa"
    needs = "final_hidden"

    def __init__(self, lane: HeadPlace, hidden: Hidden, *, ranks: int = 4) -> None:
        self.lane = lane
        self._hidden = hidden
        self.ranks = ranks

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Steps[Draft]:
        if room.n <= 0 or len(tokens) < 2:
            return EMPTY_DRAFT
        hidden = self._hidden(tokens[:-1])
        if hidden is None or room.judge.read(self.name, 1) <= 0:
            return EMPTY_DRAFT
        return (yield from _HeadGrowth(self, hidden, chain.fork(), room).grow())


class _HeadGrowth(BestFirst):
    """One round's tree. Every node of a depth is followed by the same guesses."""

    def __init__(
        self, drafter: MedusaDrafter, hidden: Row, ahead: SamplerChain, room: Room
    ) -> None:
        self._request = request = drafter.request
        super().__init__(room, leaves=request.leaves, is_end=request.is_eog)
        self._drafter = drafter
        self._hidden = hidden
        self._ahead = ahead
        self._guesses: list[list[tuple[int, float]]] = []  # by depth, the best first

    def read(self, node: int) -> Steps[None]:
        depth = self.depth(node)
        if depth == len(self._guesses) < self._drafter.lane.heads:
            found = yield from self._look(depth + 1)
            self._guesses.append(found)
        guesses = self._guesses[depth] if depth < len(self._guesses) else []
        if guesses and node == self.trunk:  # the window was asked for this one
            self.best = guesses[0][0]
        for token, share in guesses:
            self.offer(node, token, share, self._drafter.name)

    def _look(self, depth: int) -> Steps[list[tuple[int, float]]]:
        """Return the guesses of head ``depth``, best first; none if the window wants no more.

        The chain is advanced along the best guesses: the places are right for every path, the
        history of penalties and grammars for the likeliest one. A wrong history costs acceptance,
        never exactness.
        """
        judge, ahead, request, lane = self.judge, self._ahead, self._request, self._drafter.lane
        if depth > 1 and not judge.further():
            return []
        out: Out = yield Pass(lane, (), states=self._hidden[None], head=depth)
        row = out.rows[0]
        score = confidence(row)
        if score < request.p_min:
            return []
        try:
            law = ahead.law(row)
        except (EngineError, UsageError):
            return []  # NaN, or a grammar with no way on
        drawn = request.drawn(ahead)
        ranks = self._drafter.ranks if request.leaves > 1 else 1
        found, lead = likeliest(law, row, ahead, ranks, request.seed if drawn else None)
        if not judge.take(score, *((lead, found[0][0]) if drawn else (None, None))):
            return []
        ahead.advance(found[0][0])
        return found


def _open(kit: Kit) -> Drafter:
    def hidden(cached: Sequence[int]) -> Row | None:
        states = kit.target.hidden
        last = len(cached) - 1
        rows = states.rows(last, last + 1)
        states.forget(last)
        return None if rows is None else rows[0]

    return MedusaDrafter(kit.own("medusa").open(kit.target), hidden)


METHOD = Method(
    name="medusa",
    label="Medusa",
    short="Medusa",
    letter="m",
    blurb="Extra output heads guess several tokens at once. Needs heads trained for the target.",
    cost="own",
    why_not=with_own("medusa", NO_HEAD),
    open=_open,
    branches="may",
    auto=True,
)

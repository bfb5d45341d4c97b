"""Medusa: extra heads on the target's hidden state guess the next tokens all at once.

Drafting runs no model: the hidden state comes from the target's last pass, and a head costs two
small matrix products and one with an output matrix. The guesses are point masses: under ``match``
and at temperature 0 the front-runners of the race in which the target draws its token, under
``rejection`` the likeliest tokens. What a guess is worth is its share in the race, or in the head's
law.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from specllama.arrays import Row
from specllama.speculative.drafting.draft_tree import grow
from specllama.speculative.drafting.drafter import Drafter, Request
from specllama.speculative.drafting.method import NO_HEAD, Kit, Method, with_own
from specllama.speculative.drafting.stepping import Stepping
from specllama.speculative.effects import HeadPlace, Pass, Steps
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.tree import Path
from specllama.speculative.types import Draft, Room

Hidden = Callable[[Sequence[int]], Row | None]


class MedusaDrafter(Stepping):
    """A drafter with extra heads of the target. Every node of a depth is followed by the same
    guesses, of one head.

    Args:
        lane: of the heads of this target.
        hidden: tells the target's final hidden state [width] behind the last of some cached
            tokens, None where it is not known.
        ranks: most guesses per head.
    """

    name = "medusa"
    needs = "final_hidden"
    floor = 0.0
    samples = False

    def __init__(self, lane: HeadPlace, hidden: Hidden, *, ranks: int = 4) -> None:
        self.lane = lane
        self._hidden = hidden
        self._ranks = ranks

    def start(self, request: Request) -> None:
        super().start(request)
        self.siblings = self._ranks if request.leaves > 1 else 1

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Steps[Draft]:
        return (yield from grow(self, tokens, chain, room))

    def begin(self, tokens: Sequence[int], room: Room) -> Steps[tuple[Row | None, int]]:
        self._state = self._hidden(tokens[:-1]) if len(tokens) > 1 else None
        if self._state is None or not room.judge.read(self.name, 1):
            return None, 0
        (row,) = yield from self.after([()])
        return row, self.lane.heads

    def after(self, paths: Sequence[Path]) -> Steps[Sequence[Row]]:
        assert self._state is not None
        depth = len(paths[0]) + 1
        out: Pass = yield Pass(self.lane, (), states=self._state[None], head=depth)
        return [out.rows[0]]

    def alike(self, path: Path) -> Hashable:
        return len(path)


def _open(kit: Kit) -> Drafter:
    def hidden(cached: Sequence[int]) -> Row | None:
        states = kit.target.hidden
        last = len(cached) - 1
        rows = states.rows(last, last + 1)
        states.forget(last)
        return None if rows is None else rows[0]

    return MedusaDrafter(kit.own("medusa").open(kit.target), hidden)


METHOD = Method(
    name="medusa", label="Medusa", short="Medusa", letter="m",
    blurb="Extra output heads guess several tokens at once. Needs heads trained for the target.",
    cost="own", why_not=with_own("medusa", NO_HEAD), open=_open, branches="may", auto=True,
)  # fmt: skip

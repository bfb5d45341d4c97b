"""Medusa: extra heads on the target's hidden state guess the next tokens all at once.

No model is run to draft: the hidden state comes from the target's own last pass and a head costs
two small products and one with an output matrix. The guesses are point masses. Under ``match`` and
at temperature 0 they are the first to finish the race in which the target draws its token; under
``rejection`` the likeliest. What a guess is worth is known from accuracies in the heads' file at
temperature 0, from its share in the race or in the head's law otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from specllama.arrays import FloatArray, Row
from specllama.errors import EngineError
from specllama.speculative.asking import Asking
from specllama.speculative.drafting.drafter import Drafter, Request
from specllama.speculative.drafting.medusa_heads import Guess, HeadSource, Vector, grow
from specllama.speculative.drafting.method import NO_HEAD, Kit, Method, with_own
from specllama.speculative.noise import exp_noise
from specllama.speculative.sampling import SamplerChain, confidence
from specllama.speculative.tree import TreeBuilder
from specllama.speculative.types import EMPTY_DRAFT, Draft, Law, Room

_NEAR = 8.0  # logits; a token farther below the best is never a greedy guess

Hidden = Callable[[Sequence[int]], Vector | None]


class MedusaDrafter(Drafter):
    """Drafts with extra heads of the target.

    Args:
        heads: of this target.
        hidden: tells the target's final hidden state [width] behind the last of some cached
            tokens, None where it is not known.
        ranks: most guesses per head.
    """

    name = "medusa"
    needs = "final_hidden"

    def __init__(self, heads: HeadSource, hidden: Hidden, *, ranks: int = 4) -> None:
        self.heads = heads
        self._hidden = hidden
        self._ranks = ranks

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Asking[Draft]:
        yield from ()
        request = self.request
        if room.n <= 0 or len(tokens) < 2:
            return EMPTY_DRAFT
        hidden = self._hidden(tokens[:-1])
        if hidden is None or room.begin(self.name, 1) <= 0:
            return EMPTY_DRAFT
        tree = TreeBuilder(max_nodes=room.n, max_leaves=request.leaves)
        looks = _Looks(self.heads, hidden, chain.fork(), request, room, self._ranks)
        grow(
            tree,
            looks.at,
            depths=len(self.heads),
            source=self.name,
            is_end=request.is_eog,
            beside=room.beside,
        )
        return tree.build()


class _Looks:
    """One round's answers of the heads, in the order of depth."""

    def __init__(
        self,
        heads: HeadSource,
        hidden: Vector,
        ahead: SamplerChain,
        request: Request,
        room: Room,
        ranks: int,
    ) -> None:
        self._heads = heads
        self._hidden = hidden
        self._ahead = ahead
        self._request = request
        self._room = room
        self._ranks = ranks if request.leaves > 1 else 1
        self._score: float | None = None

    def at(self, depth: int) -> list[Guess]:
        """The guesses of head ``depth``, best first; none where the window wants no more.

        The chain is advanced along the best guesses: the places are right for every path, the
        history of penalties and grammars for the likeliest one. A wrong history costs acceptance,
        never exactness.
        """
        room, ahead = self._room, self._ahead
        if depth > 1 and not room.keep_going(depth - 1, self._score):
            return []
        row = self._heads.logits(self._hidden, depth)
        score = self._score = confidence(row)
        if score < self._request.p_min:
            return []
        try:
            law = ahead.law(row)
        except EngineError:
            return []  # NaN, or a grammar with no way on
        race = self._request.rule.common_noise and not ahead.greedy
        guesses, lead = self._rank(law, row, race)
        if ahead.greedy or race:
            wanted = room.include(score, min(lead, ahead.gap), guesses[0][0])
        else:
            wanted = room.include(score, None, None)
        if not wanted:
            return []
        if ahead.greedy:
            rates = self._heads.measured(depth, score)
            guesses = [
                (token, float(rates[i])) if i < len(rates) else (token, share)
                for i, (token, share) in enumerate(guesses)
            ]
        ahead.advance(guesses[0][0])
        return guesses

    def _rank(self, law: Law, row: Row, race: bool) -> tuple[list[Guess], float]:
        """The best guesses with their shares, and the lead of the first in log score."""
        ids = law.ids
        if self._ahead.greedy:
            ids = np.flatnonzero(row > row.max() - np.float32(_NEAR)).astype(np.int32)
            weights: FloatArray = np.exp((row[ids] - row.max()).astype(np.float64))
        elif race:
            weights = law.probs / exp_noise(self._request.seed, self._ahead.position, ids)
        else:
            weights = law.probs
        weights = weights / weights.sum()
        order = np.lexsort((ids, -weights))[: max(self._ranks, 2)]
        guesses = [(int(ids[i]), float(weights[i])) for i in order]
        if self._ahead.greedy and guesses[0][0] != int(law.ids[0]):
            # a penalty or a grammar moved the best token away from the top
            best = int(law.ids[0])
            guesses = [(best, guesses[0][1]), *(g for g in guesses if g[0] != best)]
        lead = float(np.log(guesses[0][1] / guesses[1][1])) if len(guesses) > 1 else float("inf")
        return guesses[: self._ranks], max(lead, 0.0)


def _open(kit: Kit) -> Drafter:
    def hidden(cached: Sequence[int]) -> Vector | None:
        states = kit.target.hidden
        last = len(cached) - 1
        rows = states.rows(last, last + 1)
        states.forget(last)
        return None if rows is None else rows[0]

    return MedusaDrafter(kit.own("medusa"), hidden)


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

"""A draft model grows a token tree, best first (``BestFirst``).

Siblings. Under ``match`` the children of a node are the front-runners of the race in which the
target draws its own token (common noise). Under ``rejection`` one child is sampled, and the
likeliest other tokens join it as point masses (the hybrid rule): verification tries the sampled
child first, and its law leaves out the tokens fixed before it was drawn. How many children a node
gets is decided before the draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from specllama.errors import ContextFull, EngineError
from specllama.speculative.asking import Asking, Place
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.drafting.likeliest import likeliest
from specllama.speculative.drafting.method import Facts, Kit, Method, with_draft, with_trees
from specllama.speculative.drafting.stepping import Stepping
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.shortlist import Scores
from specllama.speculative.tree import ROOT, BestFirst
from specllama.speculative.types import EMPTY_DRAFT, Draft, Law, Room

_BESIDE = 0.1  # what a further sampled or fixed sibling must have left to catch


class MayBranch(Stepping):
    """Grows a tree where the target checks trees, else a chain."""

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Asking[Draft]:
        if self.request.leaves == 1:
            return (yield from super().draft(tokens, chain, room))
        return (yield from grow(self, tokens, chain, room))


class TreeDrafter(ChainDrafter):
    """Drafts a tree with a second model, whose lane evaluates chains only."""

    name = "tree"

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Asking[Draft]:
        return (yield from grow(self, tokens, chain, room))


def grow(
    model: Stepping,
    tokens: Sequence[int],
    chain: SamplerChain,
    room: Room,
    guess: Draft = EMPTY_DRAFT,
) -> Asking[Draft]:
    """The best tree of at most ``room.n`` nodes from a model and ``guess``.

    Args:
        guess: a chain of point masses with confidences that costs nothing, or no draft.
    """
    if room.n <= 0:
        return EMPTY_DRAFT
    row, fits = yield from model.begin(tokens, room)
    return (yield from _Growth(model, chain, room, guess, fits, row).grow())


class _Growth(BestFirst):
    """One round's tree."""

    def __init__(
        self,
        model: Stepping,
        chain: SamplerChain,
        room: Room,
        guess: Draft,
        fits: int,
        row: Scores | None,
    ) -> None:
        request = model.request
        super().__init__(room, leaves=request.leaves, is_end=request.is_eog, floor=model.floor)
        self._model = model
        self._request = request
        self._guess = guess
        self._fits = fits
        self._first_row = row
        self._chains: dict[int, SamplerChain] = {ROOT: chain.fork()}
        self._guessed: dict[int, int] = {ROOT: 0}  # node -> index of the guess that follows it
        self._reading = row is not None
        self._looked: tuple[float, float] = (0.0, 0.0)  # score and lead behind the trunk
        self._drawn = request.drawn(chain)
        self._offer_guess(ROOT)

    def wants(self, parent: int, token: int, weight: float) -> bool:
        """Ask the window for a row: the best path step by step, other nodes by their weight.

        A copied guess is free to make and was weighed before.
        """
        if self._guess_at(parent) == token:
            return True
        if not self.is_best(parent, token):
            return self.window.beside(weight)
        wanted = self.window.include(*self._looked, token)
        if not wanted:
            self.best, self._reading = None, False
        return wanted

    def join(
        self, parent: int, token: int, share: float, source: str, q: Law | None = None
    ) -> int | None:
        if q is not None and q.prob(token) <= 0.0:
            q = None
        node = super().join(parent, token, share, source, q)
        if node is not None and self._guess_at(parent) == token and node not in self._guessed:
            self._guessed[node] = self._guessed[parent] + 1
            self._offer_guess(node)
        return node

    # -- the free guess --

    def _offer_guess(self, node: int) -> None:
        """The free guess that follows ``node`` may join."""
        token = self._guess_at(node)
        if token is not None:
            at = self._guessed[node]
            share = self._guess.confidence[at]
            self.offer(node, token, 0.5 if share is None else share, self._guess.sources[at])

    def _guess_at(self, node: int) -> int | None:
        at = self._guessed.get(node)
        return self._guess.tokens[at] if at is not None and at < len(self._guess) else None

    def _source(self, node: int, token: int) -> str:
        copied = self._guess_at(node) == token
        return self._guess.sources[self._guessed[node]] if copied else self._model.name

    # -- the draft model --

    def _may_read(self, node: int) -> bool:
        if node == ROOT:
            return self._reading
        depth = self.depth(node)
        if not self._reading or depth >= self._fits:
            return False
        self._reading = self.window.keep_going(depth, self._confidence[node])
        return self._reading

    def read(self, node: int) -> Asking[None]:
        """Evaluate ``node`` with the draft model and offer what may follow it."""
        if not self._may_read(node):
            return
        request = self._request
        try:
            ahead = self._chain_at(node)
            if node == ROOT:
                assert self._first_row is not None
                row = self._first_row
            else:
                row = yield from self._model.after(self.path(node))
            row = ahead.short(row)
            score = self._model.sure(self.path(node), row)
            if score < request.p_min:
                return
            law = ahead.law(row)
        except (ContextFull, EngineError):
            return  # full, NaN, or no way on under the grammar: nothing follows here
        if self._drawn:
            found, lead = likeliest(law, row, ahead, self._model.siblings, request.seed)
            if node == self.trunk:
                self.best, self._looked = found[0][0], (score, lead)
            q = None if ahead.greedy else law
            for token, share in found:
                self.offer(node, token, share, self._source(node, token), q)
        elif node != self.trunk or self.window.include(score, None, None):
            self._draw(node, law)
        else:
            self._reading = False

    def _chain_at(self, node: int) -> SamplerChain:
        found = self._chains.get(node)
        if found is None:
            found = self._chain_at(self.parent(node)).fork()
            found.advance(self.token(node))
            self._chains[node] = found
        return found

    def _draw(self, node: int, law: Law) -> None:
        """One sampled child and the likeliest other tokens beside it, all settled from the law."""
        weight = self.weight[node]
        most = min(self._model.siblings, self.room, 1 + self.spare_leaves)
        guess = self._guess_at(node)
        fixed: list[int] = [] if guess is None or most < 2 else [guess]
        left = 1.0 - sum(law.prob(t) for t in fixed)
        for i in np.lexsort((law.ids, -law.probs)):
            # a further child pays only where the law leaves something to it
            if len(fixed) + 1 >= most or weight * (left - float(law.probs[i])) < _BESIDE:
                break
            token = int(law.ids[i])
            if token not in fixed:
                if not self.window.beside(weight * float(law.probs[i])):
                    break
                fixed.append(token)
                left -= float(law.probs[i])
        outside = _without(law, fixed)
        if outside is not None and (not fixed or weight * left >= _BESIDE):
            token = self._request.coins.pick(outside.ids, outside.probs)
            if node == self.trunk:
                self.best = token
            self.join(node, token, max(left, 0.0), self._model.name, outside)
        for token in fixed:
            share = law.prob(token)
            if token == guess:
                share = max(share, self._guess.confidence[self._guessed[node]] or 0.0)
            self.join(node, token, share, self._source(node, token))


def _without(law: Law, tokens: Sequence[int]) -> Law | None:
    """The law restricted to other tokens and renormalised; None when nothing is left."""
    if not tokens:
        return law
    keep = ~np.isin(law.ids, np.array(tokens, np.int32))
    mass = float(law.probs[keep].sum())
    if mass <= 0.0:
        return None
    return Law(law.ids[keep], law.probs[keep] / mass)


OTHER_WORDS = "the draft model has another tokenizer, so it gives no probabilities to branch on"


def why_no_tree(facts: Facts) -> str:
    """Why the draft model of a pair cannot grow trees, "" if it can."""
    return with_trees(facts) or with_draft(facts) or ("" if facts.laws else OTHER_WORDS)


def _open(kit: Kit) -> Drafter:
    lane = cast("Place", kit.draft)
    return TreeDrafter(lane, n_vocab=kit.target.n_vocab)


METHOD = Method(
    name="tree",
    label="Token trees",
    short="draft tree",
    letter="b",
    blurb="The draft model proposes several branches, checked in one pass. "
    "Pays where extra rows are cheap.",
    cost="draft model",
    why_not=why_no_tree,
    open=_open,
    branches="may",
)

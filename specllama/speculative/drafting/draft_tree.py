"""A drafting model grows a token tree: the best nodes by path probability, not the longest chain.

    heap    nodes that could be added and nodes that could be read further, by the probability that
            the target follows the path there
    add     the best candidate joins the tree
    read    the drafting model evaluates a node; its likeliest continuations become candidates

A child is never likelier than its parent, so the n nodes that leave the heap first are the best n
nodes there are (EAGLE-2, OPT-Tree; Sequoia's dynamic programme finds the same). A node is read only
when no cheaper candidate beats it, so weak side branches cost a row of the target, no draft step.

Siblings. Under ``match`` the children of a node are the first to finish the race of common noise,
the same race in which the target draws its own token. Under ``rejection`` one child is sampled and
the likeliest other tokens stand beside it as point masses (the hybrid rule): the sampled child goes
first and its law leaves out the tokens that were fixed before it was drawn. How many children a
node gets is settled before the draw.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Literal, cast

import numpy as np

from specllama.arrays import FloatArray, IntArray, Row, Rows
from specllama.errors import ContextFull, EngineError
from specllama.history import common_prefix
from specllama.speculative.asking import Asking, Pass, Place
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.drafting.drafter import Drafter, Request
from specllama.speculative.drafting.method import Facts, Kit, Method, with_draft, with_trees
from specllama.speculative.noise import exp_noise
from specllama.speculative.sampling import SamplerChain, confidence
from specllama.speculative.tree import TreeBuilder
from specllama.speculative.types import EMPTY_DRAFT, Draft, Law, Room

_ROOT = -1
_BESIDE = 0.1  # what a further sampled or fixed sibling must have left to catch
_NEAR = 8.0  # logits; a token farther below the best is never a greedy sibling


class TreeDrafter(ChainDrafter):
    """Drafts a tree with a second model.

    Args:
        lane: the draft model's own, any size; it evaluates chains only.
        n_vocab: vocabulary size of the target.
        siblings: most children that one reading of the draft model gives.
        floor: path probability below which a node is not worth a row of the target.
    """

    name = "tree"

    def __init__(
        self,
        lane: Place,
        *,
        n_vocab: int,
        batch: int | None = None,
        siblings: int = 3,
        floor: float = 0.02,
        name: str | None = None,
    ) -> None:
        super().__init__(lane, n_vocab=n_vocab, batch=batch, name=name)
        self.siblings = siblings
        self.floor = floor

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Asking[Draft]:
        return (yield from self.grow(tokens, chain, room, EMPTY_DRAFT))

    def grow(
        self, tokens: Sequence[int], chain: SamplerChain, room: Room, guess: Draft
    ) -> Asking[Draft]:
        """The best tree of at most ``room.n`` nodes from the draft model and ``guess``.

        Args:
            guess: a chain of point masses with confidences that costs nothing, or no draft.
        """
        if room.n <= 0:
            return EMPTY_DRAFT
        unread, fits = self._unread(tokens)
        row: Row | None = None
        if fits > 0:
            row = yield from self._catch_up(tokens, room, unread)
        return (yield from _Growth(self, self.request, chain, room, guess, fits, row).run())

    def row_after(self, base: int, path: list[int]) -> Asking[Row]:
        """Logits after the text and then ``path``; the lane holds the text as ``base`` tokens."""
        keep = base + min(common_prefix(self.lane.tokens[base:], path), len(path) - 1)
        rows: Rows = yield Pass(self.lane, path[keep - base :], keep=keep)
        return rows[0, : self._n_vocab]


class _Growth:
    """One round's tree."""

    def __init__(
        self,
        drafter: TreeDrafter,
        request: Request,
        chain: SamplerChain,
        room: Room,
        guess: Draft,
        fits: int,
        row: Row | None,
    ) -> None:
        self._drafter = drafter
        self._request = request
        self._room = room
        self._guess = guess
        self._fits = fits
        self._first_row = row
        self._base = len(drafter.lane.tokens)
        self._tree = TreeBuilder(max_nodes=room.n, max_leaves=request.leaves)
        self._chains: dict[int, SamplerChain] = {_ROOT: chain.fork()}
        self._weight: dict[int, float] = {_ROOT: 1.0}
        self._score: dict[int, float | None] = {_ROOT: None}
        self._guessed: dict[int, int] = {_ROOT: 0}  # node -> index of the guess that follows it
        self._reading = row is not None
        self._trunk = _ROOT  # the end of the path of best guesses
        self._best: tuple[int, float, float | None] | None = None  # behind it: token, score, lead
        self._laws: dict[int, Law] = {}  # the draft's law after a node that was read
        self._heap: list[tuple[float, int, Literal["add", "read"], int, int, float]] = []
        self._pushed = 0
        self._race = request.drawn(chain)

    def run(self) -> Asking[Draft]:
        self._offer_guess(_ROOT)
        self._push("read", _ROOT, 0, 1.0, self._weight[_ROOT])
        while self._heap and self._tree.room > 0:
            weight, _, action, node, token, share = heapq.heappop(self._heap)
            if -weight < self._drafter.floor and len(self._tree):
                break
            if action == "add":
                source = self._source(node, token)
                if source != self._drafter.name or self._wanted(node, token, -weight):
                    self._add(node, token, share, source, self._laws.get(node))
            elif self._reading and self._may_read(node):
                yield from self._read(node)
        return self._tree.build()

    def _wanted(self, parent: int, token: int, weight: float) -> bool:
        """Ask the window for a row: the best path step by step, other nodes by their weight."""
        best = self._best
        if parent != self._trunk or best is None or token != best[0]:
            return self._room.beside(weight)
        self._best = None
        if self._room.include(best[1], best[2], token):
            self._trunk = len(self._tree)  # the node that is added next
            return True
        self._reading = False
        return False

    # -- the heap --

    def _push(
        self, action: Literal["add", "read"], node: int, token: int, share: float, weight: float
    ) -> None:
        # a reading goes before a candidate of equal weight: it may find a better one
        self._pushed += 1
        order = self._pushed if action == "add" else -self._pushed
        heapq.heappush(self._heap, (-weight, order, action, node, token, share))

    def _offer_guess(self, node: int) -> None:
        """The free guess that follows ``node`` becomes a candidate."""
        at = self._guessed.get(node)
        if at is None or at >= len(self._guess):
            return
        share = self._guess.confidence[at]
        share = 0.5 if share is None else share
        self._push("add", node, self._guess.tokens[at], share, self._weight[node] * share)

    def _guess_at(self, node: int) -> int | None:
        at = self._guessed.get(node)
        return self._guess.tokens[at] if at is not None and at < len(self._guess) else None

    def _source(self, node: int, token: int) -> str:
        own = self._guess_at(node) != token
        return self._drafter.name if own else self._guess.sources[self._guessed[node]]

    def _add(
        self, parent: int, token: int, share: float, source: str, q: Law | None = None
    ) -> None:
        known = len(self._tree)
        if q is not None and q.prob(token) <= 0.0:
            q = None
        node = self._tree.add(parent, token, source, q=q, confidence=share)
        if node is None:
            return
        if parent == self._trunk and self._best is not None and token == self._best[0]:
            self._trunk, self._best = node, None  # a copy says what the model would: a free step
        if node == known:
            self._weight[node] = self._weight[parent] * share
            self._score[node] = share
            if not self._request.is_eog(token):
                self._push("read", node, 0, share, self._weight[node])
        if self._guess_at(parent) == token and node not in self._guessed:
            self._guessed[node] = self._guessed[parent] + 1
            self._offer_guess(node)

    # -- the draft model --

    def _may_read(self, node: int) -> bool:
        if node == _ROOT:
            return True
        depth = self._tree.depth(node)
        if depth >= self._fits:
            return False
        if not self._room.keep_going(depth, self._score[node]):
            self._reading = False
        return self._reading

    def _read(self, node: int) -> Asking[None]:
        """Evaluate ``node`` with the draft model and offer what may follow it."""
        drafter = self._drafter
        try:
            ahead = self._chain_at(node)
            if node == _ROOT:
                assert self._first_row is not None
                row = self._first_row
            else:
                row = yield from drafter.row_after(self._base, self._tree.path(node))
            score = confidence(row)
            if score < self._request.p_min:
                return
            law = ahead.law(row)
        except (ContextFull, EngineError):
            return  # full, NaN, or no way on under the grammar: nothing follows here
        if self._race:
            if not ahead.greedy:
                self._laws[node] = law
            seed, most = self._request.seed, drafter.siblings
            found = _finishers(law, row, ahead, seed, most)
            if node == self._trunk:
                lead = math.log(found[0][1] / found[1][1]) if len(found) > 1 else None
                self._best = (found[0][0], score, lead)
            for token, share in found:
                self._push("add", node, token, share, self._weight[node] * share)
        elif node != self._trunk or self._room.include(score, None, None):
            self._draw(node, law)
        else:
            self._reading = False

    def _chain_at(self, node: int) -> SamplerChain:
        found = self._chains.get(node)
        if found is None:
            found = self._chain_at(self._tree.parent(node)).fork()
            found.advance(self._tree.token(node))
            self._chains[node] = found
        return found

    def _draw(self, node: int, law: Law) -> None:
        """One sampled child and the likeliest other tokens beside it, all settled from the law."""
        tree, weight = self._tree, self._weight[node]
        most = min(self._drafter.siblings, tree.room, 1 + tree.spare_leaves)
        guess = self._guess_at(node)
        fixed: list[int] = [] if guess is None or most < 2 else [guess]
        left = 1.0 - sum(law.prob(t) for t in fixed)
        for i in np.lexsort((law.ids, -law.probs)):
            # a further child pays only where the law leaves something to it
            if len(fixed) + 1 >= most or weight * (left - float(law.probs[i])) < _BESIDE:
                break
            token = int(law.ids[i])
            if token not in fixed:
                if not self._room.beside(weight * float(law.probs[i])):
                    break
                fixed.append(token)
                left -= float(law.probs[i])
        outside = _without(law, fixed)
        if outside is not None and (not fixed or weight * left >= _BESIDE):
            token = self._request.coins.pick(outside.ids, outside.probs)
            if node == self._trunk:
                self._trunk = len(tree)
            self._add(node, token, max(left, 0.0), self._drafter.name, outside)
        for token in fixed:
            share = law.prob(token)
            if token == guess:
                given = self._guess.confidence[self._guessed[node]]
                share = max(share, given or 0.0)
            self._add(node, token, share, self._source(node, token))


def _finishers(
    law: Law, row: Row, ahead: SamplerChain, seed: int, most: int
) -> list[tuple[int, float]]:
    """The first ``most`` tokens of the race among the draft's law, with their shares.

    A share estimates the chance that the target's race has the same winner: the softmax of the
    log scores log q - log E. A greedy law has no noise (E = 1): its siblings are the next best
    logits and the shares their plain softmax.
    """
    if ahead.greedy:
        winner = int(law.ids[0])
        ids: IntArray = np.flatnonzero(row > row.max() - np.float32(_NEAR)).astype(np.int32)
        weights: FloatArray = np.exp((row[ids] - row.max()).astype(np.float64))
        first = ids == winner
    else:
        ids = law.ids
        weights = law.probs / exp_noise(seed, ahead.position, ids)
        first = np.zeros(len(ids), np.bool_)
        winner = int(ids[np.argmax(weights)])
    weights = weights / weights.sum()
    order = np.lexsort((ids, -weights, ~first))[:most]
    found = [(int(ids[i]), float(weights[i])) for i in order]
    if found[0][0] != winner:  # a penalty or a grammar moved the best token away from the top
        found = [(winner, found[0][1]), *found[: most - 1]]
    return found


def _without(law: Law, tokens: Sequence[int]) -> Law | None:
    """The law restricted to other tokens and renormalised; None when nothing is left."""
    if not tokens:
        return law
    keep = ~np.isin(law.ids, np.array(tokens, np.int32))
    mass = float(law.probs[keep].sum())
    if mass <= 0.0:
        return None
    return Law(law.ids[keep], law.probs[keep] / mass)


OTHER_WORDS = "the draft model's text is cut into tokens anew: no laws to branch on"


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
    blurb="The draft model's likeliest branches are checked in one pass; "
    "pays where extra rows are cheap.",
    cost="draft model",
    why_not=why_no_tree,
    open=_open,
    branches="may",
)

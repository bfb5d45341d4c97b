"""A draft model grows a token tree, best first (``BestFirst``), in one pass per depth.

Siblings. Under ``match`` the children of a node are the front-runners of the race in which the
target draws its own token (common noise). Under ``rejection`` one child is sampled, and the
likeliest other tokens join it as point masses (the hybrid rule): verification tries the sampled
child first, and its law leaves out the tokens fixed before it was drawn. How many children a node
gets is decided before the draw.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from specllama.arrays import FloatArray, Row
from specllama.backend.base import Context
from specllama.errors import ContextFull, EngineError, UsageError
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.drafting.method import Facts, Method, with_draft, with_trees
from specllama.speculative.drafting.stepping import Stepping
from specllama.speculative.effects import Keep, Pass, Steps
from specllama.speculative.noise import exp_noise
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.selection import Peaks
from specllama.speculative.tree import ROOT, BestFirst, Path
from specllama.speculative.types import EMPTY_DRAFT, Draft, Law, Room

_NEAR = 8.0  # logits; a token farther below the best is never a greedy guess
_BESIDE = 0.1  # what a further sampled or fixed sibling must have left to catch


class TreeDrafter(ChainDrafter):
    """A drafter of trees with a second model, whose lane grows the tree pass by pass; a lane that
    evaluates chains only does so node by node."""

    name = "tree"

    @property
    def width(self) -> int:
        lane = self.lane
        return lane.max_rows if min(lane.max_leaves, self.request.leaves) > 1 else 1

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Steps[Draft]:
        return (yield from grow(self, tokens, chain, room))

    def begin(self, tokens: Sequence[int], room: Room) -> Steps[tuple[Row | None, int]]:
        self._nodes: dict[Path, int] = {(): ROOT}  # what the lane has read after the text
        self._line = 0  # of these, one after the other, before it was a tree
        return (yield from super().begin(tokens, room))

    def after(self, paths: Sequence[Path]) -> Steps[Sequence[Row]]:
        if self.width == 1:
            return (yield from super().after(paths))
        n = len(self._nodes) - 1
        nodes = self._nodes | {path: node for node, path in enumerate(paths, n)}
        tokens, parents = [path[-1] for path in paths], [nodes[path[:-1]] for path in paths]
        out: Pass
        if n == self._line and parents == [n - 1]:
            out = yield Pass(self.lane, tokens)
            self._line += 1
        else:
            out = yield Pass(self.lane, tokens, "all", parents=parents, reopen=self._line)
        self._nodes = nodes
        return [*out.rows[:, : self._n_vocab]]

    def settle(self, path: Path) -> Steps[None]:
        if len(self._nodes) - 1 > self._line:
            above = (path[:n] for n in range(1, len(path) + 1))
            kept = tuple(self._nodes[part] for part in above if part in self._nodes)
            with suppress(EngineError):  # the pool lost it
                yield Keep(self.lane, path=kept)


def grow(
    model: Stepping,
    tokens: Sequence[int],
    chain: SamplerChain,
    room: Room,
    guess: Draft = EMPTY_DRAFT,
) -> Steps[Draft]:
    """Return the best tree of at most ``room.n`` nodes from a model and ``guess``.

    Args:
        guess: a chain of point masses with confidences that costs nothing, or no draft.
    """
    row, fits = yield from model.begin(tokens, room)
    growth = _Growth(model, chain, room, guess, fits, row)
    draft = yield from growth.grow()
    yield from model.settle(tuple(growth.path(growth.trunk)))
    return draft


@dataclass(frozen=True, slots=True)
class _Look:
    """The model's prediction after a node, or after all that share a row.

    Attributes:
        guesses: what may follow (token, share, law that it is drawn from); under a rule that
            samples, the sampled one first.
        score, lead: of its best guess, for the window.
        law: of the next token, where one is drawn for each node.
    """

    guesses: Sequence[tuple[int, float, Law | None]] = ()
    score: float = 0.0
    lead: float = 0.0
    law: Law | None = None


class _Growth(BestFirst):
    """One round's tree."""

    def __init__(
        self,
        model: Stepping,
        chain: SamplerChain,
        room: Room,
        guess: Draft,
        fits: int,
        row: Row | None,
    ) -> None:
        request = model.request
        super().__init__(room, leaves=request.leaves, is_end=request.is_eog, floor=model.floor)
        self._model = model
        self._request = request
        self._guess = guess
        self._fits = fits
        self._chains: dict[Path, SamplerChain] = {(): chain.fork()}
        self._looks: dict[Path, _Look] = {}
        self._shared: dict[Hashable, _Look] = {}  # what a row says
        self._reading = row is not None
        self._looked: tuple[float, float] = (0.0, 0.0)  # score and lead after the trunk
        self._peek = request.drawn(chain)  # the window may look at what was drawn
        # the best tokens of a row are guessed, else one is drawn for each node
        self._front = self._peek or not model.samples
        self._remembers = chain.remembers and model.samples
        if row is not None:
            self._looks[()] = self._look((), 1.0, self._say((), row))
        self._offer_guess(ROOT, ())

    def wants(self, parent: int, token: int, weight: float) -> bool:
        """Ask the window for a row: the best path step by step, other nodes by their weight.

        A copied guess is free to make and was weighed before.
        """
        if self._guess_at(tuple(self.path(parent))) == token:
            return True
        if not self.is_best(parent, token):
            return self.judge.row(weight)
        score, lead = self._looked
        wanted = self.judge.take(score, *((lead, token) if self._peek else (None, None)))
        if not wanted:
            self.best, self._reading = None, False
        return wanted

    def join(
        self, parent: int, token: int, share: float, source: str, q: Law | None = None
    ) -> int | None:
        if q is not None and q.prob(token) <= 0.0:
            q = None
        known = len(self)
        node = super().join(parent, token, share, source, q)
        if node == known:
            self._offer_guess(node, tuple(self.path(node)))
        return node

    # -- the free guess --

    def _offer_guess(self, node: int, path: Path) -> None:
        """Offer the free guess that follows ``node``."""
        token = self._guess_at(path)
        if token is not None:
            self.offer(node, token, self._guessed(path), self._guess.sources[len(path)])

    def _guess_at(self, path: Path) -> int | None:
        """Return the free guess after ``path``."""
        at, guess = len(path), self._guess.tokens
        return guess[at] if at < len(guess) and guess[:at] == path else None

    def _guessed(self, path: Path) -> float:
        share = self._guess.confidence[len(path)]
        return 0.5 if share is None else share

    # -- the draft model --

    def read(self, node: int) -> Steps[None]:
        """Offer the draft model's predictions after ``node``."""
        path = tuple(self.path(node))
        if path not in self._looks:
            yield from self._evaluate(node, path)
        look = self._looks.get(path, _Look())
        if not look.guesses:
            return
        if node == self.trunk:
            if not self._front and not self.judge.take(look.score, None, None):
                self._reading = False
                return
            if self._front or look.guesses[0][2] is not None:
                self.best, self._looked = look.guesses[0][0], (look.score, look.lead)
        weight, copied = self.weight[node], self._guess_at(path)
        for token, share, q in look.guesses:
            own = token != copied or (q is not None and not self._front)
            source = self._model.name if own else self._guess.sources[len(path)]
            if self._front:
                self.offer(node, token, share, source, q)
            elif q is not None or token == copied or self.judge.row(weight * share):
                self.join(node, token, share, source, q)

    def _evaluate(self, node: int, path: Path) -> Steps[None]:
        """Run a pass for a node, if the window wants one; other nodes join it."""
        model, judge, looks = self._model, self.judge, self._looks
        if not self._reading or len(path) >= self._fits or path[:-1] not in looks:
            return
        if (key := self._key(path)) in self._shared:
            looks[path] = self._look(path, self.weight[node], self._shared[key])
            return
        if node == self.trunk:
            self._reading = judge.further()
            if not self._reading:
                return
        elif not judge.further(self.weight[node]):
            return
        along = {path: self.weight[node]}
        for other, weight in self.coming(self._known) if model.width > 1 else ():
            if other in looks or len(other) >= self._fits or self._is_end(other[-1]):
                continue
            if other[:-1] not in looks and other[:-1] not in along:
                continue
            if len(along) == model.width or not judge.further(weight, len(along)):
                break
            along[other] = weight
        while True:
            try:
                rows = yield from model.after([*along])
                break
            except (ContextFull, EngineError):
                if len(along) == 1:
                    self._reading = False
                    return
                along = {path: along[path]}  # there may be room for this one
        for (read, weight), row in zip(along.items(), rows, strict=True):
            looks[read] = self._look(read, weight, self._say(read, row))

    def _known(self, path: Path) -> Iterator[tuple[int, float]]:
        """Yield the known continuations of a path, each with its probability."""
        copied = self._guess_at(path)
        if copied is not None:
            yield copied, self._guessed(path)
        if path in self._looks:
            for token, share, _ in self._looks[path].guesses:
                yield token, share

    def _key(self, path: Path) -> Hashable:
        return path if self._remembers else self._model.alike(path)

    def _look(self, path: Path, weight: float, shared: _Look) -> _Look:
        """Return the prediction after a node, by what its row says."""
        if shared.law is None:
            return shared
        return replace(shared, guesses=self._draw(path, weight, shared.law))

    def _say(self, path: Path, row: Row) -> _Look:
        """Return what a row says, for all nodes that share it."""
        if (key := self._key(path)) not in self._shared:
            self._shared[key] = self._read_row(path, row)
        return self._shared[key]

    def _read_row(self, path: Path, row: Row) -> _Look:
        """Return nothing if the row is not sure enough, is NaN, or the grammar leaves no way on."""
        request, model = self._request, self._model
        try:
            ahead = self._chain_at(path)
            score = model.sure(path, row)
            if score < request.p_min:
                return _Look()
            law = ahead.law(row).kept()
        except (EngineError, UsageError):
            return _Look()
        if not self._front:
            return _Look((), score, law=law)
        seed = request.seed if self._peek else None
        found, lead = front_runners(law, row, ahead, model.siblings, seed)
        q = None if ahead.greedy or not model.samples else law
        return _Look([(token, share, q) for token, share in found], score, lead)

    def _chain_at(self, path: Path) -> SamplerChain:
        found = self._chains.get(path)
        if found is None:
            found = self._chain_at(path[:-1]).fork()
            found.advance(path[-1])
            self._chains[path] = found
        return found

    def _draw(self, path: Path, weight: float, law: Law) -> list[tuple[int, float, Law | None]]:
        """Draw one sampled child and choose the likeliest other tokens, all by the same law."""
        most = min(self._model.siblings, self.room, 1 + self.spare_leaves)
        guess = self._guess_at(path)
        fixed: list[int] = [] if guess is None or most < 2 else [guess]
        left = 1.0 - sum(law.prob(t) for t in fixed)
        for i in Peaks(law.probs).best(most + 1):  # one of them may be fixed already
            # a further child pays only where the law leaves something to it
            if len(fixed) + 1 >= most or weight * (left - float(law.probs[i])) < _BESIDE:
                break
            token = int(law.ids[i])
            if token not in fixed:
                if not self.judge.row(weight * float(law.probs[i]), keep=False):
                    break
                fixed.append(token)
                left -= float(law.probs[i])
        drawn: list[tuple[int, float, Law | None]] = []
        outside = _without(law, fixed)
        if outside is not None and (not fixed or weight * left >= _BESIDE):
            token = self._request.coins.pick(outside.ids, outside.probs)
            drawn.append((token, max(left, 0.0), outside))
        for token in fixed:
            share = law.prob(token)
            if token == guess:
                share = max(share, self._guessed(path))
            drawn.append((token, share, None))
        return drawn


def front_runners(
    law: Law, row: Row, ahead: SamplerChain, most: int, seed: int | None
) -> tuple[list[tuple[int, float]], float]:
    """Return the best ``most`` tokens with their shares, and the lead of the first in log score.

    Greedily the shares are the softmax of the logits. With a seed they are that of log q - log E
    in the race of common noise, in which the target draws its own token; without one, the law.

    Args:
        law: what the sampler chain ``ahead`` makes of ``row``.
        seed: of the common noise; None where the rule has none.
    """
    if ahead.greedy:
        top = row.max()
        ids = np.flatnonzero(row > top - np.float32(_NEAR)).astype(np.int32)
        weights: FloatArray = np.exp((row[ids] - top).astype(np.float64))
    else:
        ids, weights = law.ids, law.probs
        if seed is not None:
            weights = weights / exp_noise(seed, ahead.position, ids)
    weights = weights / weights.sum()
    order = Peaks(weights).best(max(most, 2))
    found = [(int(ids[i]), float(weights[i])) for i in order]
    lead = float(np.log(found[0][1] / found[1][1])) if len(found) > 1 else float("inf")
    if ahead.greedy and found[0][0] != (best := int(law.ids[0])):
        # a penalty or a grammar moved the best token away from the top
        found = [(best, found[0][1]), *(guess for guess in found if guess[0] != best)]
    return found[:most], min(lead, ahead.gap)


def _without(law: Law, tokens: Sequence[int]) -> Law | None:
    """Restrict the law to other tokens and renormalise it; return None if nothing is left."""
    if not tokens:
        return law
    keep = ~np.isin(law.ids, np.array(tokens, np.int32))
    mass = float(law.probs[keep].sum())
    return Law(law.ids[keep], law.probs[keep] / mass) if mass > 0.0 else None


OTHER_WORDS = "the draft model has another tokenizer, so it gives no probabilities to branch on"


def why_no_tree(facts: Facts) -> str:
    """Explain why the draft model of a pair cannot grow trees, "" if it can."""
    return with_trees(facts) or with_draft(facts) or ("" if facts.laws else OTHER_WORDS)


METHOD = Method(
    name="tree",
    label="Token trees",
    short="draft tree",
    letter="b",
    blurb="The draft model proposes several branches, checked in one pass. "
    "Pays where extra rows are cheap.",
    cost="draft model",
    why_not=why_no_tree,
    open=lambda kit: TreeDrafter(cast("Context", kit.draft), n_vocab=kit.target.n_vocab),
    branches="may",
)

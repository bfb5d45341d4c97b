"""Verification rules: they choose the emitted tokens, given a draft and the target's laws.

All rules are lossless: the emitted tokens, continued by the target, follow the target's law.

=============  ==========================================================================
``match``      the target draws its own token with common noise and walks down the draft
               while a child equals it; seed-identical to plain decoding, any tree
``rejection``  accept with min(1, p/q), else draw from the residual (Leviathan et al. 2023;
               Chen et al. 2023); on trees children are tried in order against the running
               residual (recursive rejection), so sampled, fixed and hybrid siblings are exact
``block``      block verification (Sun et al. 2025): chains, accepts at least as much
=============  ==========================================================================

Under ``rejection`` and ``block`` a draft must not be dropped or trimmed because of a sampled token:
that biases the output. Stopping is allowed only on what was known before sampling.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from specllama.arrays import FloatArray, IntArray, Rows
from specllama.settings.params import VERIFY_RULES
from specllama.speculative.noise import draw
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import Draft, Law, Verdict

_ZERO = 1e-12  # residual mass that is rounding, not probability


@dataclass(slots=True)
class Walk:
    """The target along one path of the draft: rows [1 + n, n_vocab] through the sampler chain.

    ``scale``: logits per unit of log probability, that is, the temperature.
    """

    rows: Rows
    chain: SamplerChain
    measured: bool = True  # whether it is asked how near another token was

    @property
    def position(self) -> int:
        return self.chain.position

    @property
    def scale(self) -> float:
        return self.chain.scale

    def slack(self, token: int) -> float:
        """Return the change of logits at which the last law would not have ``token`` any more, or
        one that wins over it."""
        return self.chain.slack(token) if self.measured else math.inf

    def law(self, node: int) -> Law:
        """Return the law of the token after ``node`` (-1: after the pending token), valid when
        every token on the path to it was passed to ``advance``."""
        return self.chain.law(self.rows[node + 1])

    def advance(self, token: int) -> None:
        self.chain.advance(token)

    def fork(self) -> Walk:
        return Walk(self.rows, self.chain.fork(), self.measured)


class Coins(Protocol):
    """The two random choices a rule makes; tests replace it by exact enumeration."""

    def bern(self, probability: float) -> bool: ...

    def pick(self, ids: IntArray, weights: FloatArray) -> int: ...


class RandomCoins:
    """Coins of a numpy generator."""

    def __init__(self, seed: int | tuple[int, ...]) -> None:
        self._seed = seed

    @cached_property
    def _rng(self) -> np.random.Generator:
        return np.random.default_rng(self._seed)  # few rules flip any: a slow import

    def bern(self, probability: float) -> bool:
        # strict: u == 0.0 must not accept probability 0
        return bool(self._rng.random() < probability)

    def pick(self, ids: IntArray, weights: FloatArray) -> int:
        cumulative = np.cumsum(weights)
        at = int(np.searchsorted(cumulative, self._rng.random() * cumulative[-1], side="right"))
        return int(ids[min(at, len(ids) - 1)])


IsStop = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that judges drafts, with its demands on drafters.

    Attributes:
        common_noise: the target draws with noise that drafts share (its seed is all it needs), so
            that a plain decoder writes the same text; else coins are thrown.
        chains_only: it cannot judge branches.
        peek: decisions about a draft may look at the tokens that were drawn for it. Where they may
            not, dropping a token for its own value would bias the output.
        judge: (draft, walk, seed, coins, is_stop) to a verdict.
    """

    name: str
    common_noise: bool
    chains_only: bool
    peek: bool
    judge: Callable[[Draft, Walk, int, Coins, IsStop], Verdict]


def rule_of(name: str, *, greedy: bool = False) -> Rule:
    """Return the rule of a request. A greedy target leaves no choice: it always gets ``match``."""
    module, _, attribute = VERIFY_RULES["match" if greedy else name].partition(":")
    found: Rule = getattr(importlib.import_module(module), attribute)
    return found


def _never(token: int) -> bool:
    return False


def verify_match(
    draft: Draft, target: Walk, seed: int, coins: Coins | None = None, is_stop: IsStop = _never
) -> Verdict:
    """Sample and match with common noise. This needs no q and tolerates any draft whatsoever."""
    path: list[int] = []
    p: list[float | None] = [None] * len(draft)
    gap = math.inf
    node = -1
    while True:
        law = target.law(node)
        token, lead = draw(law, seed, target.position)
        gap = min(gap, lead * target.scale, target.slack(token))
        children = draft.children(node)
        for child in children:
            p[child] = law.prob(draft.tokens[child])
        match = next((c for c in children if draft.tokens[c] == token), None)
        if match is None:
            return _verdict(draft, path, token, bool(children), p, gap)
        path.append(match)
        if is_stop(token):
            return _verdict(draft, path, None, False, p, gap)
        target.advance(token)
        node = match


def verify_rejection(
    draft: Draft, target: Walk, seed: int, coins: Coins, is_stop: IsStop = _never
) -> Verdict:
    """Judge by rejection sampling; each sibling in order, against the residual of the last.

    ``draft.q[i]`` must be the law of node i given the siblings before it (None: point mass).
    """
    path: list[int] = []
    p_of: list[float | None] = [None] * len(draft)
    node = -1
    while True:
        law = target.law(node)
        ids, p = law.ids, law.probs
        accepted = None
        children = draft.children(node)
        for child in children:
            token, q = draft.tokens[child], draft.q[child]
            p_of[child] = law.prob(token)
            p_token = Law(ids, p).prob(token)
            q_token = draft.drawn_with(child)
            if p_token > 0.0 and coins.bern(min(1.0, p_token / q_token)):
                accepted = child
                break
            residual = np.maximum(p - _on(ids, q, token), 0.0)
            mass = float(residual.sum())
            if mass <= _ZERO:
                break
            p = residual / mass
        if accepted is None:
            keep = p > 0.0
            return _verdict(draft, path, coins.pick(ids[keep], p[keep]), bool(children), p_of)
        path.append(accepted)
        if is_stop(draft.tokens[accepted]):
            return _verdict(draft, path, None, False, p_of)
        target.advance(draft.tokens[accepted])
        node = accepted


def verify_block(
    draft: Draft, target: Walk, seed: int, coins: Coins, is_stop: IsStop = _never
) -> Verdict:
    """Verify a chain as a block: accept the longest prefix whose own coin shows heads.

    a_0 = 1, a_i = min(1, a_{i-1} p_i(x_i) / q_i(x_i)); coin i shows heads with
    h_i = Z_i / (Z_i + 1 - a_i), Z_i = sum (a_i p_{i+1} - q_{i+1})_+, and h_k = a_k. After the last
    heads at tau the next token is drawn from (a_tau p_{tau+1} - q_{tau+1})_+, or from p_{k+1}.
    """
    if not draft.is_chain:
        raise ValueError("block verification needs a chain")
    k = len(draft)
    ahead = target.fork()
    laws = [ahead.law(-1)]
    p_of: list[float | None] = [None] * k
    a = [1.0]
    stopped = False
    for i, token in enumerate(draft.tokens):
        p_token = laws[i].prob(token)
        p_of[i] = p_token
        q_token = draft.drawn_with(i)
        a.append(min(1.0, a[i] * p_token / q_token))
        if a[-1] <= 0.0:
            break  # this token and all after it can never be accepted; their laws are not needed
        if is_stop(token):
            stopped = True
            k = i + 1
            break
        ahead.advance(token)
        laws.append(ahead.law(i))
    tau = 0
    for i in range(1, len(a)):
        if a[i] <= 0.0:
            break
        if i == k:
            heads = a[i]
        else:
            z = _excess(a[i], laws[i], draft.q[i], draft.tokens[i])[1].sum()
            heads = 0.0 if z <= _ZERO else float(z / (z + (1.0 - a[i])))
        if coins.bern(heads):
            tau = i
    path = list(range(tau))
    if stopped and tau == k:
        return _verdict(draft, path, None, False, p_of)
    for token in draft.tokens[:tau]:
        target.advance(token)
    law = laws[tau]
    if tau == len(draft):
        return _verdict(draft, path, coins.pick(law.ids, law.probs), False, p_of)
    ids, weights = _excess(a[tau], law, draft.q[tau], draft.tokens[tau])
    if float(weights.sum()) <= _ZERO:
        ids, weights = law.ids, law.probs
    keep = weights > 0.0
    return _verdict(draft, path, coins.pick(ids[keep], weights[keep]), True, p_of)


# -- helpers ------------------------------------------------------------------------------------


def _verdict(
    draft: Draft,
    path: list[int],
    token: int | None,
    rejected: bool,
    p: list[float | None],
    gap: float = math.inf,
) -> Verdict:
    kind: Literal["recovered", "bonus", "plain"] = "bonus"
    if len(draft) == sum(draft.scout):
        kind = "plain"
    elif rejected:
        kind = "recovered"
    return Verdict(
        path=tuple(path),
        target_token=token,
        kind=kind,
        p=tuple(p),
        gap=None if math.isinf(gap) else gap,
    )


def _on(ids: IntArray, q: Law | None, token: int) -> FloatArray:
    """Restrict q to ``ids``; None is the point mass at ``token``."""
    if q is None:
        point: FloatArray = (ids == token).astype(np.float64)
        return point
    at: npt.NDArray[np.intp] = np.searchsorted(q.ids, ids)
    at[at == len(q.ids)] = 0
    found: FloatArray = np.where(q.ids[at] == ids, q.probs[at], 0.0)
    return found


def _excess(a: float, law: Law, q: Law | None, token: int) -> tuple[IntArray, FloatArray]:
    weights: FloatArray = np.maximum(a * law.probs - _on(law.ids, q, token), 0.0)
    return law.ids, weights


MATCH = Rule("match", common_noise=True, chains_only=False, peek=True, judge=verify_match)
REJECTION = Rule("rejection", False, chains_only=False, peek=False, judge=verify_rejection)
BLOCK = Rule("block", False, chains_only=True, peek=False, judge=verify_block)

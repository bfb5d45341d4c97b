"""Exact enumeration: every path of a randomised program, once, with its exact weight.

oracle coins     ``bern`` and ``pick`` replay a script and take the first outcome behind it
outcomes         runs a program over all scripts: (weight, result) of every path
Toy              a small conditional law over token strings, generated on demand
bias             total variation between what a program writes (continued by the target) and the
                 target itself; 0 up to rounding for a lossless rule
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specllama.arrays import FloatArray, IntArray
from specllama.speculative.types import Draft, Law, Verdict

Tokens = tuple[int, ...]


class Oracle:
    """Coins that follow a script, then always take the first possible outcome."""

    def __init__(self, script: Sequence[int] = ()) -> None:
        self._script = script
        self.weight = 1.0
        self.log: list[tuple[int, FloatArray]] = []

    def _choose(self, weights: FloatArray) -> int:
        at = len(self.log)
        choice = self._script[at] if at < len(self._script) else int(np.flatnonzero(weights)[0])
        self.log.append((choice, weights))
        self.weight *= float(weights[choice])
        return choice

    def bern(self, probability: float) -> bool:
        assert 0.0 <= probability <= 1.0
        return self._choose(np.array([1.0 - probability, probability])) == 1

    def pick(self, ids: IntArray, weights: FloatArray) -> int:
        assert len(ids) == len(weights) > 0
        assert (weights >= 0.0).all()
        return int(ids[self._choose(weights / weights.sum())])


def outcomes(program: Callable[[Oracle], Any]) -> Iterator[tuple[float, Any]]:
    """(probability, result) of every path of ``program``."""
    pending: list[list[int]] = [[]]
    while pending:
        script = pending.pop()
        oracle = Oracle(script)
        result = program(oracle)
        yield oracle.weight, result
        for depth in range(len(script), len(oracle.log)):
            taken, weights = oracle.log[depth]
            before = [choice for choice, _ in oracle.log[:depth]]
            for other in np.flatnonzero(weights):
                if other != taken:
                    pending.append([*before, int(other)])


@dataclass
class Toy:
    """A random law of the next token for every prefix.

    Attributes:
        zero: chance that a token is impossible after a given prefix.
        eos: the token after which nothing follows, or None.
        sharp: exponent on the probabilities (above 1 more certain).
    """

    n_vocab: int
    seed: int
    zero: float = 0.0
    eos: int | None = None
    sharp: float = 1.0
    fixed: Sequence[float] | None = None
    _laws: dict[Tokens, Law] = field(default_factory=dict)

    def dense(self, prefix: Tokens) -> FloatArray:
        if self.fixed is not None:
            return np.array(self.fixed, np.float64)
        rng = np.random.default_rng((self.seed, len(prefix), *prefix))
        p: FloatArray = rng.dirichlet([0.7] * self.n_vocab) ** self.sharp
        gone = rng.random(self.n_vocab) < self.zero
        gone[rng.integers(self.n_vocab)] = False
        p = np.where(gone, 0.0, p)
        return np.asarray(p / p.sum())

    def law(self, prefix: Tokens) -> Law:
        found = self._laws.get(prefix)
        if found is None:
            found = self._laws[prefix] = sparse(self.dense(prefix))
        return found


def sparse(p: FloatArray) -> Law:
    ids = np.flatnonzero(p).astype(np.int32)
    return Law(ids, p[ids])


def dense(law: Law, n_vocab: int) -> FloatArray:
    out = np.zeros(n_vocab)
    out[law.ids] = law.probs
    return out


class ToyWalk:
    """A ``Walk`` over a Toy that checks how the rule walks: laws are asked for at the node that the
    tokens passed to ``advance`` lead to."""

    def __init__(self, toy: Toy, draft: Draft, before: Tokens, passed: Tokens = ()) -> None:
        self._toy = toy
        self._draft = draft
        self._before = before
        self._passed = passed

    @property
    def position(self) -> int:
        return len(self._before) + len(self._passed)

    @property
    def scale(self) -> float:
        return 1.0

    def slack(self, token: int) -> float:
        return math.inf

    def law(self, node: int) -> Law:
        way: list[int] = []
        while node >= 0:
            way.append(self._draft.tokens[node])
            node = self._draft.parents[node]
        assert tuple(reversed(way)) == self._passed, "a law was asked for off the path"
        return self._toy.law(self._before + self._passed)

    def advance(self, token: int) -> None:
        assert token != self._toy.eos, "nothing follows a stop token"
        self._passed += (token,)

    def fork(self) -> ToyWalk:
        return ToyWalk(self._toy, self._draft, self._before, self._passed)


def emitted(draft: Draft, verdict: Verdict) -> Tokens:
    out = tuple(draft.tokens[i] for i in verdict.path)
    return out if verdict.target_token is None else (*out, verdict.target_token)


def strings(target: Toy, length: int, prefix: Tokens = ()) -> dict[Tokens, float]:
    """The target's law of whole strings (``length`` tokens, or ended by eos) behind a prefix."""
    if len(prefix) >= length or (prefix and prefix[-1] == target.eos):
        return {prefix[:length]: 1.0}
    law = target.law(prefix)
    out: dict[Tokens, float] = {}
    for token, p in zip(law.ids, law.probs, strict=True):
        for string, rest in strings(target, length, (*prefix, int(token))).items():
            out[string] = p * rest
    return out


@dataclass(frozen=True)
class Result:
    """What an enumeration found: the bias and the mean number of tokens a round emits."""

    tv: float
    mean_length: float


def bias(program: Callable[[Oracle], Tokens], target: Toy, length: int) -> Result:
    """Enumerate ``program`` and compare what it writes, continued by the target, with the target.

    Args:
        program: returns the tokens it emitted.
        length: tokens compared; longer outputs are cut there.
    """
    written: defaultdict[Tokens, float] = defaultdict(float)
    mean = total = 0.0
    for weight, tokens in outcomes(program):
        assert tokens, "a round emits at least one token"
        written[tokens[:length]] += weight
        mean += weight * len(tokens)
        total += weight
    assert math.isclose(total, 1.0, abs_tol=1e-9)
    completed: defaultdict[Tokens, float] = defaultdict(float)
    for tokens, weight in written.items():
        for string, p in strings(target, length, tokens).items():
            completed[string] += weight * p
    truth = strings(target, length)
    keys = completed.keys() | truth.keys()
    tv = 0.5 * math.fsum(abs(completed[key] - truth.get(key, 0.0)) for key in keys)
    return Result(tv, mean)

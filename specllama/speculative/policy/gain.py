"""The gain of a further guess: one formula, and pure functions of the terms of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from specllama.arrays import FloatArray
from specllama.speculative.budget import growth
from specllama.speculative.policy.constants import AHEAD, EPSILON

_COUNT = np.arange(AHEAD)

Lines: TypeAlias = tuple[FloatArray, FloatArray]


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms that a round is weighed by, fixed when it opens. Times in milliseconds.

    Attributes:
        most: guesses at most.
        v: of the target's pass by rows of its own, where each of ``others`` has as many: a row that
            is dear alone can be cheap where all take one.
        step: of the first draft step, which all share as well. further: of each behind it.
        rate: tokens that a millisecond gives elsewhere.
        stake: what the round may lose.
        depth: tokens of context.
        peek: decisions may look at drawn tokens.
    """

    most: int
    v: Sequence[float]
    step: float
    further: float
    rate: float
    stake: float
    others: int
    depth: int
    peek: bool

    @property
    def one(self) -> float:
        """The milliseconds of a plain step."""
        return self.v[1]

    def row(self, guesses: int) -> float:
        """Return the milliseconds that one more guess adds to a pass of ``guesses`` guesses."""
        return self.v[guesses + 2] - self.v[guesses + 1]

    def tokens(self, stake: float) -> float:
        """Return the tokens that the staked balance is worth elsewhere, more than 0. Conversations
        of one pass share one balance, and their guesses do not fail together."""
        return max(self.rate * stake * (1 + self.others), EPSILON)


def lines(
    terms: Terms, reached: Sequence[float], beside: int, mean: float, spent: float, stake: float
) -> Lines:
    """Return the gain of 1, 2, ... further guesses over stopping now: ``slope * a - price`` tokens.

    ``a`` is the acceptance of the next guess; guesses after it use the mean acceptance.

    Args:
        reached: probabilities that the target comes to each guess that is there, 1 before them.
        beside: rows off their path.
        spent: milliseconds of drafting when the next guess has been seen.
        stake: milliseconds that may be lost.
    """
    depth, rows = len(reached) - 1, beside + len(reached)
    v = np.array(terms.v[rows : rows + min(terms.most - rows + 1, AHEAD) + 1])
    took = spent + (v - terms.one)
    took[1:] += terms.further * _COUNT[: len(took) - 1]  # the first is that of stopping here
    if took[-1] > stake:
        took = took[: max(int(np.argmax(took > stake)), 1)]
    more, here = _COUNT[: len(took) - 1], reached[-1]
    survival = [*reached[1:], *(here * mean**more)]
    worth = growth(survival, terms.rate * took, terms.tokens(stake))[:, depth:]
    return worth[more + 1, more + 1] - worth[1:, 0], worth[0, 0] - worth[1:, 0]


def look(lines: Lines, spread: tuple[FloatArray, FloatArray]) -> float:
    """Return the tokens gained by seeing the next guess before deciding, without its own step.

    ``spread``: the acceptances that it may show, and how likely each is.
    """
    slopes, prices = lines
    acceptance, weights = spread
    gains = acceptance[:, None] * slopes - prices
    return float(weights @ gains.max(axis=1, initial=0.0))


def needed(lines: Lines) -> float:
    """Return the acceptance from which on the next guess goes."""
    slopes, prices = lines
    return min((p / s for s, p in zip(slopes, prices, strict=True) if s > 0.0), default=1.0)


def best(lines: Lines, mean: float) -> int:
    """Return how many guesses follow the next one in the draft that promises most."""
    slopes, prices = lines
    return int(np.argmax(slopes * mean - prices)) if len(slopes) else 0


def beside(likely: float, spread: tuple[FloatArray, FloatArray], rate: float, row: float) -> float:
    """Return the tokens gained by looking past a node, if only guesses worth their row go."""
    acceptance, weights = spread
    gains = likely * acceptance - rate * row
    return float(weights @ gains.clip(min=0.0))

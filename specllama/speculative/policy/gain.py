"""What a further guess gains: one formula, and pure functions of what a round is weighed by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from specllama.arrays import FloatArray
from specllama.speculative.budget import increments
from specllama.speculative.policy.constants import AHEAD, EPSILON

_COUNT = np.arange(AHEAD)

Lines: TypeAlias = tuple[FloatArray, FloatArray]
Spread: TypeAlias = tuple[FloatArray, FloatArray]


@dataclass(frozen=True, slots=True)
class Terms:
    """What a round is weighed by, fixed when it opens. Times in milliseconds.

    Attributes:
        most: guesses at most. least: fewer copied ones are not worth a round.
        v: of the target's pass by rows of its own, where each of ``others`` has as many: a row that
            is dear alone can be cheap where all take one.
        step: of the first draft step, which all share as well. further: of each behind it.
        rate: tokens that a millisecond gives elsewhere.
        stake: what the round may lose.
        depth: tokens of context.
        peek: decisions may look at drawn tokens.
    """

    most: int
    least: int
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
        """A plain step."""
        return self.v[1]

    def row(self, guesses: int) -> float:
        """What one more guess adds to a pass of ``guesses`` guesses."""
        return self.v[guesses + 2] - self.v[guesses + 1]

    def tokens(self, stake: float) -> float:
        """What the balance behind a stake is worth elsewhere, positive: in company it is one for
        all, whose guesses do not fail together."""
        return max(self.rate * stake * (1 + self.others), EPSILON)


def lines(
    terms: Terms,
    reached: Sequence[float],
    beside: int,
    mean: float,
    spread: Spread,
    spent: float,
    stake: float,
) -> Lines:
    """Expected gain of going on over stopping now: ``slope * a - price`` tokens, [ways, more].

    ``a`` is the acceptance of the next guess. Behind it go 0, 1, ... ``more`` guesses: whatever
    they show (then they have the mean acceptance), or as long as they show at least so much.
    Drafting stops where one shows less, and only the rows up to there are paid.

    Args:
        reached: probabilities that the target comes to each guess that is there, 1 before them.
        beside: rows off their path.
        spread: acceptances that a further guess may show, ascending, and how likely each is.
        spent: milliseconds of drafting when the next guess has been seen.
        stake: milliseconds that may be lost.
    """
    depth, rows = len(reached) - 1, beside + len(reached)
    v = np.array(terms.v[rows : rows + min(terms.most - rows + 1, AHEAD) + 1])
    took = spent + (v - terms.one)
    took[1:] += terms.further * _COUNT[: len(took) - 1]  # the first is that of stopping here
    if took[-1] > stake:
        took = took[: max(int(np.argmax(took > stake)), 1)]
    more = _COUNT[: len(took) - 1]
    each = increments(depth + len(more), terms.rate * took, terms.tokens(stake))
    stay = each[:, : depth + 1] @ np.array([1.0, *reached[1:]])
    goes, acceptance = _ways(mean, spread)
    survival = reached[-1] * acceptance[:, None] ** more
    slopes = survival @ np.tril(each[1:, depth + 1 :]).T
    prices = np.broadcast_to(stay[0] - stay[1:], slopes.shape)
    going = goes[:, None] ** more
    late = terms.rate * terms.further * (1.0 - going)  # the guess that is seen in vain
    return _unless(going, slopes), _unless(going, prices) + late


def _ways(mean: float, spread: Spread) -> Spread:
    """How likely a further guess goes, and its acceptance then: all of them, and those that show
    at least as much as each part of the spread."""
    acceptance, weights = spread
    goes = weights[::-1].cumsum()
    worth = (weights * acceptance)[::-1].cumsum() / goes
    return np.array([1.0, *goes]), np.array([mean, *worth])


def _unless(going: FloatArray, values: FloatArray) -> FloatArray:
    """The means where each further guess is sent only if those before it were."""
    steps = np.diff(values, axis=1, prepend=0.0)
    means: FloatArray = (going * steps).cumsum(axis=1)
    return means


def look(lines: Lines, spread: Spread) -> float:
    """Tokens gained by seeing the next guess and then deciding, its own step not deducted."""
    slopes, prices = lines
    acceptance, weights = spread
    gains = acceptance[:, None] * slopes.ravel() - prices.ravel()
    return float(weights @ gains.max(axis=1, initial=0.0))


def needed(lines: Lines) -> float:
    """Acceptance from which on the next guess goes."""
    slopes, prices = lines
    pays = slopes > 0.0
    return float((prices[pays] / slopes[pays]).min(initial=1.0))


def best(lines: Lines, mean: float) -> int:
    """How many guesses follow the next one in the draft that promises most."""
    slopes, prices = lines
    return int(np.argmax(slopes * mean - prices)) % slopes.shape[1] if slopes.size else 0


def beside(likely: float, spread: Spread, rate: float, row: float) -> float:
    """Tokens gained by seeing what follows a node, where only what pays its row goes."""
    acceptance, weights = spread
    gains = likely * acceptance - rate * row
    return float(weights @ gains.clip(min=0.0))

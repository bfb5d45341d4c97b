"""A draft model's guesses as bets: what sending or seeing one more is expected to gain.

A round that drafts pays for its rows and steps first and wins tokens if the guesses hold. What it
may lose is bounded by a credit, so the mean gain alone does not decide: of two drafts with the same
mean the one that can empty the credit forbids all others for a long time. The mean of the logarithm
of what is left of the credit decides (Kelly 1956); far from ruin that is the mean gain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import mul

from specllama.speculative.calibrate import SourceState

_LOOK_AHEAD = 8  # guesses
NEGLIGIBLE = 0.02  # survival below which looking further ahead is pointless
_RUIN = 1e-3  # share of the credit that counts as none


def logs(purse: float, cost: float, tokens: int) -> list[float]:
    """Logarithm of what is left of the purse after 0, 1, ..., ``tokens`` accepted guesses.

    All in plain steps; ``cost`` is what the round takes beyond one.
    """
    share = 1.0 / purse
    left = 1.0 - cost * share
    return [math.log(max(left + j * share, _RUIN)) for j in range(tokens + 1)]


def growth(survival: Sequence[float], cost: float, purse: float) -> float:
    """Mean logarithm of what a draft makes of the purse.

    ``survival`` are the probabilities that guess 1, 2, ... and all before it are accepted.
    """
    after = logs(purse, cost, len(survival))
    return after[0] + sum(s * (b - a) for s, (a, b) in zip(survival, pairwise(after), strict=True))


@dataclass(slots=True)
class Bets:
    """One round of a source that pays per guess. Times in milliseconds.

    Attributes:
        v: a pass by rows.
        step: revealing one more guess.
        rate: tokens that a millisecond is worth elsewhere.
        purse: plain steps that may be lost. stake: the same as a time.
        most: rows of guesses there is room for.
        taken: rows that somebody else's guesses take in the same pass.
        spent: on revealing guesses so far, the next one included.
        reached: probability that the target comes to guess 1, 2, ... of those sent, and behind.
    """

    v: Sequence[float]
    step: float
    rate: float
    purse: float
    stake: float
    most: int
    taken: int = 0
    spent: float = 0.0
    reached: list[float] = field(default_factory=lambda: [1.0])

    def send(self, a: float) -> None:
        """The next guess goes; it is right with probability ``a``."""
        self.reached.append(self.reached[-1] * a)

    @property
    def survival(self) -> float:
        """Probability that the target follows all that was sent."""
        return self.reached[-1]

    def _lines(self, mean: float) -> list[tuple[float, float]]:
        """For 1, 2, ... more guesses: (slope, price) of the gain ``slope * a - price``.

        ``a`` is the acceptance of the next guess, those behind it count with the ``mean``. The
        gain, over stopping here, is in tokens (the logarithm times the purse).
        """
        v, reached, purse = self.v, self.reached, self.purse
        depth = len(reached) - 1
        rows = self.taken + depth
        here = reached[depth]
        missed = [1.0 - reached[0]] + [a - b for a, b in pairwise(reached)]

        def early(left: Sequence[float]) -> float:
            """Of the outcomes that are decided by what was sent."""
            return missed[0] * left[0] + float(sum(map(mul, missed[1:], left)))

        left = logs(self.purse, self.rate * (self.spent + v[rows + 1] - v[1]), depth)
        stop = early(left) + here * left[depth]
        lines = []
        power = 1.0
        for k in range(1, min(self.most - rows, _LOOK_AHEAD) + 1):
            took = self.spent + (k - 1) * self.step + v[rows + k + 1] - v[1]
            if took > self.stake:
                break
            left = logs(self.purse, self.rate * took, depth + k)
            hit, follow = 0.0, 1.0
            for j in range(depth + 1, depth + k):
                hit += follow * (1.0 - mean) * left[j]
                follow *= mean
            hit += follow * left[depth + k]
            price = stop - early(left) - here * left[depth]
            lines.append((purse * here * (hit - left[depth]), purse * price))
            power *= mean
            if here * power < NEGLIGIBLE:
                break
        return lines

    def gain(self, state: SourceState, a: float) -> float:
        """Best expected gain of sending the next guess (and perhaps more), in tokens."""
        return max((slope * a - price for slope, price in self._lines(state.mean_next)), default=-1)

    def needed(self, state: SourceState) -> float:
        """Acceptance from which on the next guess is worth sending."""
        lines = self._lines(state.mean_next)
        return min((price / slope for slope, price in lines if slope > 0.0), default=1.0)

    def look(self, state: SourceState) -> float:
        """Expected gain of seeing the next guess and then deciding, its own step not deducted."""
        lines = self._lines(state.mean_next)
        total = 0.0
        for a, weight in state.spread():
            best = 0.0
            for slope, price in lines:
                gain = slope * a - price
                if gain > best:
                    best = gain
            total += weight * best
        return total

    def promise(self, state: SourceState, price: float) -> tuple[float, float]:
        """(tokens, ms): what a look would be worth if the credit were no matter, and the least
        stake with which it would be worth its price (0.0 if it never is)."""
        v, rows, mean = self.v, self.taken, state.mean_next
        spread = state.spread()
        best = [0.0] * len(spread)
        reach, power, least, total = 0.0, self.survival, 0.0, 0.0
        for k in range(1, min(self.most - rows, _LOOK_AHEAD) + 1):
            reach += power
            cost = self.rate * ((k - 1) * self.step + v[rows + k + 1] - v[rows + 1])
            best = [max(b, reach * a - cost) for b, (a, _) in zip(best, spread, strict=True)]
            total = sum(b * weight for b, (_, weight) in zip(best, spread, strict=True))
            if not least and total > price:
                least = v[rows + k + 1] - v[1] + k * self.step
            power *= mean
        return total, least

    def dear(self, ms: float) -> float:
        """A sure expense as the logarithm sees it: the more of the purse it takes, the dearer."""
        share = self.rate * ms / self.purse
        return ms * -math.log(max(1.0 - share, _RUIN)) / share if share > 0.0 else ms

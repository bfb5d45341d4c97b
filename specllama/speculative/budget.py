"""The gain formula, and the budget of rows for all conversations that share a pass.

A round that drafts pays for its rows and steps first and wins tokens if the guesses hold. What it
may lose is bounded by a balance, so the mean gain alone does not decide: of two drafts with the
same mean the one that can empty the balance forbids all others for a long time. The mean of the
logarithm of what is left of the balance decides (Kelly 1956); far from ruin that is the mean gain.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specllama.arrays import FloatArray

_RUIN = 1e-3  # share of a balance that counts as none


def growth(survival: Sequence[float], costs: FloatArray, balance: float) -> FloatArray:
    """Return the worth of the first 0, 1, ... guesses, in tokens: ``[costs, guesses + 1]``.

    Args:
        survival: probabilities that guess 1, 2, ... and all before it are accepted.
        costs: what the round takes beyond a plain step, in the tokens that it could give elsewhere.
        balance: tokens that may be lost; positive.
    """
    tokens = np.arange(len(survival) + 1)
    left = 1.0 + (tokens - costs[:, None]) / balance
    after: FloatArray = balance * np.log(np.maximum(left, _RUIN))
    after[:, 1:] = (after[:, 1:] - after[:, :-1]) * survival
    return after.cumsum(axis=1)


@dataclass(frozen=True, slots=True)
class Bid:
    """The guesses that one conversation wants checked in a shared pass.

    Attributes:
        survival: see ``growth``; never rising.
        pace: tokens that a millisecond is worth to it elsewhere.
        balance: tokens that it may lose.
        passes: milliseconds of the target's passes of 0, 1, ... up to that many rows; zeros where
            nothing is known.
    """

    survival: Sequence[float]
    pace: float
    balance: float
    passes: Callable[[int], Sequence[float]] = lambda rows: [0.0] * (rows + 1)


def allocate(bids: Sequence[Bid], v: Sequence[float], *, taken: int = 1) -> tuple[list[int], float]:
    """Choose how many guesses of each bid go into a pass that all pay for; return the gain, too.

    For a given number of rows the best are those with the largest increments of ``growth``, and
    increments within a bid never rise, so prefixes are kept. Every number is tried: kernels make
    some dear and the next cheap.

    Args:
        v: milliseconds of a pass by rows; ``len(v) - 1`` is the widest.
        taken: rows that the pass has anyway.

    Returns:
        (guesses by bid, tokens over drafting nothing); all 0 where no draft is worth its rows.
    """
    best, worth = [0] * len(bids), 0.0
    most = min(len(v) - 1 - taken, sum(len(bid.survival) for bid in bids))
    took = np.array(v[taken + 1 : taken + most + 1]) - v[taken]
    tables = [growth(bid.survival, bid.pace * took, bid.balance).tolist() for bid in bids]
    for rows in range(1, most + 1):
        after = [table[rows - 1] for table in tables]
        total = sum(values[0] for values in after)
        heap = [(x[0] - x[1], i, 1) for i, x in enumerate(after) if len(x) > 1]
        heapq.heapify(heap)
        given = [0] * len(bids)
        for _ in range(rows):
            gain, i, depth = heapq.heappop(heap)
            given[i] = depth
            total -= gain
            if depth + 1 < len(after[i]):
                heapq.heappush(heap, (after[i][depth] - after[i][depth + 1], i, depth + 1))
        if total > worth:
            best, worth = given, total
    return best, worth

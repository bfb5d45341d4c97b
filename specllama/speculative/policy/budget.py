"""The one gain formula, and one budget of rows for all who share a pass.

A round that drafts pays for its rows and steps first and wins tokens if the guesses hold. What it
may lose is bounded by a balance, so the mean gain alone does not decide: of two drafts with the
same mean the one that can empty the balance forbids all others for a long time. The mean of the
logarithm of what is left of the balance decides (Kelly 1956); far from ruin that is the mean gain.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import mul

_RUIN = 1e-3  # share of a balance that counts as none


def logs(balance: float, cost: float, tokens: int) -> list[float]:
    """``balance * log`` of the share of it that is left after 0, 1, ..., ``tokens`` accepted
    guesses of a round that takes ``cost`` beyond a plain step; all in tokens."""
    left = 1.0 - cost / balance
    share = 1.0 / balance
    return [balance * math.log(max(left + j * share, _RUIN)) for j in range(tokens + 1)]


def growth(survival: Sequence[float], cost: float, balance: float) -> float:
    """What a draft is worth, in tokens.

    Args:
        survival: probabilities that guess 1, 2, ... and all before it are accepted.
        cost: what the round takes beyond a plain step, in the tokens that it could give elsewhere.
        balance: tokens that may be lost; positive.
    """
    after = logs(balance, cost, len(survival))
    gained: float = sum(map(mul, survival, (b - a for a, b in pairwise(after))))
    return after[0] + gained


@dataclass(frozen=True, slots=True)
class Bid:
    """What one conversation would have checked in a pass that others share.

    Attributes:
        survival: see ``growth``; never rising.
        pace: tokens that a millisecond is worth to it elsewhere.
        balance: tokens that it may lose.
    """

    survival: Sequence[float]
    pace: float
    balance: float


def allocate(
    bids: Sequence[Bid], v: Sequence[float], *, taken: int = 1, spent: float = 0.0
) -> tuple[list[int], float]:
    """How many guesses of each bid go into a pass that all pay for, and what that is worth.

    For a given number of rows the best are those with the largest increments of ``growth``, and
    increments within a bid never rise, so prefixes are kept. Every number is tried: kernels make
    some dear and the next cheap.

    Args:
        v: milliseconds of a pass by rows; ``len(v) - 1`` is the widest.
        taken: rows that the pass has anyway. spent: milliseconds of drafting so far.

    Returns:
        (guesses by bid, tokens over drafting nothing); all 0 where no draft is worth its rows.
    """
    best, worth = [0] * len(bids), 0.0
    most = min(len(v) - 1 - taken, sum(len(bid.survival) for bid in bids))
    for rows in range(1, most + 1):
        took = spent + v[taken + rows] - v[taken]
        after = [logs(x.balance, x.pace * took, min(len(x.survival), rows)) for x in bids]
        total = sum(left[0] for left in after)
        heap = [
            (-bid.survival[0] * (after[i][1] - after[i][0]), i, 1)
            for i, bid in enumerate(bids)
            if bid.survival
        ]
        heapq.heapify(heap)
        given = [0] * len(bids)
        for _ in range(rows):
            gain, i, depth = heapq.heappop(heap)
            given[i] = depth
            total -= gain
            if depth < min(len(bids[i].survival), rows):
                more = bids[i].survival[depth] * (after[i][depth + 1] - after[i][depth])
                heapq.heappush(heap, (-more, i, depth + 1))
        if total > worth:
            best, worth = given, total
    return best, worth

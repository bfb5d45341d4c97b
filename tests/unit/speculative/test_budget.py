"""The gain formula, and one budget of rows for all who share a pass."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from specllama.speculative.budget import Bid, allocate, growth

RICH = 1e6


def value(survival: Sequence[float], cost: float, balance: float) -> float:
    """What a whole draft is worth."""
    return float(growth(survival, np.array([cost]), balance)[0, -1])


def falling(rng: random.Random, n: int) -> list[float]:
    survival, left = [], 1.0
    for _ in range(n):
        left *= rng.random()
        survival.append(left)
    return survival


def test_far_from_ruin_a_draft_is_worth_its_mean() -> None:
    assert value([0.9, 0.7, 0.4], 1.2, RICH) == pytest.approx(0.9 + 0.7 + 0.4 - 1.2, abs=1e-4)
    assert value((), 0.0, 5.0) == 0.0


def test_near_ruin_the_logarithm_decides() -> None:
    values = [value([0.6, 0.4, 0.3], 0.9, balance) for balance in (1.0, 2.0, 4.0, 16.0, RICH)]
    assert values == sorted(values)
    assert values[0] < 0.0 < values[-1]
    # a sure expense is dearer the more of the balance it takes
    assert [-value((), cost, 10.0) / cost for cost in (1.0, 5.0, 9.0)] == pytest.approx(
        [1.0536, 1.3863, 2.5584], abs=1e-3
    )


def test_growth_is_the_expected_logarithm_of_what_is_left() -> None:
    """Every outcome of a round, enumerated."""
    acceptance, cost, balance = (0.9, 0.7, 0.8), 1.7, 5.0
    survival = [math.prod(acceptance[: i + 1]) for i in range(3)]
    expected, reached = 0.0, 1.0
    for accepted, hit in enumerate((*acceptance, 0.0)):
        expected += reached * (1.0 - hit) * math.log(1.0 + (accepted - cost) / balance)
        reached *= hit
    assert value(survival, cost, balance) == pytest.approx(balance * expected)


@pytest.mark.parametrize("seed", range(60))
def test_no_other_allocation_is_worth_more(seed: int) -> None:
    """Against every way to give the rows, on costs with steps as kernels have them."""
    rng = random.Random(seed)
    rows = rng.randint(3, 9)
    v = [0.0, 1.0]
    for _ in range(rows):
        v.append(max(v[-1] + rng.choice((-0.1, 0.05, 0.4, 0.9)), 0.5))
    bids = [
        Bid(
            falling(rng, rng.randint(0, 3)),
            rng.choice((1.0, 1.5, 3.0)),
            rng.choice((1.5, 4.0, 9.0)),
        )
        for _ in range(rng.randint(1, 3))
    ]
    taken = rng.randint(1, 2)

    def worth(given: tuple[int, ...]) -> float:
        took = v[taken + sum(given)] - v[taken]
        return sum(
            value(bid.survival[:n], bid.pace * took, bid.balance)
            for n, bid in zip(given, bids, strict=True)
        )

    options = product(*(range(len(bid.survival) + 1) for bid in bids))
    best = max(
        (worth(given) for given in options if 0 < sum(given) <= len(v) - 1 - taken), default=0.0
    )
    found, total = allocate(bids, v, taken=taken)
    assert total == pytest.approx(max(best, 0.0))
    assert total == pytest.approx(worth(tuple(found)) if any(found) else 0.0)


def test_a_dear_middle_is_stepped_over_to_a_cheap_group() -> None:
    v = [0.0, 1.0, 1.9, 2.8, 1.4]
    assert allocate([Bid([0.9, 0.85, 0.8], 1.0, 8.0)], v)[0] == [3]
    bids = [Bid([0.7], 1.0, 8.0) for _ in range(3)]
    # three conversations fill a group that none of them would open alone
    assert allocate(bids[:1], v)[0] == [0]
    assert allocate(bids, [0.0, *v], taken=2)[0] == [1, 1, 1]


def test_a_copy_goes_less_far_the_less_may_be_lost() -> None:
    v = [0.0, *(1 + 0.35 * n for n in range(17))]
    survival = [0.93**n for n in range(1, 16)]
    lengths = [allocate([Bid(survival, 1.0, b)], v)[0][0] for b in (0.3, 1.0, 2.0, 4.0, 16.0, RICH)]
    assert lengths[2:] == sorted(lengths[2:])
    assert lengths[0] < lengths[-2] < lengths[-1]


def test_nothing_is_given_where_nothing_pays() -> None:
    assert allocate([], [0.0, 1.0, 2.0]) == ([], 0.0)
    assert allocate([Bid([], 1.0, 8.0)], [0.0, 1.0, 2.0]) == ([0], 0.0)
    assert allocate([Bid([0.3], 1.0, 8.0)], [0.0, 1.0, 1.9]) == ([0], 0.0)
    assert allocate([Bid([0.9], 1.0, 8.0)], [0.0, 1.0]) == ([0], 0.0)  # the pass is full

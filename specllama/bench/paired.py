"""How fast a way to draft is against plain decoding, by the clock: one estimator for every table.

Runs come in pairs that differ in nothing but the way. The ratio is the geometric mean of the
ratios of their speeds, and the speeds that are shown are geometric means of the same runs: what two
columns say is what the verdict says. How sure it is follows from how much the pairs differ, pooled
over the rows of a table (Student's t on logarithms).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

LEVEL = 0.05  # 1 in 20 intervals misses the truth
# After every pair of a race the interval is looked at: eight looks at this level miss as seldom.
LOOKED_AT = 0.01

Pairs = Sequence[tuple[float, float]]
"""Speeds, plainly and the other way."""


@dataclass(frozen=True, slots=True)
class Compared:
    """``low`` and ``high`` are None where no row has a second pair."""

    plain: float
    speed: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def ratio(self) -> float:
        return self.speed / self.plain


def compare(
    rows: Sequence[Pairs], *, level: float = LEVEL, shared: bool = False
) -> list[Compared | None]:
    """Each row of a table; None of one without a pair.

    Args:
        shared: the rows have their plain runs in common, so that they err together.
    """
    logs = [[math.log(way / plain) for plain, way in row] for row in rows]
    means = [fmean(row) if row else 0.0 for row in logs]
    free = float(sum(max(len(row) - 1, 0) for row in logs))
    squares = sum((one - mean) ** 2 for row, mean in zip(logs, means, strict=True) for one in row)
    spread = math.sqrt(squares / free) if free else 0.0
    if shared:  # half of each difference is the plain run's, which all rows have in common
        free /= 1 + (sum(bool(row) for row in logs) - 1) / 4
    found: list[Compared | None] = []
    for row, of_row, mean in zip(rows, logs, means, strict=True):
        if not of_row:
            found.append(None)
            continue
        low = high = None
        if free >= 1:
            reach = student(level, int(free)) * spread / math.sqrt(len(of_row))
            low, high = math.exp(mean - reach), math.exp(mean + reach)
        plain = geometric([plain for plain, _ in row])
        found.append(Compared(plain, plain * math.exp(mean), low, high, len(row)))
    return found


def geometric(values: Sequence[float]) -> float:
    return math.exp(fmean(math.log(value) for value in values))


def student(level: float, free: int) -> float:
    """What Student's t exceeds, in either direction, with probability ``level``."""
    if free == 1:
        return 1 / math.tan(level * math.pi / 2)
    if free == 2:
        return math.sqrt(2 / (level * (2 - level)) - 2)
    z = NormalDist().inv_cdf(1 - level / 2)  # and the Cornish-Fisher expansion from there
    return (
        z
        + (z**3 + z) / (4 * free)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * free**4)
    )

"""The speed of a way to draft against plain decoding, by the clock: one estimator for every table.

Runs come in pairs that differ in nothing but the way. The ratio is the geometric mean of the
ratios of their speeds, and the speeds that are shown are geometric means of the same runs: what two
columns say is what the verdict says. How sure it is follows from how much the pairs of a row
differ, pooled over the rows of a table (Student's t on logarithms).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

from specllama.verdict import WIDE, Interval

LEVEL = 0.05  # 1 in 20 intervals misses the truth
# After every pair of a race the interval is looked at: eight looks at this level miss as seldom.
LOOKED_AT = 0.01

Pairs = Sequence[tuple[float, float]]
"""Speeds, plainly and the other way."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A comparison; ``low`` and ``high`` are None if no row has a second pair."""

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
    """Compare each row of a table; None for a row without a pair.

    Args:
        shared: the rows have their plain runs in common, so that they err together.
    """
    spread, free = _noise(rows)
    if shared:  # half of each difference is the plain run's, which all rows have in common
        free /= 1 + (sum(map(bool, rows)) - 1) / 4
    return [_compared(row, spread, free, level) for row in rows]


def as_one(rows: Sequence[Pairs], table: Sequence[Pairs] = ()) -> Compared | None:
    """Combine rows into one figure, such as prompts with different gains. Its certainty follows
    from the differences between the pairs of each row, so it holds for these prompts.

    Args:
        table: the rows that say how much pairs differ; these unless given.
    """
    return _compared([pair for row in rows for pair in row], *_noise(table or rows), LEVEL)


def _noise(rows: Sequence[Pairs]) -> tuple[float, float]:
    """Return the standard deviation of a pair's logarithm, and its degrees of freedom."""
    logs = [_logs(row) for row in rows if row]
    free = float(sum(len(row) - 1 for row in logs))
    squares = sum((one - fmean(row)) ** 2 for row in logs for one in row)
    return math.sqrt(squares / free) if free else 0.0, free


def _compared(row: Pairs, spread: float, free: float, level: float) -> Compared | None:
    if not row:
        return None
    mean = fmean(_logs(row))
    low = high = None
    if free >= 1:
        reach = student(level, int(free)) * spread / math.sqrt(len(row))
        low, high = math.exp(mean - reach), math.exp(mean + reach)
    plain = geometric([plain for plain, _ in row])
    return Compared(plain, plain * math.exp(mean), low, high, len(row))


def _logs(row: Pairs) -> list[float]:
    return [math.log(way / plain) for plain, way in row]


def geometric(values: Sequence[float]) -> float:
    return math.exp(fmean(math.log(value) for value in values))


def student(level: float, free: int) -> float:
    """Return the value that Student's t exceeds, in size, with probability ``level``."""
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


# ---- in words


def between(one: Interval) -> str:
    """Format a range such as "0.62–0.86"."""
    return "" if one.low is None or one.high is None else f"{one.low:.2f}–{one.high:.2f}"


def ratio_words(one: Interval) -> str:
    """Format a ratio such as "0.74× (0.62–0.86)"; "" if the range is too wide to be a figure."""
    wide = one.low is not None and one.high is not None and one.high > WIDE * one.low
    if one.ratio is None or wide:
        return ""
    interval = between(one)
    return f"{one.ratio:.2f}×" + (f" ({interval})" if interval else "")

"""The measured costs of passes here: v(n, depth) = a(n) + b * n * depth.

``n`` rows behind ``depth`` tokens of context. Kernels make a(n) neither linear nor monotone (CPU
kernels work on groups of four rows, CUDA switches kernels), so it is a table: the level a(1) times
a ratio per row count. The level follows drift quickly, ratios are properties of the kernels and
move slowly. Attention is what depth costs, and every row pays it again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median_low

from specllama.speculative.policy.constants import CELLS, GAIN, OUTLIER, SETTLE, SINGLES, SLOPE
from specllama.speculative.types import Booking


@dataclass
class CostTable:
    """Milliseconds of a pass of n rows at a depth.

    Attributes:
        level: of one row without context; None before it is known.
        deep: per row and 1000 tokens of depth.
        ratios: a(n) in single passes, by cell. What lies between is interpolated; beyond the last
            cell its mean slope continues.
        counts: passes timed, by cell.
        sure: covariance of ``level`` and ``deep``, in that of one measurement.
    """

    level: float | None = None
    deep: float = 0.0
    ratios: dict[int, float] = field(default_factory=lambda: {1: 1.0})
    counts: dict[int, int] = field(default_factory=dict)
    sure: tuple[float, float, float] = (GAIN, 0.0, 1.0)

    def __post_init__(self) -> None:
        self._flat: list[float] = []  # ratios by rows
        self._bounds: dict[int, float] = {}  # and what they may be at most
        self._expected: set[int] = set()  # cells whose ratios are known, not their times
        self._early: dict[int, list[float]] = {}  # first samples, by cell
        # a restored table keeps adapting: old counts weigh little
        self.counts = {cell: min(n, _first(cell)) for cell, n in self.counts.items()}
        numbers = (*self.ratios.values(), 1.0 if self.level is None else self.level)
        if any(cell not in CELLS for cell in (*self.ratios, *self.counts)) or 1 not in self.ratios:
            raise ValueError("no such cell")
        if min(numbers) <= 0.0 or self.deep < 0.0 or min(self.sure[0], self.sure[2]) < 0.0:
            raise ValueError("times are positive")

    def seen(self, rows: int) -> int:
        """Count the timed passes of about that width."""
        return self.counts.get(_cell(rows), 0)

    @property
    def settled(self) -> bool:
        """True if single passes were timed often enough to know this machine's level."""
        return self.seen(1) >= SINGLES

    def known(self, rows: int) -> bool:
        """True if passes of that width were timed often enough to call a dear one an outlier."""
        return self.seen(rows) >= SETTLE

    def ratio(self, rows: int) -> float:
        """Return a(rows) in single passes."""
        if rows in self.ratios:
            return self.ratios[rows]
        cells = sorted(self.ratios)
        at = bisect_right(cells, rows)
        below, low = cells[at - 1], self.ratios[cells[at - 1]]
        if at < len(cells):
            slope = (self.ratios[cells[at]] - low) / (cells[at] - below)
        else:  # of a wider pass that seemed to cost less no slope can be told
            slope = (low - 1.0) / (below - 1) if low > 1.0 else SLOPE
        return low + slope * (rows - below)

    def ms(self, rows: int, depth: int = 0) -> float:
        """Return the expected milliseconds of a pass; 0 rows cost nothing."""
        if rows <= 0:
            return 0.0
        return (self.level or 0.0) * self.ratio(rows) + self.deep_ms * rows * depth

    @property
    def deep_ms(self) -> float:
        """The milliseconds that a token of depth adds to a pass of one row."""
        return self.deep / 1000.0

    def most(self, rows: int, depth: int = 0) -> float:
        """Return the most milliseconds that a pass may take: if none like it was timed, each row
        beyond a narrower one may take a pass of its own."""
        if rows not in self._bounds:
            below = max(cell for cell in self.ratios if cell <= _cell(rows))
            self._bounds[rows] = self.ratios[below] + max(rows - below, 0)
        return (self.level or 0.0) * self._bounds[rows] + self.deep_ms * rows * depth

    def upto(self, rows: int, depth: int = 0) -> list[float]:
        """Return ``[0, ms(1), ..., ms(rows)]``, indexed by row count."""
        if len(self._flat) <= rows:
            self._flat = [0.0, *(self.ratio(n) for n in range(1, rows + 1))]
        one, deep = self.level or 0.0, self.deep_ms * depth
        return [one * r + deep * n for n, r in enumerate(self._flat[: rows + 1])]

    def within(self, rows: int, ms: float, depth: int = 0) -> int:
        """Return the most of ``rows`` rows that are surely read in ``ms``."""
        for cell in sorted((cell for cell in self.ratios if cell <= rows), reverse=True):
            if self.most(cell, depth) <= ms:
                upto = range(rows + 1)
                return bisect_right(upto, ms, lo=cell, key=lambda n: self.most(n, depth)) - 1
            rows = cell - 1
        return 0

    def guess(self, ms: float) -> None:
        """Set a prior for one row, used until one is timed."""
        if not self.seen(1):
            self.level = ms

    def set(self, rows: int, ms: float, depth: int = 0) -> None:
        """Take over a careful measurement (a calibration run) at once."""
        self._take(_cell(rows), self._without(ms, rows, depth), rows)
        self.counts[_cell(rows)] = _first(rows)

    def _without(self, ms: float, rows: int, depth: int) -> float:
        """Return the milliseconds of such a pass without context."""
        return max(ms - self.deep_ms * rows * depth, ms / 2)

    def _take(self, cell: int, flat: float, rows: int) -> None:
        """Take over the time of a pass without context.

        Until the level is settled the other cells keep their times: it was wrong, the machine has
        not changed.
        """
        if cell == 1:
            scale = 1.0 if self.settled or not self.level else self.level / flat
            kept = {1, *self._expected}
            self.ratios = {n: r * (1.0 if n in kept else scale) for n, r in self.ratios.items()}
            self.level = flat
        elif self.level:  # one by one is never dearer
            self.ratios[cell] = min(flat / self.level, rows) * cell / rows
        self._flat, self._bounds = [], {}

    def expect(self, ratios: Mapping[int, float]) -> None:
        """Take over the costs of passes, in single ones, that were measured elsewhere than in this
        table, where it knows nothing better."""
        new = {n: ratio for n, ratio in ratios.items() if n > 1 and not self.seen(n)}
        if new:
            self.ratios |= new
            self.counts |= {n: _first(n) for n in new}
            self._expected |= set(new)
            self._flat, self._bounds = [], {}

    def observe(self, rows: int, ms: float, depth: int = 0) -> None:
        """Learn that one pass of ``rows`` rows took ``ms``."""
        if ms <= 0.0 or rows <= 0:
            return
        cell = _cell(rows)
        seen = self.counts[cell] = self.counts.get(cell, 0) + 1
        if seen <= _first(cell):
            known = [self.level * self.ratio(cell)] if self.level else []
            early = self._early.setdefault(cell, known * (seen - 1))
            early.append(self._without(ms, rows, depth))
            self._take(cell, median_low(early), rows)
        elif self.level:
            expected = self.ms(rows, depth)
            surprise = min(max(ms / expected, 1.0 / OUTLIER), OUTLIER) - 1.0
            if cell == 1:
                self._correct(self.level, expected * surprise, depth / 1000.0)
            else:
                self.ratios[cell] *= 1.0 + max(GAIN / SETTLE, 1 / seen) * surprise
                self._flat, self._bounds = [], {}

    def _correct(self, known: float, error: float, depth: float) -> None:
        """Divide the excess of a single pass over its forecast between the level and the depth: a
        Kalman filter whose level drifts, by so much that it follows with ``GAIN``."""
        aa, ab, bb = self.sure
        aa += GAIN * GAIN
        level, deep = aa + ab * depth, ab + bb * depth
        scale = 1.0 / (1.0 + level + deep * depth)
        self.level = max(known + level * scale * error, known / 2)
        self.deep = max(self.deep + deep * scale * error, 0.0)
        self.sure = aa - level**2 * scale, ab - level * deep * scale, bb - deep**2 * scale


def _first(cell: int) -> int:
    return SETTLE if cell > 1 else SINGLES


def _cell(rows: int) -> int:
    return CELLS[min(bisect_left(CELLS, rows), len(CELLS) - 1)]


@dataclass
class Costs:
    """Measured costs of a pair on a machine: target passes by rows, draft passes by tokens.

    ``own`` are the tables of methods whose steps are not the draft model's; ``draft_share`` is the
    prior for a step of that, in plain steps.
    """

    target: CostTable = field(default_factory=CostTable)
    draft: CostTable = field(default_factory=CostTable)
    own: dict[str, CostTable] = field(default_factory=dict)
    draft_share: float = SLOPE

    def steps(self, booking: Booking) -> CostTable:
        """Return the table of step costs of these drafts: the method's own, or the draft
        model's."""
        return self.own.setdefault(booking.paid, CostTable()) if booking.own else self.draft

"""What passes cost, measured while running, and the best fixed draft length at those costs.

Kernels make the cost of a pass neither linear nor monotone in its rows (CPU kernels work on groups
of four rows, CUDA switches kernels), so a table is kept rather than a line. Source: measurements on
llama.cpp; the principle (maximise tokens per second as a ratio of expectations, by Dinkelbach's
transformation) is that of renewal-reward processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Wide passes share a cell per step of about a third: nobody drafts that far, prompts are that long.
_WIDE = (24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_NARROW = 17  # rows up to here have a cell each
_GROUPS = (4, 8, 12, 16)

_WARM_UP = 1  # the first pass of a shape builds graphs and buffers: not counted
_FIRST = 3  # samples whose lower quartile starts a cell
_FIRST_SINGLE = 9  # and the level: everything is compared with it
_LEVEL_GAIN = 0.08
_LEVEL_GAIN_WIDE = 0.03
_CELL_GAIN = 0.03
_CLAMP = 0.4  # largest believed change of a log time per observation (one outlier moves little)
_TRUSTED = 5
_COLD = 0.5  # of single passes: the most that a first wide pass is believed to cost
_ABOVE = 1.25  # times the time of a pass of more rows: above this the level cannot be right


def _first(cell: int) -> int:
    """Samples that start a cell."""
    return _FIRST_SINGLE if cell == 1 else _FIRST


def _cell(rows: int) -> int:
    if rows <= _NARROW:
        return rows
    return next((w for w in _WIDE if rows <= w), _WIDE[-1])


class CostTable:
    """Milliseconds of a pass of n rows: a level (one row) times a ratio per row count.

    The level follows drift quickly (context length, a busy machine); ratios are properties of the
    kernels and move slowly. Unmeasured cells are interpolated; beyond the last one the last
    measured slope continues. Row counts that fill a group of a kernel are hoped to be cheap (at the
    prior slope) until they are measured: otherwise dear passes of two and three rows would hide
    that four cost less.

    Args:
        slope: prior extra cost per row, in single passes; a wide prompt pass gives a lower bound.
        level_ms: prior for one row, None for unknown.
        hopeful: whether unmeasured full groups are hoped to be cheap.
    """

    def __init__(
        self, *, slope: float = 0.15, level_ms: float | None = None, hopeful: bool = True
    ) -> None:
        self._hopeful = hopeful
        self._slope = slope
        self._level = level_ms
        self._ratio: dict[int, float] = {1: 1.0}
        self._seen: dict[int, int] = {}
        self._early: dict[int, list[float]] = {}
        self._awake = False  # whether this process has run a pass
        self._flat: list[float] = []  # ratios by rows, rebuilt when one of them moved

    @property
    def slope(self) -> float:
        return self._slope

    @slope.setter
    def slope(self, value: float) -> None:
        self._slope = value
        self._flat = []

    @property
    def one(self) -> float | None:
        """Milliseconds of one row; None before it is known."""
        return self._level

    @property
    def measured(self) -> bool:
        """Whether one row was really timed (rather than guessed)."""
        return self._seen.get(1, 0) > _WARM_UP

    def seen(self, rows: int) -> int:
        return self._seen.get(_cell(rows), 0)

    @property
    def widest(self) -> int:
        """The most rows that were timed, in one of the cells."""
        return max((cell for cell in self._ratio if self._seen.get(cell, 0)), default=0)

    def known(self, rows: int) -> bool:
        """Whether passes of so many rows were timed, so that a dear one is an outlier."""
        return self.seen(rows) >= _WARM_UP + _FIRST

    def ratio(self, rows: int) -> float:
        """Cost of ``rows`` rows in single passes."""
        known = self._ratio
        cell = _cell(rows)
        found = known.get(cell)
        if found is not None and cell == rows:
            return found
        below = max(k for k in known if k <= rows)
        above = min((k for k in known if k > rows), default=None)
        low = known[below]
        if above is not None:
            guess = low + (known[above] - low) * (rows - below) / (above - below)
        else:
            # of a wider pass that seemed to cost less no slope can be told
            slope = (low - 1.0) / (below - 1) if low > 1.0 else self.slope
            guess = low + slope * (rows - below)
        if self._hopeful and rows in _GROUPS:
            guess = min(guess, 1.0 + self.slope * (rows - 1))
        return guess

    def ms(self, rows: int) -> float:
        """Expected milliseconds of a pass; 0 rows cost nothing."""
        return 0.0 if rows <= 0 else (self._level or 0.0) * self.ratio(rows)

    def most(self, rows: int) -> float:
        """The most milliseconds that a pass may take: where none like it was timed, as many rows
        more than a narrower one may each take a pass of their own."""
        below = max(k for k in self._ratio if k <= rows)
        return (self._level or 0.0) * (self._ratio[below] + (rows - below))

    def upto(self, rows: int) -> list[float]:
        """``[0, ms(1), ..., ms(rows)]``, to be indexed by row count."""
        flat = self._flat
        if len(flat) <= rows:
            flat = self._flat = [0.0, *(self.ratio(n) for n in range(1, rows + 1))]
        one = self._level or 0.0
        return [one * r for r in flat[: rows + 1]]

    def guess(self, level_ms: float) -> None:
        """A prior for one row, used until one is timed."""
        if not self.measured:
            self._level = level_ms

    def set(self, rows: int, ms: float, *, trust: int = _TRUSTED) -> None:
        """A careful measurement (a calibration run), believed at once."""
        self._flat = []
        if rows == 1:
            self._level = ms
        elif self._level:
            self._ratio[_cell(rows)] = max(ms / self._level, 1e-3)
        self._seen[_cell(rows)] = max(trust, _WARM_UP + _first(rows))

    def observe(self, rows: int, ms: float) -> None:
        """One pass of ``rows`` rows took ``ms``."""
        if ms <= 0.0 or rows <= 0:
            return
        asleep, self._awake = not self._awake, True
        if asleep and rows > _NARROW and self._level:
            # it loaded kernels and buffers: believed, it would keep a draft model out for ever
            ms = min(ms, _COLD * rows * self._level)
        cell = _cell(rows)
        seen = self._seen.get(cell, 0)
        self._seen[cell] = seen + 1
        warm_up = _WARM_UP if cell <= _NARROW else 0  # wide passes are rare: each one counts
        if seen < warm_up:
            return
        if cell > 1:
            self._flat = []
            if self._level and ms * _ABOVE < self._level:
                # more rows are never cheaper: the single ones were slowed
                self._level_is(ms * _ABOVE)
                self._early[1] = [x for x in self._early.get(1, []) if x <= self._level]
        ms *= cell / rows if rows > _NARROW else 1.0
        if seen < warm_up + _first(cell):
            early = self._early.setdefault(cell, [])
            early.append(ms)
            # a busy machine only makes passes longer, and what looks too dear is not tried again
            value = sorted(early)[len(early) // 4]
            if cell == 1:
                self._level_is(value)
            elif self._level:
                self._ratio[cell] = value / self._level
            return
        self._early.pop(cell, None)
        if not self._level:
            return
        expected = self._level * self._ratio.setdefault(cell, self.ratio(rows))
        surprise = max(-_CLAMP, min(_CLAMP, math.log(ms / expected)))
        if cell == 1:
            self._level *= math.exp(_LEVEL_GAIN * surprise)
            return
        self._level *= math.exp(_LEVEL_GAIN_WIDE * surprise)
        self._ratio[cell] *= math.exp(max(_CELL_GAIN, 1.0 / (seen + 1)) * surprise)

    def _level_is(self, ms: float) -> None:
        """Correct the level; until it is settled the other passes keep the time they took."""
        if self._level and self._seen.get(1, 0) <= _WARM_UP + _first(1):
            for cell in self._ratio:
                if cell > 1:
                    self._ratio[cell] *= self._level / ms
            self._flat = []
        self._level = ms

    # -- persistence --

    def to_dict(self) -> dict[str, Any]:
        return {
            "slope": self.slope,
            "level_ms": self._level,
            "cells": {
                str(k): [round(r, 5), self._seen.get(k, 0)] for k, r in sorted(self._ratio.items())
            },
        }

    @staticmethod
    def from_dict(data: dict[str, Any], *, hopeful: bool = True) -> CostTable:
        """The inverse. A restored table keeps adapting: old counts weigh little.

        Raises:
            ValueError, TypeError, KeyError: the data is not a table.
        """
        level = data["level_ms"]
        table = CostTable(slope=_positive(data["slope"]), hopeful=hopeful)
        table._level = None if level is None else _positive(level)
        for key, (ratio, seen) in dict(data["cells"]).items():
            rows = int(key)
            if rows < 1 or _cell(rows) != rows:
                raise ValueError(f"no cell for {rows} rows")
            if rows > _NARROW and ratio > rows:
                continue  # a disturbed measurement: one by one is never dearer
            table._ratio[rows] = _positive(ratio)
            table._seen[rows] = min(int(seen), _TRUSTED)
        table._ratio[1] = 1.0
        if table.known(1):
            table._seen[1] = _WARM_UP + _first(1)
        return table


def _positive(value: float) -> float:
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"not a positive number: {value}")
    return float(value)


@dataclass(frozen=True, slots=True)
class BestPlan:
    """The best fixed draft length: ``speed`` is relative to plain decoding."""

    length: int
    speed: float
    tokens_per_round: float


def expected_tokens(survival: Sequence[float], length: int) -> float:
    """Tokens of a round that drafts ``length``: one, plus every position that survives.

    ``survival[i]`` is the probability that drafts 1..i+1 are all accepted.
    """
    return 1.0 + sum(survival[:length])


def plans(
    survival: Sequence[float],
    draft_ms: float,
    verify_ms: Sequence[float],
    catch_up_ms: float = 0.0,
) -> list[BestPlan]:
    """Every fixed length and what it gains.

    Args:
        survival: see ``expected_tokens``; its length bounds the plans.
        draft_ms: one draft step.
        verify_ms: indexed by rows, ``verify_ms[1]`` is a plain step.
        catch_up_ms: what a draft model pays after a round whose drafts were all accepted: it has
            not read the last of them yet.
    """
    found = []
    for k in range(1, min(len(survival), len(verify_ms) - 2) + 1):
        tokens = expected_tokens(survival, k)
        ms = k * draft_ms + survival[k - 1] * catch_up_ms + verify_ms[k + 1]
        found.append(BestPlan(k, tokens * verify_ms[1] / ms, tokens))
    return found


def best_plan(
    survival: Sequence[float],
    draft_ms: float,
    verify_ms: Sequence[float],
    catch_up_ms: float = 0.0,
) -> BestPlan:
    """The fixed length with the most tokens per second; see ``plans``."""
    found = [BestPlan(0, 1.0, 1.0), *plans(survival, draft_ms, verify_ms, catch_up_ms)]
    return max(found, key=lambda plan: plan.speed)


def ceiling(acceptance: float, draft_ms: float, verify_ms: Sequence[float], longest: int) -> float:
    """Best speed over plain at a constant acceptance: what a machine can gain at all."""
    survival = [acceptance**i for i in range(1, longest + 1)]
    return best_plan(survival, draft_ms, verify_ms).speed

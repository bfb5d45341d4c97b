"""The present cost of plain decoding, its uncertainty, and the time of the next plain step.

A machine is faster in one minute than in the next, so drafting is compared with plain steps of the
same minutes, the newest counting most. Every pass of one row that no other conversation shared is
one of them. How far the next second will be off is what the seconds before were off: no model of
the machine is needed. Where all rounds draft, one is made plain now and then. That a plain step is
due never depends on what is written; it costs what drafting would have saved in its place, and
takes no more than ``EPSILON`` of the time, but for a few steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, median
from time import perf_counter

from specllama.speculative.policy.constants import (
    AHEAD,
    EPSILON,
    FRESH_S,
    MEMORY,
    OUTLIER,
    SETTLE,
    SINGLES,
    STRETCH_S,
)


@dataclass(slots=True)
class Baseline:
    """A typical plain step, in wall-clock milliseconds; the newest is ``age_s`` old, when asked.

    ``n`` seconds of plain steps, foretold by those as long before them, were off by ``spread``: a
    standard deviation of logarithms, None without a forecast.
    """

    ms: float
    age_s: float
    n: int
    spread: float | None


@dataclass(slots=True)
class _Stretch:
    begin: float
    end: float
    steps: list[float] = field(default_factory=list)  # milliseconds
    depth: int = 0  # of the newest
    _ms: float = 0.0
    _of: int = 0

    @property
    def ms(self) -> float:
        """The mean, with outliers capped: they show other work of the machine."""
        if self._of != len(self.steps):
            most = OUTLIER * median(self.steps)
            self._of, self._ms = len(self.steps), fmean(min(ms, most) for ms in self.steps)
        return self._ms


class PlainSteps:
    """The newest plain steps of an engine, of all its replies."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._stretches: deque[_Stretch] = deque(maxlen=MEMORY)
        self._taken = 0
        self._known: tuple[object, Baseline | None] = ((), None)
        self._saved = 0.0  # plain steps that drafting may have lost for the next one
        self._since = 0  # rounds since the last

    def took(self, ms: float, depth: int) -> None:
        """Learn the time of a plain step after ``depth`` tokens."""
        now = self._clock()
        if not self._stretches or now - self._stretches[-1].begin > STRETCH_S:
            self._stretches.append(_Stretch(now, now))
        newest = self._stretches[-1]
        newest.steps.append(ms)
        newest.end, newest.depth = now, depth
        self._taken += 1
        self._since, self._saved = 0, 0.0

    def drafted(self, steps: float) -> None:
        """Note that a round drafted, and how many plain steps it took."""
        self._since += 1
        self._saved += EPSILON * steps

    def is_due(self, *, settled: bool) -> bool:
        """True if the next round should be plain, which loses less than a step; this happens more
        often until the cost of plain steps on this machine is ``settled``."""
        fresh = self._fresh()
        few = len(fresh) <= SETTLE and (not fresh or self._clock() - fresh[-1].begin > STRETCH_S)
        return self._since >= AHEAD and (few or not settled or self._saved >= 1.0)

    def typical(self, depth: int, deep_ms: float) -> Baseline | None:
        """Return the usual time of a step at a depth; each token of depth adds ``deep_ms``."""
        if not self._stretches:
            return None
        age = self._clock() - self._stretches[-1].end
        ahead = 2.0 ** math.floor(math.log2(age)) if age >= STRETCH_S else 0.0
        asked = (self._taken, depth // MEMORY, deep_ms, ahead)
        if self._known[0] != asked:
            self._known = asked, self._foretell(depth, deep_ms, ahead)
        found = self._known[1]
        assert found is not None
        found.age_s = age
        return found

    def _foretell(self, depth: int, deep_ms: float, ahead: float) -> Baseline:
        """Forecast from all the stretches, of which the newest count most; each of them is compared
        with its own forecast from those ``ahead`` seconds before it."""
        stretches = self._fresh() or list(self._stretches)[-1:]
        logs = [math.log(max(s.ms + deep_ms * (depth - s.depth), s.ms / 2)) for s in stretches]
        total = weight = at = 0.0
        errors: list[float] = []
        known = 0
        for k in range(len(stretches) + 1):
            until = stretches[k].begin - ahead if k < len(stretches) else math.inf
            while known < k and stretches[known].end <= until:
                kept = math.exp((at - stretches[known].end) / (SETTLE * STRETCH_S))
                total, weight = kept * total + logs[known], kept * weight + 1.0
                at, known = stretches[known].end, known + 1
            if k < len(stretches) and weight:
                errors.append(abs(logs[k] - total / weight))
        errors = errors[-SINGLES:]  # a machine is busy for a while, then no more
        spread = math.sqrt(math.pi / 2.0) * fmean(errors) if errors else None
        return Baseline(math.exp(total / weight), 0.0, len(errors), spread)

    def _fresh(self) -> list[_Stretch]:
        since = self._clock() - FRESH_S
        return [one for one in self._stretches if one.end >= since]

"""How many threads a context computes with, measured while it runs.

llama.cpp's threads wait for each other at every operation, spinning. A neighbour that takes a core
(a browser, an editor, our own terminal app) stops one of them, and with it all: two threads on two
cores, one of them busy, are half as fast as one. Thread counts change no bit of a row, so they are
tried like anything else: where what is known says another count is faster, at once; else when one
hundredth of the time that passes took pays for the try.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median

SHARE = 0.01  # of all time that tries may cost
TRY = 3  # passes of a try; the first starts the threads and is not counted
GAIN = 0.97  # another count is kept if it takes at most this part of the time
HOPELESS = 1.5  # at first, counts are measured down to one that takes so many times the best
_RECENT = 5  # passes whose median counts: a single one may have been disturbed


class ThreadChoice:
    """The number of threads for each pass of a context, at most ``most``.

    Passes of a different number of rows are never compared. What was not measured is expected to be
    as passes of one row are, or else slower in proportion.
    """

    def __init__(self, most: int) -> None:
        self._counts = ladder(most)
        self._now = 0  # index of the count in use
        self._times: dict[tuple[int, int], deque[float]] = {}  # (rows, count) -> seconds
        self._savings = 0.0  # seconds that tries may still cost
        self._trying: tuple[int, int] | None = None  # rows, and index of the count on trial
        self._left = 0  # passes of the try to come
        self._tried: dict[int, int] = {}  # index of a count -> number of its last try

    @property
    def count(self) -> int:
        """The count in use, tries apart."""
        return self._counts[self._now]

    def begin(self, measure: Callable[[int], float]) -> None:
        """Start with the best of the highest counts; ``measure``: seconds of a pass of one row."""
        best = math.inf
        for index, count in enumerate(self._counts):
            seconds = measure(count)
            self._times[1, count] = deque([seconds], maxlen=_RECENT)
            if seconds > HOPELESS * best:
                break
            if seconds <= GAIN * best:
                best, self._now = seconds, index

    def choose(self, rows: int) -> int:
        """Threads for a pass of ``rows`` rows that comes now."""
        if self._trying is None:
            self._begin_try(rows)
        return self._counts[self._index(rows)]

    def _index(self, rows: int) -> int:
        on_trial = self._trying is not None and self._trying[0] == rows
        return self._trying[1] if self._trying is not None and on_trial else self._now

    def took(self, rows: int, seconds: float) -> None:
        """The pass that was chosen for has run."""
        self._savings += SHARE * seconds
        used = self._index(rows)
        usual, expected = self._expected(rows, self._now), self._expected(rows, used)
        times = self._times.setdefault((rows, self._counts[used]), deque(maxlen=_RECENT))
        if used == self._now or usual is None or expected is None:
            times.append(seconds)
            return
        self._savings -= max(min(seconds, TRY * expected) - usual, 0.0)
        if self._left == TRY:
            times.clear()
        else:
            times.append(seconds)
        self._left -= 1
        if self._left == 0:
            self._trying = None
            if max(times) <= GAIN * usual:
                self._now = used

    def _begin_try(self, rows: int) -> None:
        usual = self._expected(rows, self._now)
        if usual is None:
            return
        others = [i for i in range(self._now - 2, self._now + 3) if i != self._now]
        for other in sorted(others, key=lambda i: self._tried.get(i, 0)):
            expected = self._expected(rows, other) if 0 <= other < len(self._counts) else None
            if expected is None:
                continue
            loss = TRY * (expected - usual)
            if loss <= self._savings if loss > 0.0 else expected <= GAIN * usual:
                self._trying, self._left = (rows, other), TRY
                self._tried[other] = 1 + max(self._tried.values(), default=0)
                return

    def _expected(self, rows: int, index: int) -> float | None:
        """Seconds of a pass with another count: measured, or in proportion to one that was."""
        known = self._times.get((rows, self._counts[index]))
        if known:
            return median(known)
        now = self._times.get((rows, self.count))
        if not now:
            return None
        here, there = self._times.get((1, self.count)), self._times.get((1, self._counts[index]))
        if here and there:
            return median(now) * median(there) / median(here)
        return median(now) * max(self.count / self._counts[index], 1.0)


def ladder(most: int) -> tuple[int, ...]:
    """The counts worth trying: all, one or two fewer, then three quarters of the last each."""
    counts = [most]
    while counts[-1] > 1:
        counts.append(counts[-1] - 1 if len(counts) < 3 else counts[-1] * 3 // 4)
    return tuple(counts)

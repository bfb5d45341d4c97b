"""The number of threads that a context computes with, measured while it runs.

llama.cpp's threads wait for each other at every operation, spinning. A neighbour that takes a core
(a browser, an editor, our own terminal app) stops one of them, and with it all: two threads on two
cores, one of them busy, are half as fast as one. Thread counts change no bit of a row, so they are
tried like anything else: where what is known says another count is faster, at once; else when one
hundredth of the time that passes took pays for the try. The first tries on a machine wait
for neither, and what they find is kept for the next run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

SHARE = 0.01  # of all time that tries may cost
TRY = 3  # turns of a try: a pass with the other count, then one with the count in use
GAIN = 0.97  # another count is kept if it takes at most this part of the time in every turn
_RECENT = 5  # passes whose median counts: a single one may have been disturbed


@dataclass
class _Try:
    other: int  # index of the count on trial
    seconds: float | None = None  # of its pass, until the count in use has had its turn
    won: int = 0  # turns


class ThreadChoice:
    """The number of threads for each pass of a context, at most ``most``.

    Passes of a different number of rows are never compared. What was not measured is expected to be
    as passes of one row are, or else slower in proportion.

    Args:
        count: what was found earlier; 0 where nothing was.
        found: called with the count in use when a try has ended.
    """

    def __init__(
        self, most: int, count: int = 0, found: Callable[[int], object] = lambda count: None
    ) -> None:
        self._counts = ladder(most)
        first = count not in self._counts
        self._now = 0 if first else self._counts.index(count)  # index of the count in use
        # by index, tries that nothing has to pay for: a single one may be disturbed
        self._free = {1: 2, 2: 2} if first else {}
        self._found = found
        self._times: dict[tuple[int, int], deque[float]] = {}  # (rows, count) -> seconds
        self._savings = 0.0  # seconds that tries may still cost
        self._tries: dict[int, _Try] = {}  # rows -> their try
        self._tried: dict[int, int] = {}  # index of a count -> number of its last try

    @property
    def count(self) -> int:
        """The current count, without tries."""
        return self._counts[self._now]

    def choose(self, rows: int) -> int:
        """Choose the threads for the next pass, of ``rows`` rows."""
        if rows not in self._tries:
            self._begin_try(rows)
        return self._counts[self._index(rows)]

    def _index(self, rows: int) -> int:
        trial = self._tries.get(rows)
        return self._now if trial is None or trial.seconds is not None else trial.other

    def took(self, rows: int, seconds: float) -> None:
        """Record the seconds of the pass that was chosen for."""
        self._savings += SHARE * seconds
        trial, used = self._tries.get(rows), self._index(rows)
        times = self._times.setdefault((rows, self._counts[used]), deque(maxlen=_RECENT))
        if trial is not None and trial.seconds is None and not trial.won:
            times.clear()
        times.append(seconds)
        if trial is None:
            return
        if trial.seconds is None:
            trial.seconds = seconds
            return
        self._savings -= max(trial.seconds - seconds, 0.0)
        if trial.seconds > GAIN * seconds:
            del self._tries[rows]
            self._found(self.count)
            return
        trial.seconds, trial.won = None, trial.won + 1
        if trial.won == TRY:
            self._now = trial.other
            self._tries.clear()
            self._found(self.count)

    def _begin_try(self, rows: int) -> None:
        usual = self._expected(rows, self._now)
        if usual is None:
            return
        others = [i for i in range(self._now - 2, self._now + 3) if i != self._now]
        for other in sorted(others, key=lambda i: self._tried.get(i, 0)):
            expected = self._expected(rows, other) if 0 <= other < len(self._counts) else None
            if expected is None:
                continue
            loss = expected - usual
            if self._free.get(other):
                due = len(self._times.get((rows, self.count), ())) >= TRY
            elif loss > 0.0:
                due = loss <= self._savings
            else:
                due = expected <= GAIN * usual
            if due:
                self._tries[rows] = _Try(other)
                self._free[other] = max(self._free.get(other, 0) - 1, 0)
                self._tried[other] = 1 + max(self._tried.values(), default=0)
                return

    def _expected(self, rows: int, index: int) -> float | None:
        """Estimate the seconds with another count: measured, or in proportion to one that was."""
        known = self._times.get((rows, self._counts[index]))
        if known:
            return median(known)
        now = self._times.get((rows, self.count))
        if not now:
            return None
        here, there = self._times.get((1, self.count)), self._times.get((1, self._counts[index]))
        if here and there:
            return median(now) * median(there) / median(here)
        ratio = self.count / self._counts[index]
        return median(now) * max(ratio, 1 / ratio)


class Threads:
    """The threads of a context: all of them, or as many as ``choice`` says.

    Args:
        put: sets their count. most: all of them, with which the context begins.
    """

    def __init__(self, put: Callable[[int], object], most: int) -> None:
        self.most = self._now = most
        self.choice: ThreadChoice | None = None
        self._put = put

    def use(self, count: int) -> None:
        if count != self._now:
            self._put(count)
            self._now = count

    def run(self, rows: int, work: Callable[[], int], every: bool = False) -> int:
        """Run a pass of ``rows`` rows, by ``every`` thread or as chosen; return its status."""
        choice = None if every else self.choice
        self.use(self.most if choice is None else choice.choose(rows))
        begin = perf_counter()
        if not (status := work()) and choice is not None:
            choice.took(rows, perf_counter() - begin)
        return status


def ladder(most: int) -> tuple[int, ...]:
    """List the counts worth trying: all, one or two fewer, then three quarters of the last each."""
    counts = [most]
    while counts[-1] > 1:
        counts.append(counts[-1] - 1 if len(counts) < 3 else counts[-1] * 3 // 4)
    return tuple(counts)

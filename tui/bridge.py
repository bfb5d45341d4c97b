"""The bridge from the engine's thread to the screen: a buffer, drained at the screen's pace.

A turn runs in a thread because the engine blocks. The thread only fills a ``RunningTurn``; the
screen drains it from a timer, at most ten times a second (five on small machines, where the screen
takes cycles from the model), and less often if flushes are expensive or the machine runs on its
battery: the screen has a budget of processor time. So its cost does not depend on the speed of the
model. There, the figures rest for a second or two while the text flows.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specllama.backend.cores import usable_cores
from specllama.cancel import Cancel
from specllama.errors import SpecllamaError, as_ours
from specllama.events import Event, Finished
from specllama.models.power import on_battery
from specllama.told import Told

Clock = Callable[[], float]
monotonic: Clock = time.perf_counter
BATTERY = 2  # times as long between flushes where the machine runs on its battery
SMOOTHING = 0.3  # weight of the newest flush in the cost of a flush


@dataclass(slots=True)
class Drained(Told):
    """The news since the last drain. Text and rounds are complete, progress is the newest."""

    error: SpecllamaError | None = None
    ended: bool = False

    def __bool__(self) -> bool:
        return self != Drained()


class RunningTurn:
    """One request, running in its own thread."""

    def __init__(self, events: Iterator[Event], cancel: Cancel, wake: Callable[[], object]) -> None:
        self._events = events
        self._wake = wake
        self._lock = threading.Lock()
        self._batch = Drained()
        self._first = True
        self.finished: Finished | None = None  # the end of the turn may come a batch later
        self.cancel_event = cancel
        self.thread = threading.Thread(target=self._run, name="specllama-turn", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def cancel(self) -> None:
        self.cancel_event.set()

    @property
    def cancelled(self) -> bool:
        return self.cancel_event.is_set()

    def drain(self) -> Drained:
        with self._lock:
            batch, self._batch = self._batch, Drained()
        return batch

    def _run(self) -> None:
        error: SpecllamaError | None = None
        try:
            for event in self._events:
                self._take(event)
        except Exception as caught:
            error = as_ours(caught)
        with self._lock:
            self._batch.error = error
            self._batch.ended = True
        self._wake()

    def _take(self, event: Event) -> None:
        with self._lock:
            new = self._batch.take(event)
        self.finished = new.finished or self.finished
        # The first sign of life is shown at once, the rest at the timer's pace.
        if self._first and (new.started is not None or new.text or new.reasoning):
            self._first = new.started is not None
            self._wake()


@dataclass(slots=True)
class FlushPace:
    """The pace of flushes: every ``base_s``, or less often to stay within ``share`` of one core.
    The strip is not drawn twice within ``figures_s``, the panel not within twice as long.

    A flush costs more as the reply grows (lists and tables are laid out anew), so the period
    follows the cost, smoothed: one code block must not slow the next ten flushes.
    """

    base_s: float
    longest_s: float = 0.8
    share: float = 0.5
    on_battery: Callable[[], bool] = lambda: False
    period_s: float = 0.0
    figures_s: float = 0.0
    _cost_s: float = 0.0

    def __post_init__(self) -> None:
        self.period_s = self.base_s

    @staticmethod
    def for_this_machine() -> FlushPace:
        """Choose the pace: with one or two cores, the model needs all that the screen would use."""
        few = usable_cores()[1] <= 2
        base_s, share, figures_s = (0.2, 0.035, 1.0) if few else (0.1, 0.2, 0.0)
        return FlushPace(base_s, share=share, figures_s=figures_s, on_battery=on_battery)

    def observe(self, took_s: float) -> float:
        """Record the processor seconds of a flush; return the pause before the next."""
        self._cost_s += SMOOTHING * (took_s - self._cost_s)
        period_s = max(self.base_s, self._cost_s / self.share)
        self.period_s = min(self.longest_s, period_s * (BATTERY if self.on_battery() else 1))
        return self.period_s


@dataclass(slots=True)
class Rest:
    """A limit on drawing: with a flush, but not again within ``for_s``; and then once more."""

    for_s: float
    clock: Clock = monotonic
    _stale: bool = False
    _drawn_s: float = -math.inf

    def over(self, grown: bool) -> bool:
        """True if it is to be drawn now; ``grown``: there is something new."""
        self._stale = self._stale or grown
        now = self.clock()
        if not self._stale or now - self._drawn_s < self.for_s:
            return False
        self._stale, self._drawn_s = False, now
        return True


# A flush is judged by the processor time it took: on a busy machine wall time would blame the
# screen for what others do, and slow it down for nothing.
processor: Clock = time.thread_time

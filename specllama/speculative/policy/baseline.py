"""What plain decoding takes now: the newest plain steps, and when the next one is due.

A machine is faster in one minute than in the next, so drafting is compared with plain steps of the
same minutes. Every pass of one row that no other conversation shared is one of them. Where all
rounds draft, one is made plain now and then. That a plain step is due never depends on what is
written; it costs what drafting would have saved in its place, and takes no more than ``EPSILON``
of the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from specllama.speculative.policy.ledger import EPSILON

KEPT = 32  # plain steps
FEW = 4  # with fewer of these minutes the next is due at once
FRESH_S = 120.0  # so old they are of these minutes
_APART = 3  # rounds that draft between two plain steps at least, as long as there are few
_SPACED = 8  # and then


@dataclass(frozen=True, slots=True)
class Baseline:
    """A typical plain step, in wall-clock milliseconds; the newest is ``age_s`` old."""

    ms: float
    age_s: float
    n: int


class PlainSteps:
    """The newest plain steps of an engine, of all its replies."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._steps: deque[tuple[float, float, int]] = deque(maxlen=KEPT)  # when, ms, depth
        self._saved = 0.0  # plain steps that may be spent on the next
        self._since = 0  # rounds since the last

    def took(self, ms: float, depth: int) -> None:
        """A plain step behind ``depth`` tokens took so long."""
        self._steps.append((self._clock(), ms, depth))
        self._since = 0

    def drafted(self, steps: float) -> None:
        """A round drafted and took as long as so many plain steps."""
        self._since += 1
        self._saved += EPSILON * steps

    def is_due(self, forgone: float, *, settled: bool) -> bool:
        """Whether the next round should be plain, at the price of ``forgone`` plain steps; more
        often until it is ``settled`` what plain steps take on this machine."""
        if self._since < (_APART if len(self._fresh()) < FEW else _SPACED):
            return False
        return not settled or self._saved >= forgone or len(self._fresh()) < FEW

    def paid(self, forgone: float) -> None:
        """A round was made plain for that price."""
        self._saved = max(self._saved - forgone, 0.0)

    def typical(self, depth: int, deep_ms: float) -> Baseline | None:
        """At a depth, where a step behind one more token takes ``deep_ms`` longer."""
        steps = self._fresh() or list(self._steps)[-1:]
        if not steps:
            return None
        ms = median(ms + deep_ms * (depth - at) for _, ms, at in steps)
        return Baseline(ms, self._clock() - steps[-1][0], len(steps))

    def _fresh(self) -> list[tuple[float, float, int]]:
        since = self._clock() - FRESH_S
        return [step for step in self._steps if step[0] >= since]

"""A process's record of its threads' work, in memory that its parent reads.

A thread that is at work beats with every step that it gets on. One that is at work and does not
beat is stuck, whatever it is stuck in: no answer is needed to see that. A process that was stopped
notes nothing, so the parent counts from its own send: the part "commands" is at work while the
child has heard less than was sent.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Literal

Part = Literal["passes", "requests", "constrained", "calls", "commands"]
THREADS: tuple[Part, ...] = ("requests", "constrained", "calls")  # besides that of passes
PARTS: tuple[Part, ...] = ("passes", *THREADS, "commands")

PATIENCE_S = 30.0  # how long a pass may take on any machine
_SLOWEST = 5e6  # bytes of weights a second: a first pass reads them all, from a slow disk
_ASIDE = 4.0  # times as long for what holds up no pass
_LOOK_S = 0.25


def patience(longest_s: float, token_s: float | None, tokens: int, n_bytes: int) -> float:
    """Return how long a pass may take.

    Args:
        longest_s: the longest pass so far.
        token_s: what a pass of one token takes, None before it is known.
        tokens: of the longest part of a prompt: read one by one they take longest.
        n_bytes: of the weights.
    """
    if token_s is None:
        return PATIENCE_S + n_bytes / _SLOWEST
    return max(PATIENCE_S, 20.0 * longest_s, tokens * token_s)


class Pulse:
    """A record that the threads of one process write and another process reads.

    Attributes:
        sent: messages that the reading process sent to the other one.
    """

    sent = 0

    def __init__(self) -> None:
        cells = 3 * len(PARTS) + 1
        self._cells = multiprocessing.get_context("spawn").RawArray("d", cells)
        self._cells[-1] = PATIENCE_S

    @property
    def patience_s(self) -> float:
        return float(self._cells[-1])

    # -- by the threads that are watched --

    def expect(self, patience_s: float) -> None:
        """Set how long a pass may take."""
        self._cells[-1] = patience_s

    def works(self, part: Part, request_id: int = 0) -> None:
        """Note that a part begins work; for this request, if it is for one."""
        at = 3 * PARTS.index(part)
        self._cells[at + 2] = request_id
        self._cells[at + 1] += 1
        self._cells[at] = 1

    def beat(self) -> None:
        """Note that a pass begins."""
        self._cells[1] += 1

    def hears(self, request_id: int) -> None:
        """Note that a message came; for this request, if it begins one."""
        self.works("commands", request_id or self.heard)

    def rests(self, part: Part) -> None:
        self._cells[3 * PARTS.index(part)] = 0

    # -- by who watches --

    @property
    def heard(self) -> int:
        """The last request that came."""
        return int(self._cells[3 * PARTS.index("commands") + 2])

    def working(self, part: Part) -> tuple[float, int] | None:
        """Return a number that changes with progress, and the request that the part works for (0:
        no single one); None while it waits for work."""
        at = 3 * PARTS.index(part)
        busy, count, request_id = self._cells[at : at + 3]
        if part == "commands":
            busy, request_id = self.sent > count, 0
        return (count, int(request_id)) if busy else None


class Watchdog:
    """An observer that reads a pulse at intervals. Time in which it did not look does not count:
    the machine slept.

    Args:
        patience_s: how long a pass may take; None takes what the pulse says.
    """

    def __init__(
        self, pulse: Pulse, clock: Callable[[], float], patience_s: float | None = None
    ) -> None:
        self._pulse = pulse
        self._given_s = patience_s
        self._clock = clock
        self._looked = clock()
        self._seen: dict[Part, tuple[float, int] | None] = {}
        self._still_s = dict.fromkeys(PARTS, 0.0)

    @property
    def every_s(self) -> float:
        """The seconds between two looks."""
        return min(_LOOK_S, self._patience_s / 8)

    @property
    def _patience_s(self) -> float:
        return self._given_s or self._pulse.patience_s

    def stuck(self, *, begun: bool = True) -> tuple[Part, int, float] | None:
        """Return the stuck part, its request and the seconds without progress; None if none is
        stuck. Before it has ``begun``, a process may take longer to hear what it is told."""
        now = self._clock()
        passed, self._looked = min(now - self._looked, 4 * self.every_s), now
        for part in PARTS:
            state = self._pulse.working(part)
            same = state is not None and state == self._seen.get(part)
            self._still_s[part] = self._still_s[part] + passed if same else 0.0
            self._seen[part] = state
            limit = self._patience_s * (1.0 if part == "passes" else _ASIDE)
            if part == "commands" and begun and not any(map(self._pulse.working, THREADS)):
                limit = min(self._patience_s, PATIENCE_S)  # to hear is quick with any model
            if state is not None and self._still_s[part] > limit:
                return part, state[1], self._still_s[part]
        return None

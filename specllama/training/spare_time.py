"""Spare time of this machine, in which a training works that waits for it (``--while-idle``)."""

from __future__ import annotations

import os
import time
from pathlib import Path

from specllama.backend.cores import crowded
from specllama.models.power import on_battery

_STAT = Path("/proc/stat")
LOOK_S = 2.0  # between two looks
QUIET_S = 20.0  # without a reason to wait, before work goes on
_USED = 0.5  # of a processor by other programs: somebody needs the machine


class SpareTime:
    """A look at the machine: each call returns why to wait, "" if there is time to spare."""

    def __init__(self) -> None:
        self._why, self._looked, self._used = "", time.monotonic(), used_by_others()
        self._waits = self._looked  # until then

    def __call__(self) -> str:
        now = time.monotonic()
        if (took := now - self._looked) >= LOOK_S:
            used, before = used_by_others(), self._used
            self._looked, self._used = now, used
            busy = crowded() if used is None or before is None else used - before > _USED * took
            if why := "on battery" if on_battery() else "the machine is busy" if busy else "":
                self._why, self._waits = why, now + QUIET_S
            elif now >= self._waits:
                self._why = ""
        return self._why


def used_by_others() -> float | None:
    """Return the seconds of processor time that all other programs took so far; None where the
    system does not say."""
    try:
        user, nice, system = map(int, _STAT.read_text("ascii").split()[1:4])
    except (OSError, ValueError):
        return None
    own = os.times()
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - own.user - own.system

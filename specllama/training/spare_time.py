"""Spare time of this machine, in which a training works that waits for it (``--while-idle``)."""

from __future__ import annotations

import time

from specllama.backend.cores import Others
from specllama.models.power import on_battery

LOOK_S = 2.0  # between two looks
QUIET_S = 20.0  # without a reason to wait, before work goes on
_USED = 0.5  # of a processor by other programs: somebody needs the machine


class SpareTime:
    """A look at the machine: each call returns why to wait, "" if there is time to spare."""

    def __init__(self) -> None:
        self._why, self._others = "", Others()
        self._looked = self._waits = time.monotonic()  # waits until then

    def __call__(self) -> str:
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            self._looked, busy = now, self._others.busy(_USED)
            if why := "on battery" if on_battery() else "the machine is busy" if busy else "":
                self._why, self._waits = why, now + QUIET_S
            elif now >= self._waits:
                self._why = ""
        return self._why

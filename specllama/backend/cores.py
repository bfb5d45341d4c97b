"""The number of cores for llama.cpp: physical ones, and only fast ones if there are two kinds.

Two threads on one core share its arithmetic, and every pass waits for its slowest thread.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from specllama.models.kernel_limits import processors

_CPUS = Path("/sys/devices/system/cpu")
_STAT = Path("/proc/stat")
_MUCH = 0.6  # of all processors
_SLACK = 0.5  # of the load: an engine that computes with every core is no crowd


def physical_cores() -> int:
    """Count the physical cores that this process may use, at least 1.

    On Apple silicon, only the performance cores. If the system does not say, what
    Python counts, hyper-threads included.
    """
    usable, count = usable_cores()
    found = macos_cores(_sysctl) if sys.platform == "darwin" else linux_cores(usable, _siblings)
    return max(1, min(count, found or count))


def usable_cores() -> tuple[list[int], int]:
    """Return the processors that this process may use, where the system says, and how many of them
    at a time.

    A share of their time counts as the next whole number: threads that wait for each other are held
    up together, so that one more computes faster than one fewer.
    """
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    count = len(usable) or os.cpu_count() or 1
    return usable, min(count, max(math.ceil(processors() or count), 1))


def crowded() -> bool:
    """True if more programs want to compute than there are processors: a timing taken then says
    little about the machine."""
    return system_load() > (os.cpu_count() or 1) + _SLACK


class Others:
    """The other programs of this machine, as users of its processors since the last look."""

    def __init__(self) -> None:
        self._looked, self._used = time.monotonic(), used_by_others()

    def busy(self, most: float | None = None) -> bool:
        """True if they took more than ``most`` processors since the last look, by default more than
        leave a timing its meaning; where the system does not say, if the machine is crowded."""
        before, self._looked = self._looked, time.monotonic()
        used, self._used = self._used, used_by_others()
        if used is None or self._used is None:
            return crowded()
        most = _MUCH * (os.cpu_count() or 1) if most is None else most
        return self._used - used > most * (self._looked - before)


def used_by_others() -> float | None:
    """Return the seconds of processor time that all other programs took so far; None where the
    system does not say."""
    try:
        user, nice, system = map(int, _STAT.read_text("ascii").split()[1:4])
    except (OSError, ValueError):
        return None
    own = os.times()
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - own.user - own.system


def system_load() -> float:
    """Return how many programs want to compute; 0 where the system does not say."""
    with suppress(OSError):  # in a sandbox without /proc
        return os.getloadavg()[0]
    return 0.0


def linux_cores(cpus: Iterable[int], siblings: Callable[[int], str | None]) -> int | None:
    """Count the physical cores of some logical CPUs; None if the kernel does not say.

    Args:
        siblings: the logical CPUs that share the core of one, as the kernel lists them ("0,4").
    """
    cores = {siblings(cpu) for cpu in cpus}
    return None if not cores or None in cores else len(cores)


def macos_cores(sysctl: Callable[[str], int | None]) -> int | None:
    """Count the cores of the fastest level, else all of them; None if the system does not say."""
    return sysctl("hw.perflevel0.physicalcpu") or sysctl("hw.physicalcpu")


def _siblings(cpu: int) -> str | None:
    for name in ("core_cpus_list", "thread_siblings_list"):
        with suppress(OSError):
            return (_CPUS / f"cpu{cpu}" / "topology" / name).read_text("ascii").strip()
    return None


def _sysctl(name: str) -> int | None:
    value, size = ctypes.c_uint64(0), ctypes.c_size_t(8)
    try:
        library = ctypes.CDLL(None)
        failed = library.sysctlbyname(
            name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
        )
    except (OSError, AttributeError):
        return None
    # some of these are 32 bits wide: the upper half stays zero on little-endian machines
    return None if failed else value.value

"""The limits that the kernel puts on this process: on its memory, and on its processor time.

Containers, services and shells set them. Linux keeps most of them in control groups: a process is
in one group of each hierarchy, and what a group above it may not exceed binds it, too. Version 1
has a hierarchy for each controller, version 2 one for all of them; a machine may have both.
``/proc/self/cgroup`` names the groups, ``/proc/self/mountinfo`` the folders that show them. What
lies above the top of a container cannot be seen from inside, except where version 1 tells the
smallest limit on the way up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

ROOT = Path("/")
NO_LIMIT = 1 << 60  # version 1 writes "unlimited" as the largest number of whole pages

# of a group's memory: the file of a limit, the file of what counts against it, and the field of
# memory.stat that tells the smallest such limit on the way up
_GROUP_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.high", "memory.current", ""),  # above it a process is not ended, but hardly runs
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "hierarchical_memory_limit"),
    ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes", "hierarchical_memsw_limit"),
)
# counted as used, but given up before anything is refused: copies of files, and what the kernel
# remembers of them. Files in memory (tmpfs, shared memory) are in none of these.
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
# of the process: a line of /proc/self/limits, the field of /proc/self/statm that counts against
# it, and the shell's word. A limit on resident memory (ulimit -m) has no effect on Linux.
_PROCESS_LINES = (("Max address space", 0, "ulimit -v"), ("Max data size", 5, "ulimit -d"))


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A bound on the memory of this process.

    Attributes:
        total, free: bytes, and those of them that can still be taken.
        source: what sets it, for people; "" for the machine itself.
    """

    total: int
    free: int
    source: str = ""


def memory_limits(root: Path = ROOT) -> list[MemoryLimit]:
    """List the limits on this process's memory; empty where the system has none, or tells none."""
    return [*_of_groups(root), *_of_process(root)]


def processors(root: Path = ROOT) -> float | None:
    """Return the processors that this process may use at a time by its share of their time; None
    without such a limit. A choice of processors (cpuset) is part of the process's affinity."""
    found = []
    for folder in folders("cpu", root):
        written = _text(folder / "cpu.max") or " ".join(
            _text(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        )
        quota, period = [*written.split(), "", ""][:2]
        if quota.isdecimal() and period.isdecimal() and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def folders(controller: str, root: Path = ROOT) -> tuple[Path, ...]:
    """List the folders of this process's groups, each before the one above it."""
    return _folders(_text(root / "proc/self/cgroup"), controller, root)


def _of_groups(root: Path) -> Iterator[MemoryLimit]:
    for folder in folders("memory", root):
        lines = (line.split() for line in _text(folder / "memory.stat").splitlines())
        stat = {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdecimal()}
        # version 1 tells a group's own share apart from that of all below it
        kept = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in _RECLAIMABLE)
        for limit_file, used_file, above in _GROUP_FILES:
            written = _number(folder / limit_file)
            limit = min(NO_LIMIT if written is None else written, stat.get(above, NO_LIMIT))
            if limit < NO_LIMIT:
                used = max((_number(folder / used_file) or 0) - kept, 0)
                named = folder / (limit_file if limit == written else "memory.stat")
                yield MemoryLimit(limit, max(limit - used, 0), f"/{named.relative_to(root)}")


def _of_process(root: Path) -> Iterator[MemoryLimit]:
    used, page = _text(root / "proc/self/statm").split(), os.sysconf("SC_PAGE_SIZE")
    for line in _text(root / "proc/self/limits").splitlines() if used else ():
        for begin, field, source in _PROCESS_LINES:
            limit = line.removeprefix(begin).split()[0] if line.startswith(begin) else ""
            if limit.isdecimal():
                yield MemoryLimit(int(limit), max(int(limit) - int(used[field]) * page, 0), source)


@dataclass(frozen=True, slots=True)
class _Mount:
    """A folder that shows the groups of a hierarchy, from ``top`` down."""

    kind: str
    controllers: tuple[str, ...]
    top: str
    folder: Path

    def place(self, group: str) -> Path | None:
        """Return the folder of a group; its nearest one above, if that is all that is shown; None
        if neither is.

        Paths begin at the top of the process's own container: ``..`` leads out of it.
        """
        parts = [part for part in group.split("/") if part]
        top = [part for part in self.top.split("/") if part]
        below = parts[len(top) :]
        if parts[: len(top)] == top and ".." not in below:
            return self.folder.joinpath(*below)
        above = set(top) == {".."} and parts.count("..") <= len(top)
        return self.folder if above else None


@lru_cache(maxsize=8)
def _folders(groups: str, controller: str, root: Path) -> tuple[Path, ...]:
    mounts, found = list(_mounts(root)), dict[Path, None]()
    for line in groups.splitlines():
        number, names, group = [*line.split(":", 2), "", ""][:3]
        unified = number == "0" and not names
        if not unified and controller not in names.split(","):
            continue
        shown = [
            mount
            for mount in mounts
            if mount.kind == ("cgroup2" if unified else "cgroup")
            if unified or controller in mount.controllers
        ]
        places = [(mount, place) for mount in shown if (place := mount.place(group)) is not None]
        for mount, place in places or [(mount, mount.folder) for mount in shown]:
            above = takewhile(mount.folder.parent.__ne__, place.parents)
            found |= dict.fromkeys([place, *above])
    return tuple(found)


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _text(root / "proc/self/mountinfo").splitlines():
        about, _, system = line.partition(" - ")
        fields, (kind, _, options) = about.split(" "), [*system.split(" ", 2), "", ""][:3]
        if kind in ("cgroup", "cgroup2") and len(fields) > 4:
            top, folder = (_unescaped(field) for field in fields[3:5])
            yield _Mount(kind, tuple(options.split(",")), top, root / folder.lstrip("/"))


def _unescaped(field: str) -> str:
    return re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), field)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text("utf-8", "surrogateescape")
    return ""

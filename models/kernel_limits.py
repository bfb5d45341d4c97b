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
    with suppress(ValueError, IndexError):  # files that are not as a kernel writes them
        return [*_of_groups(root), *_of_process(root)]
    return []


def processors(root: Path = ROOT) -> float | None:
    """Return the processors that this process may use at a time by its share of their time; None
    without such a limit. A choice of processors (cpuset) is part of the process's affinity."""
    found = list[float]()
    for folder in folders("cpu", root):
        written = text_in(folder / "cpu.max") or " ".join(
            text_in(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        )
        quota, period = [*written.split(), "", ""][:2]
        if quota.isdecimal() and period.isdecimal() and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def folders(controller: str, root: Path = ROOT) -> tuple[Path, ...]:
    """List the folders of this process's groups, each before the one above it."""
    return _folders(text_in(root / "proc/self/cgroup"), controller, root)


def _of_groups(root: Path) -> Iterator[MemoryLimit]:
    for folder in folders("memory", root):
        stat = dict(line.split(" ", 1) for line in text_in(folder / "memory.stat").splitlines())
        # version 1 tells a group's own share apart from that of all below it
        kept = sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in _RECLAIMABLE)
        for limit_file, used_file, above in _GROUP_FILES:
            written = text_in(folder / limit_file).strip()
            limits = [int(n) for n in (written, stat.get(above, "")) if n.isdecimal()]
            if (limit := min(limits, default=NO_LIMIT)) < NO_LIMIT:
                used = max(int(text_in(folder / used_file) or 0) - kept, 0)
                named = folder / (limit_file if str(limit) == written else "memory.stat")
                yield MemoryLimit(limit, max(limit - used, 0), f"/{named.relative_to(root)}")


def _of_process(root: Path) -> Iterator[MemoryLimit]:
    used, page = text_in(root / "proc/self/statm").split(), os.sysconf("SC_PAGE_SIZE")
    for line in text_in(root / "proc/self/limits").splitlines() if used else ():
        for begin, field, source in _PROCESS_LINES:
            limit = line.removeprefix(begin).split()[0] if line.startswith(begin) else ""
            if limit.isdecimal():
                yield MemoryLimit(int(limit), max(int(limit) - int(used[field]) * page, 0), source)


@lru_cache(maxsize=8)
def _folders(groups: str, controller: str, root: Path) -> tuple[Path, ...]:
    mounts = [line.partition(" - ") for line in text_in(root / "proc/self/mountinfo").splitlines()]
    found = dict[Path, None]()
    for hierarchy, names, group in (line.split(":", 2) for line in groups.splitlines()):
        unified = hierarchy == "0" and not names
        if not unified and controller not in names.split(","):
            continue
        shown = dict[Path, Path | None]()  # by the top folder of a mount: that of the group
        for about, _, system in mounts:
            kind, _, options = system.split(" ", 2)
            of_ours = kind == "cgroup" and controller in options.split(",")
            if kind == "cgroup2" if unified else of_ours:
                above, folder = (_unescaped(field) for field in about.split(" ")[3:5])
                top = root / folder.lstrip("/")
                shown[top] = _place(group, above, top)
        # a mount that does not show the group is the nearest there is, where no other does
        known = {top: place for top, place in shown.items() if place is not None}
        for top, place in (known or {top: top for top in shown}).items():
            found |= dict.fromkeys([place, *takewhile(top.parent.__ne__, place.parents)])
    return tuple(found)


def _place(group: str, above: str, top: Path) -> Path | None:
    """Return the folder of a group, or of the nearest one above it that a mount shows; None if it
    shows neither.

    Paths begin at the top of the process's own container: ``..`` leads out of it.

    Args:
        above: the group that the mount shows as its ``top``.
    """
    parts, shown = ([one for one in path.split("/") if one] for path in (group, above))
    below = parts[len(shown) :]
    if parts[: len(shown)] == shown and ".." not in below:
        return top.joinpath(*below)
    return top if set(shown) == {".."} and parts.count("..") <= len(shown) else None


def _unescaped(field: str) -> str:
    return re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), field)


def text_in(path: Path) -> str:
    """Return the text of a file of the system; "" where it cannot be read."""
    with suppress(OSError):
        return path.read_text("utf-8", "surrogateescape")
    return ""

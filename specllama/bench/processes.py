"""Processor time of servers on this machine, where the system shows it (Linux)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

_LISTENS = "0A"
_PROC = Path("/proc")


def server_of(url: str) -> int | None:
    """The process that listens at a port of this machine; None where it is not ours to see."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        return None
    sockets = {
        f"socket:[{inode}]"
        for table in ("tcp", "tcp6")
        for _, local, _, state, *_, inode in _connections(_PROC / "net" / table)
        if state == _LISTENS and int(local.rpartition(":")[2], 16) == port
    }
    for process in _PROC.glob("[0-9]*"):
        with suppress(OSError):
            if any(os.readlink(fd) in sockets for fd in (process / "fd").iterdir()):
                return int(process.name)
    return None


def _connections(table: Path) -> Iterator[list[str]]:
    with suppress(OSError):
        for line in table.read_text().splitlines()[1:]:
            yield line.split()[:10]


def cpu_seconds(pid: int) -> float:
    """What a process and its children have had of processors since they began."""
    ticks = 0
    family = {pid}
    for process in sorted(map(int, (path.name for path in _PROC.glob("[0-9]*")))):
        with suppress(OSError, IndexError):
            said = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
            if process in family or int(said[1]) in family:
                family.add(process)
                ticks += int(said[11]) + int(said[12])
    return ticks / os.sysconf("SC_CLK_TCK")

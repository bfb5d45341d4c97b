"""Servers on this machine, if the system shows them (Linux): processor time, command lines."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

_LISTENS = "0A"
_FOLDER = re.compile(r"(?:/[\w.+~-]+)+/(?=[\w.+~-])")
_SECRET = re.compile(r"^--?\S*(key|token(?!s|iz)|secret|password)", re.I)
_PROC = Path("/proc")


def server_of(url: str) -> int | None:
    """Return the process that listens at a port of this machine; None if we may not see it."""
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
            # unlike readlink, realpath passes over one that was closed since it was listed
            if any(Path(os.path.realpath(fd)).name in sockets for fd in (process / "fd").iterdir()):
                return int(process.name)
    return None


def _connections(table: Path) -> Iterator[list[str]]:
    with suppress(OSError):
        for line in table.read_text().splitlines()[1:]:
            yield line.split()[:10]


def command_of(url: str) -> str:
    """Return the command of the server at a port of this machine, its program first; "" for others.

    Folders are left out, and so are the values of arguments that may be secret.
    """
    pid, words = server_of(url), list[str]()
    with suppress(OSError):
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    words = [_FOLDER.sub("", word) for word in words if word]
    for at, word in enumerate(words):
        if _SECRET.search(word):
            flag, equals, _ = word.partition("=")
            words[at] = flag + equals + ("…" if equals else "")
            if not equals and at + 1 < len(words):
                words[at + 1] = "…"
    return re.sub(r"'(\S*…)'", r"\1", shlex.join(words))


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process and its descendants since they began."""
    told: dict[int, tuple[int, int]] = {}  # parent, ticks
    for process in _PROC.glob("[0-9]*"):
        with suppress(OSError, IndexError):
            said = (process / "stat").read_text().rpartition(")")[2].split()
            told[int(process.name)] = int(said[1]), int(said[11]) + int(said[12])
    family, found = {pid}, [pid]
    while found:  # numbers of processes begin anew some time: a child's may be the smaller one
        found = [one for one, (parent, _) in told.items() if parent in found and one not in family]
        family.update(found)
    ticks = sum(told[one][1] for one in family if one in told)
    return ticks / os.sysconf("SC_CLK_TCK")

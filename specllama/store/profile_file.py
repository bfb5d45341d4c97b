"""The file of a profile, shared by several processes: locked, read again, merged, replaced whole.

A process remembers what it last saw in the file. When it writes, it keeps what another process has
changed since. A part (a cost table, what is known of a source or of a method, the advice) that only
one of them changed is taken from that one; if both changed it, what was saved first stays. Changes
of the ledger add up: what either of them lost or gained counts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from specllama.files import DAMAGE, read_json
from specllama.paths import private_folder, replace_file

__all__ = ["DAMAGE", "Data", "Stamp", "merge", "read", "stamp", "update"]

LOCK_S = 2.0  # how long a save waits for another one before it gives up
Data = dict[str, Any]


def read(path: Path) -> Data | None:
    """Read the contents of the file; return None if there is none.

    Raises:
        OSError: it cannot be read.
        one of ``DAMAGE``: it is no JSON object.
    """
    data: Data | None = read_json(path, Data)
    return data


Stamp = tuple[int, ...]  # of a file: it changes whenever the file is replaced; () without one


def stamp(path: Path) -> Stamp:
    try:
        stat = path.stat()
    except OSError:
        return ()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def update(path: Path, change: Callable[[], Data]) -> Stamp:
    """Replace the file by ``change()``, called while no other process may; returns its new stamp,
    () where the file cannot be written."""
    from filelock import FileLock, Timeout

    try:
        private_folder(path.parent)
        with FileLock(path.parent / ".lock", timeout=LOCK_S, mode=0o600):
            replace_file(path, msgspec.json.encode(change()))
            return stamp(path)
    except (OSError, Timeout, NotImplementedError):
        return ()


# of the parts that only make sense whole: their place, "*" for every other name; None is a part
_PARTS: Data = {
    "advice": None,
    "costs": {"own": {"*": None}, "*": None},
    "bands": {"*": {"pace": None, "*": {"*": None}}},
}


def merge(base: Data, mine: Data, theirs: Data) -> Data:
    """Return ``base`` with the changes of both: their file and my state, as ``Profile`` writes
    them."""
    out: Data = {"schema": mine["schema"], "pair": mine["pair"]}
    for name, inside in _PARTS.items():
        out[name] = _merged(inside, base[name], mine[name], theirs[name])
    out["ledger"] = _sums(base["ledger"], mine["ledger"], theirs["ledger"])
    return out


def _merged(parts: Data | None, base: Any, mine: Any, theirs: Any) -> Any:
    if parts is None:
        return mine if theirs is None or theirs == base else theirs
    base, mine, theirs = base or {}, mine or {}, theirs or {}
    return {
        name: _merged(
            parts[name if name in parts else "*"], base.get(name), mine.get(name), theirs.get(name)
        )
        for name in {**theirs, **mine}
    }


def _sums(base: Data, mine: Data, theirs: Data) -> Data:
    """Add up both processes' changes of each amount."""

    def both(was: float, here: float, there: float) -> float:
        return there + here - was

    own = {
        name: both(*(ledger["own"].get(name, 0.0) for ledger in (base, mine, theirs)))
        for name in {**theirs["own"], **mine["own"]}
    }
    spare = both(base["spare"], mine["spare"], theirs["spare"])
    lead = both(*(ledger["lead"] for ledger in (base, mine, theirs)))
    return {"spare": spare, "own": own, "lead": lead}

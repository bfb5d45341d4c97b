"""The contents of files, each by a name: the one answer to "is it still the same file?".

The name is the SHA-256 of all bytes. To read them takes a second a gigabyte and more, so nobody
waits for it before a first answer: ``known`` tells at once what was read before, and ``read``
reads, at rest. What was read holds for a ``Stamp``, which every change of a file changes: a rename
into its place brings another inode, and no program sets the time of the last change of anything
(ctime) as it can set that of the bytes. File systems without such a time are in limits.md.

What is kept on disk of a file goes by

- its contents, where texts, bits or weights follow from them: states of conversations (of target,
  draft model, heads and adapters), exactness, copies with fewer words or layers, hashes in logs;
- ``GgufHeader.fingerprint``, which is there at once, where only guesses or their speed do: heads
  that are trained for a target, their trainings, numbers of threads;
- its name and sizes, where lessons go on: profiles of speed;
- its stamp, where it is read again in no time: headers in lists.

What goes by one of the first two has a name that begins with its first ``SHORT`` digits, by which
``receipts.belongings`` finds it.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from specllama import paths
from specllama.errors import ModelUnavailable, SpecllamaError
from specllama.files import DAMAGE, read_json
from specllama.models.download import CHUNK, Digest
from specllama.models.gguf_format import part_names

Stamp = tuple[int, int, int, int]  # inode, bytes, times of the last change of bytes and of anything
Check = Callable[[], object]  # called often while a file is read; it may raise, or wait

SHORT = 16
_MOST = 1000  # files that are remembered
_TICK_NS = 50_000_000  # a second change within it might leave the stamp as it is
_SECONDS_NS = 2 * 10**9  # the same, on file systems that keep whole seconds
_LOOK_S = 0.05

_found: dict[Stamp, str] = {}
_reading = threading.Lock()


def stamp_of(path: Path) -> Stamp | None:
    """Return the stamp of a file; None if there is none."""
    try:
        return _stamp(path.stat())
    except (OSError, ValueError):
        return None


def _stamp(about: os.stat_result) -> Stamp:
    return about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def known(stamps: Iterable[Stamp | None]) -> str:
    """Return the name of what the files with these stamps hold, as one; "" if one was not read."""
    names = [_known(one) for one in stamps]
    return _joined(names) if names and all(names) else ""


def read(files: Iterable[tuple[Path, Stamp | None]], check: Check = lambda: None) -> str:
    """Return the same of these files, which are read where that is needed.

    Raises:
        ModelUnavailable: one cannot be read, or has another stamp.
    """
    return _joined([_read(path, stamp, check) for path, stamp in files])


def of_model(path: Path, most: float = math.inf) -> str | None:
    """Return the name of what a model's files hold now, which are read if they have at most
    ``most`` bytes; None if it cannot be told."""
    parts = [path.parent / name for name in part_names(path.name)]
    files = [(part, stamp_of(part)) for part in parts]
    if name := known(stamp for _, stamp in files):
        return name
    if sum(stamp[1] if stamp else 0 for _, stamp in files) > most:
        return None
    with suppress(SpecllamaError):
        return read(files)
    return None


def _joined(names: list[str]) -> str:
    return names[0] if len(names) == 1 else hashlib.sha256(" ".join(names).encode()).hexdigest()


def _known(stamp: Stamp | None) -> str:
    if stamp is not None and stamp not in _found:
        _found.update((one, name) for _, one, name in _kept())
    return "" if stamp is None else _found.get(stamp, "")


def _read(path: Path, stamp: Stamp | None, check: Check) -> str:
    while not _reading.acquire(timeout=_LOOK_S):
        check()
    try:
        if name := _known(stamp):
            return name
        settled = _settles(stamp, check)
        try:
            with path.open("rb", buffering=0) as file:
                before = _stamp(os.fstat(file.fileno()))
                name = digest_of(file, Digest("sha256", ""), lambda n: check())
                same = before == _stamp(os.fstat(file.fileno())) == stamp
        except OSError as error:
            raise ModelUnavailable(f"{path} cannot be read: {error.strerror or error}") from None
        if stamp is None or not same:
            raise ModelUnavailable(f"{path} has changed since it was opened", "open it again")
        if settled:
            keep(path, stamp, name)
        return name
    finally:
        _reading.release()


def _settles(stamp: Stamp | None, check: Check) -> bool:
    """Wait until a further change would give a file another stamp; True if that is certain."""
    if stamp is None:
        return False
    tick = _TICK_NS if stamp[3] % 10**9 else _SECONDS_NS
    until = time.monotonic_ns() + 2 * tick
    while not (settled := abs(time.time_ns() - stamp[3]) > tick) and time.monotonic_ns() < until:
        check()
        time.sleep(_LOOK_S)
    return settled


def digest_of(file: BinaryIO, digest: Digest, advanced: Callable[[int], object]) -> str:
    """Compute the digest of an open file; ``advanced`` hears how much was read."""
    state, done = digest.start(os.fstat(file.fileno()).st_size), 0
    while chunk := file.read(CHUNK):
        state.update(chunk)
        done += len(chunk)
        advanced(done)
    return state.hexdigest()


# -- what is remembered ----------------------------------------------------------------------------


def keep(path: Path, stamp: Stamp | None, name: str) -> None:
    """Remember what a file with this stamp holds; where the disk refuses, in this process alone."""
    if stamp is None:
        return
    _found[stamp] = name
    others = [one for one in _kept() if one[1] != stamp][1 - _MOST :]
    with suppress(OSError):
        paths.replace_file(_index(), msgspec.json.encode([*others, (_named(path), stamp, name)]))


def names_of(path: Path) -> set[str]:
    """Return the names of all that a file was known to hold, but for what other files hold now."""
    kept, here = _kept(), _named(path)
    others = {name for where, stamp, name in kept if where != here and stamp == _stamp_at(where)}
    return {name for where, _, name in kept if where == here} - others


def _index() -> Path:
    return paths.cache_dir() / "contents.json"


def _named(path: Path) -> str:
    """Return a path as text of any encoding: names of files need not be UTF-8."""
    return os.fsencode(os.path.realpath(path)).decode("latin-1")


def _stamp_at(named: str) -> Stamp | None:
    return stamp_of(Path(os.fsdecode(named.encode("latin-1"))))


def _kept() -> list[tuple[str, Stamp, str]]:
    with suppress(OSError, *DAMAGE):
        found: list[tuple[str, Stamp, str]] | None
        found = read_json(_index(), list[tuple[str, Stamp, str]])
        return found or []
    return []

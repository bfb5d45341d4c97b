"""States of conversations on disk: one file a text, in a folder for each thing that reads them.

    <data>/states/<key>/<owner>.<name>.state

A file is ``_MAGIC, length and digest of a head, head, parts, digest of the parts``. The head tells
what is in it, so that it is found without being read; nothing is taken from a file whose digests do
not fit. A file is written beside its place and moved there whole: a kill leaves a file that no
reader looks at. All folders together are bounded; what was used least recently goes first. Only the
files' owner may read them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from specllama.errors import StoreError
from specllama.paths import private_folder, replace_file, standing, states_dir

Bytes = bytes | bytearray | memoryview

SUFFIX = ".state"
MOST_BYTES = 4 << 30
SHARE = 10  # of what is free, one part in so many
_MAGIC = b"specllama state 1\r\n\0"
_DIGEST = 32
_BEGIN = len(_MAGIC) + 8 + _DIGEST
_HEAD_BYTES = 64 << 20  # more than any head has
_LEFT_S = 600.0  # a file that was begun so long ago was never finished


@dataclass(frozen=True, slots=True)
class StateFile:
    """A file whose head is whole.

    Attributes:
        owner: whose it is. head: as it was written.
    """

    path: Path
    owner: str
    head: bytes


class States:
    """The states of one key.

    Args:
        key: names the folder: of everything by which a state would be another.
        most: bytes of all folders together; default: 4 GiB, or a tenth of what is free there.
    """

    def __init__(self, key: str, *, most: int | None = None, folder: Path | None = None) -> None:
        self.root = folder or states_dir()
        self.path = self.root / key
        self.most = bound(self.root) if most is None else most
        self._found: dict[tuple[str, int], StateFile] = {}  # by name and time of the file

    def found(self) -> list[StateFile]:
        """List the readable files, with those that other processes have written meanwhile."""
        known: dict[tuple[str, int], StateFile] = {}
        for path in self.path.glob(f"[!.]*{SUFFIX}"):
            with suppress(OSError, ValueError):
                which = path.name, path.stat().st_ctime_ns
                if which not in self._found:
                    with path.open("rb") as file:
                        head = _head_of(file)
                    self._found[which] = StateFile(path, path.name.partition(".")[0], head)
                known[which] = self._found[which]
        self._found = known
        return list(known.values())

    def write(self, owner: str, name: str, head: bytes, parts: Sequence[Bytes]) -> bool:
        """Write a file, and make room for it; whether it is there now.

        Raises:
            OSError: it cannot be written; nothing was.
        """
        size = _BEGIN + len(head) + sum(len(part) for part in parts) + _DIGEST
        if size > self.most:
            return False
        private_folder(self.root)
        path = self.path / f"{owner}.{name}{SUFFIX}"
        begin = _MAGIC + len(head).to_bytes(8, "little") + _digest([head])
        replace_file(path, begin, head, *parts, _digest(parts))
        trim(self.root, self.most, but=path)
        return path.exists()

    def forget(self, owner: str) -> None:
        """Delete all states of an owner, under every key."""
        forget(owner, self.root)


def read(one: StateFile, sizes: Sequence[int]) -> list[memoryview]:
    """Read the parts of a state file, whose sizes are given, and mark it as recently used.

    Raises:
        StoreError: they are not what was written, or gone.
    """
    try:
        with one.path.open("rb") as file:
            if _head_of(file) != one.head:
                raise StoreError("another process has replaced it")
            body = bytearray(sum(sizes))
            n = file.readinto(body)
            rest = file.read(_DIGEST + 1)
    except (OSError, ValueError) as error:
        raise StoreError(f"{one.path.name}: {error}") from None
    if n != len(body) or rest != _digest([body]):
        raise StoreError(f"{one.path.name} is torn or damaged")
    with suppress(OSError):
        os.utime(one.path)
    view, parts, at = memoryview(body), [], 0
    for size in sizes:
        parts.append(view[at : at + size])
        at += size
    return parts


def delete(one: StateFile) -> None:
    one.path.unlink(missing_ok=True)


def bound(root: Path) -> int:
    """Return the bytes that states may take unless the user sets a bound."""
    try:
        free = shutil.disk_usage(standing(root)).free
    except OSError:
        return 0
    return min(MOST_BYTES, (free + size(root)) // SHARE)


def size(root: Path | None = None) -> int:
    """Return the bytes that all states take."""
    return sum(size for _, size, _ in _files(root or states_dir()))


def forget(owner: str, root: Path | None = None) -> None:
    """Delete every state of an owner, "*" for all."""
    for path in (root or states_dir()).glob(f"*/{owner}.*{SUFFIX}"):
        path.unlink(missing_ok=True)


def trim(root: Path, most: int, but: Path | None = None) -> None:
    """Delete the least recently used until all states take ``most`` bytes, and the remains of a
    kill."""
    now, files = time.time(), sorted(_files(root))
    total = sum(size for _, size, _ in files)
    for when, size, path in files:
        begun = path.name.startswith(".")
        if now - when > _LEFT_S if begun else total > most and path != but:
            path.unlink(missing_ok=True)
            total -= size


def _files(root: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield (time of last use, bytes, path) of each file."""
    for path in root.glob("*/*"):
        with suppress(OSError):
            stat = path.stat()
            yield stat.st_mtime, stat.st_size, path


def _head_of(file: BinaryIO) -> bytes:
    """Read the head of a file.

    Raises:
        ValueError: there is no whole head.
    """
    begin = file.read(_BEGIN)
    size = int.from_bytes(begin[len(_MAGIC) : len(_MAGIC) + 8], "little")
    if len(begin) < _BEGIN or not begin.startswith(_MAGIC) or size > _HEAD_BYTES:
        raise ValueError("it is no state of this program")
    head = file.read(size)
    if _digest([head]) != begin[-_DIGEST:]:
        raise ValueError("it is torn or damaged")
    return head


def _digest(parts: Sequence[Bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for part in parts:
        digest.update(part)
    return digest.digest()

"""Features on disk: a ring of files that is bounded in bytes.

A shard holds the features of some replies, side by side, as ``numpy.savez`` writes them; its sums
tell a damaged one. It is written beside and renamed, so that there are only whole ones. When the
bound is reached, the oldest of what is learnt from goes: the replies stay in ``texts.jsonl`` and
can be read again. Those held out have shards of their own, which stay.
"""

from __future__ import annotations

import io
import logging
import random
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specllama.paths import private_folder, replace_file
from specllama.training.corpus import refused
from specllama.training.features import PARTS, Features

logger = logging.getLogger("specllama.training.shards")

SHARD_BYTES = 32 << 20
_SHARES = 8  # a shard takes at most this part of the bound
_NAME = re.compile(r"(shard|held)-(\d{6,})\.npz")
_DAMAGE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


class _Shard(NamedTuple):
    path: Path
    ids: tuple[str, ...]
    n_bytes: int


class Shards:
    """The shards of a folder.

    Args:
        most_bytes: of all shards together.

    Raises:
        StoreError: the folder cannot be read or written.
    """

    def __init__(
        self, folder: Path, most_bytes: int = 2 * 10**9, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self._folder, self.most_bytes = folder, most_bytes
        self._shard_bytes = min(shard_bytes, most_bytes // _SHARES)
        self._shards: dict[bool, list[_Shard]] = {False: [], True: []}
        self._waiting: dict[bool, list[Features]] = {False: [], True: []}  # to be written
        self._number = 0
        try:
            private_folder(folder)
            for left in folder.glob(".*-*.npz.*"):
                left.unlink(missing_ok=True)  # of a process that was killed while it wrote
            for path in sorted(folder.glob("*-*.npz")):
                if named := _NAME.fullmatch(path.name):
                    self._number = max(self._number, int(named[2]) + 1)
                    self._look(path, named[1] == "held")
        except OSError as error:
            raise refused("features", folder, error) from None
        self._bound()

    def _look(self, path: Path, held_out: bool) -> None:
        """Take a file in; remove a damaged one."""
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                ids = tuple(arrays["id"].tolist())
        except _DAMAGE as error:
            self._drop(path, error)
        else:
            self._shards[held_out].append(_Shard(path, ids, path.stat().st_size))

    def _drop(self, path: Path, why: object) -> None:
        logger.warning("%s is damaged (%s): its replies are read again", path, why)
        path.unlink(missing_ok=True)
        for shards in self._shards.values():
            shards[:] = [one for one in shards if one.path != path]

    # -- facts --

    @property
    def n_bytes(self) -> int:
        """The bytes of all shards on disk."""
        return sum(one.n_bytes for shards in self._shards.values() for one in shards)

    def ids(self, held_out: bool) -> set[str]:
        """Return the ids of the replies whose features are at hand, not yet written ones too."""
        waiting = {one.id for one in self._waiting[held_out]}
        return waiting.union(*(one.ids for one in self._shards[held_out]))

    # -- writing --

    def add(self, features: Features, held_out: bool) -> None:
        """Add the features of a reply; they are written when there are enough for a shard.

        Raises:
            StoreError: they cannot be written.
        """
        waiting = self._waiting[held_out]
        waiting.append(features)
        if sum(one.n_bytes for one in waiting) >= self._shard_bytes:
            self._write(held_out)

    def flush(self) -> None:
        """Write what waits.

        Raises:
            StoreError: it cannot be written.
        """
        for held_out in self._waiting:
            self._write(held_out)

    def _write(self, held_out: bool) -> None:
        features = self._waiting[held_out]
        if not features:
            return
        path = self._folder / f"{'held' if held_out else 'shard'}-{self._number:06}.npz"
        buffer = io.BytesIO()
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(one, name) for one in features]) for name in PARTS
        }
        for name in ("id", "reply_from"):
            arrays[name] = np.array([getattr(one, name) for one in features])
        arrays["n"] = np.array([len(one.tokens) for one in features])
        np.savez(buffer, **arrays)
        data = buffer.getbuffer()
        self._bound(len(data))
        try:
            replace_file(path, data)
        except OSError as error:
            raise refused("features", self._folder, error) from None
        self._waiting[held_out] = []
        self._number += 1
        ids = tuple(one.id for one in features)
        self._shards[held_out].append(_Shard(path, ids, len(data)))

    def _bound(self, more: int = 0) -> None:
        """Remove the oldest shards that are learnt from until ``more`` bytes have room."""
        ring = self._shards[False]
        while ring and self.n_bytes + more > self.most_bytes:
            ring.pop(0).path.unlink(missing_ok=True)

    # -- reading --

    def read(self, held_out: bool, order: random.Random | None = None) -> Iterator[Features]:
        """Yield the features of one side once, those that wait to be written last.

        Args:
            order: shuffles the shards, and the replies in each; None takes the oldest first.
        """
        shards = list(self._shards[held_out])
        if order is not None:
            order.shuffle(shards)
        for shard in shards:
            found = self._load(shard.path)
            if order is not None:
                order.shuffle(found)
            yield from found
        yield from list(self._waiting[held_out])

    def _load(self, path: Path) -> list[Features]:
        """Read a shard; a damaged one is removed and gives nothing."""
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                part = {name: arrays[name] for name in arrays.files}
            ends = np.cumsum(part["n"])
            cuts = [slice(end - n, end) for n, end in zip(part["n"], ends, strict=True)]
            return [
                Features(  # a view would keep the whole shard in memory
                    **{name: part[name][cut].copy() for name in PARTS},
                    reply_from=int(part["reply_from"][i]),
                    id=str(part["id"][i]),
                )
                for i, cut in enumerate(cuts)
            ]
        except FileNotFoundError:  # it left the ring in the meantime
            return []
        except _DAMAGE as error:
            self._drop(path, error)
            return []

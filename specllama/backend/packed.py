"""A parked lane as plain values and bytes, and back: the form that a file can hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec
import numpy as np

from specllama.arrays import HiddenNeed, Rows
from specllama.backend.base import Blob
from specllama.backend.hidden import HiddenRows
from specllama.backend.kernels import Read
from specllama.backend.lane import Parked
from specllama.backend.recurrent_pool import Checkpoint, Checkpoints, ParkedWhole

Bytes = bytes | bytearray | memoryview


class RowsAbout(msgspec.Struct, frozen=True, array_like=True):
    """The outline of hidden states by position: the first position, how many, how wide."""

    first: int = 0
    n: int = 0
    width: int = 0


class About(msgspec.Struct, frozen=True, array_like=True):
    """A parked lane without its bytes; see ``Parked``.

    Attributes:
        tokens: 32-bit integers.
        whole: (length, width of its hidden state or 0) of each copy of a running state; None of a
            lane that has none.
    """

    tokens: bytes
    hidden: RowsAbout
    need: str | tuple[int, ...]
    read: tuple[Read, ...]
    whole: tuple[tuple[int, int], ...] | None = None

    @property
    def text(self) -> list[int]:
        text: list[int] = np.frombuffer(self.tokens, "<i4").tolist()
        return text


def pack(blob: Blob) -> tuple[About, list[Bytes]] | None:
    """Pack a parked lane into a description and its bytes; None if its kind is not known."""
    if not isinstance(blob, Parked):
        return None
    hidden, states = pack_rows(blob.hidden)
    parts: list[Bytes] = [blob.state, states]
    whole: list[tuple[int, int]] | None = None
    if isinstance(blob, ParkedWhole):
        whole = []
        for one in blob.checkpoints:
            row = None if one.hidden is None else np.ascontiguousarray(one.hidden, np.float32)
            whole.append((one.length, 0 if row is None else row.shape[1]))
            parts += [memoryview(one.state).cast("B"), b"" if row is None else _bytes(row)]
    about = About(
        tokens=np.asarray(blob.tokens, "<i4").tobytes(),
        hidden=hidden,
        need=blob.need,
        read=tuple(blob.read),
        whole=None if whole is None else tuple(whole),
    )
    return about, parts


def unpack(about: About, parts: Sequence[Bytes]) -> Parked:
    """Rebuild the lane from the results of ``pack``. Without parts it is an outline, which shows
    how much of a text it holds.

    Raises:
        ValueError, IndexError: the parts do not fit what stands beside them.
    """
    state, hidden, need = b"", HiddenRows(), cast(HiddenNeed, "nothing")
    if parts:
        state, need = cast(bytes, parts[0]), cast(HiddenNeed, about.need)
        hidden = unpack_rows(about.hidden, parts[1])
    if about.whole is None:
        return Parked(about.text, state, hidden, need, about.read)
    kept = Checkpoints()
    for i, (length, width) in enumerate(about.whole):
        row = _rows(parts[3 + 2 * i], 1, width) if width and parts else None
        kept.add(Checkpoint(length, bytearray(parts[2 + 2 * i]) if parts else b"", row))
    return ParkedWhole(about.text, state, hidden, need, about.read, kept)


def n_parts(about: About) -> int:
    """Count the parts that ``pack`` returns for a lane."""
    return 2 if about.whole is None else 2 + 2 * len(about.whole)


def pack_rows(hidden: HiddenRows) -> tuple[RowsAbout, Bytes]:
    first, end = hidden.first, hidden.end
    rows = hidden.rows(first, end)
    if rows is None:
        return RowsAbout(first), b""
    return RowsAbout(first, end - first, rows.shape[1]), _bytes(rows.copy())


def unpack_rows(about: RowsAbout, data: Bytes) -> HiddenRows:
    hidden = HiddenRows()
    hidden.clear(about.first)
    if about.n:
        hidden.add(about.first, _rows(data, about.n, about.width))
    return hidden


def _bytes(rows: Rows) -> memoryview:
    return rows.data.cast("B")


def _rows(data: Bytes, n: int, width: int) -> Rows:
    return np.frombuffer(data, np.float32).reshape(n, width).copy()

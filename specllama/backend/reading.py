"""A side pool that reads a long text while the main pool serves others.

Attention in tiles depends on where cells lie (``kernels``). A lane among others has its text read
in a pool of its own, where it lies as if it were alone, and takes the new cells over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specllama.arrays import Rows
from specllama.backend.base import Outputs
from specllama.backend.hidden import HiddenRows
from specllama.backend.lane import CellLane, Parked
from specllama.history import Mark


class _Room(Protocol):
    """A pool for reading."""

    @property
    def n_ctx(self) -> int: ...

    def resume(self, blob: Parked) -> CellLane: ...

    def state_behind(self, lane: CellLane, past: int) -> bytes: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _PromptReader:
    room: _Room
    lane: CellLane
    of: CellLane  # whose text it holds
    mark: Mark  # and up to where


class ReadingRoom:
    """A side pool that reads for the lanes of a pool of up to ``n_ctx`` tokens.

    Args:
        make: an empty pool for so many tokens, computed alike.
        state: what the cache holds of a lane.
    """

    def __init__(
        self, make: Callable[[int], _Room], state: Callable[[CellLane], bytes], n_ctx: int
    ) -> None:
        self._make = make
        self._state = state
        self._n_ctx = n_ctx
        self._reader: _PromptReader | None = None

    def read(
        self, lane: CellLane, tokens: Sequence[int], outputs: Outputs
    ) -> tuple[bytes, HiddenRows, Rows]:
        """Read ``tokens`` after the lane's text; return their cells' state, hidden states, rows."""
        past = len(lane.tokens)
        reader = self._reader
        if reader is not None and reader.room.n_ctx < past + len(tokens):
            self.close()
            reader = None
        room = reader.room if reader is not None else self._make(self._size(past + len(tokens)))
        if reader is None or not self._holds(reader, lane):
            if reader is not None:
                reader.lane.close()
            state = self._state(lane) if past else b""
            copy = room.resume(Parked(list(lane.tokens), state))
            reader = self._reader = _PromptReader(room, copy, lane, lane.tokens.mark())
        reader.lane.capture(lane.need)
        rows = reader.lane.forward(tokens, outputs=outputs)
        return room.state_behind(reader.lane, past), reader.lane.hidden, rows

    def _size(self, n: int) -> int:
        return min(4 * n, self._n_ctx)

    @staticmethod
    def _holds(reader: _PromptReader, lane: CellLane) -> bool:
        n = len(lane.tokens)
        return reader.of is lane and len(reader.lane.tokens) == n == lane.tokens.kept(reader.mark)

    def taken(self, lane: CellLane) -> None:
        """Remember that the lane took the text read for it last."""
        if self._reader is not None:
            self._reader.mark = lane.tokens.mark()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.room.close()
            self._reader = None

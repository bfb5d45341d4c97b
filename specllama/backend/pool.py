"""The bookkeeping and admission of a pool of lanes, whichever library runs the passes.

The rows of a pass lie depth first of all: every lane's first token, then every second one, so that
what is rejected gathers at the end. ``LaneBooks`` frees or keeps it.

Where passes of some widths only are computed alike, those that return rows are given one of these
widths (``keep_to``): guesses that no drafter offered are hung on their longest part, and given
up as rejected ones are. They are rows like all others, in the lane's own text and with logits, so
that nothing tells a pass with pads from one without. They come last: their cells are free again
before the next pass.

The library ends the process on some bad calls: what it would not take is refused here before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from specllama.arrays import Rows, with_final
from specllama.backend.base import MAKE_ROOM, Blob, Lane, Outputs, Part
from specllama.backend.batch import Shape
from specllama.backend.cells import Places
from specllama.backend.hidden import HiddenRows
from specllama.backend.kernels import TILE, Kernels
from specllama.backend.lane import CellLane, LaneBooks, Parked
from specllama.backend.parts import PassPart, lay, pick, require_tokens
from specllama.errors import Cancelled, ContextFull, EngineError
from specllama.text_history import Mark

if TYPE_CHECKING:
    from specllama.backend.llama_cache import LlamaCache


class CellPool(LaneBooks):
    """A pool of lanes, see ``base.Pool``, and ``LaneBooks`` for the arguments."""

    def __init__(
        self, cache: LlamaCache, shape: Shape, n_vocab: int, kernels: Kernels, *, in_order: bool
    ) -> None:
        super().__init__(cache, shape, n_vocab, kernels, in_order=in_order)
        self._counting = np.arange(cache.n_cells + shape.n_batch, dtype=np.int32)
        self._no_rows: Rows = np.empty((0, n_vocab), np.float32)
        self._reading = ReadingRoom(self)

    @property
    def alike(self) -> int | None:
        return None

    # -- facts --

    @property
    def free_leaves(self) -> int:
        self.settle()
        return min(self.max_leaves - 1, len(self._free))

    def exact_prefix(self, held: Lane | Blob, keep: int, n: int, begin: int = 0) -> int:
        read, kernels = cast(CellLane | Parked, held).read, self.kernels
        return keep if kernels.widths else kernels.exact_prefix(read, keep, n, begin)

    # -- lanes --

    def open(self) -> CellLane:
        lane = CellLane(self, self.take_sequence())
        self.seat(lane)
        return lane

    def fork(self, lane: Lane, keep: int, into: Lane | None = None) -> CellLane:
        mine = self._mine(lane)
        if not 0 <= keep <= len(mine.tokens):
            raise ValueError(f"cannot fork behind {keep} of {len(mine.tokens)} tokens")
        new = self.open() if into is None else self._emptied(into)
        self.settle()
        if keep:
            self.cache.copy(mine.sequence, new.sequence, 0, keep)
            self.cells.share(mine.places[:keep])
            new.places[:keep] = mine.places[:keep]
        new.n_cells = keep
        new.tokens.extend(mine.tokens[:keep])
        new.read = [(begin, min(end, keep), way) for begin, end, way in mine.read if begin < keep]
        new.need, new.hidden = mine.need, mine.hidden.copy()
        new.hidden.cut(keep)
        return new

    def _emptied(self, lane: Lane) -> CellLane:
        """Return a lane of ours, after a check that it is empty."""
        mine = self._mine(lane)
        if mine.tokens:
            raise ValueError(f"the lane still holds {len(mine.tokens)} tokens")
        return mine

    def copied(self, lane: Lane) -> Parked:
        mine = self._mine(lane)
        self.settle()
        state = self.cache.state(mine.sequence) if mine.n_cells else b""
        if mine.n_cells and not state:
            raise EngineError("the library does not give the state of a lane away")
        return Parked([*mine.tokens], state, mine.hidden.copy(), mine.need, (*mine.read,))

    def park(self, lane: Lane) -> Parked:
        parked = self.copied(lane)
        lane.rollback(0)
        self.settle()
        return parked

    def resume(self, blob: Blob, into: Lane | None = None) -> CellLane:
        parked = cast(Parked, blob)
        lane = self.open() if into is None else self._emptied(into)
        self.settle()
        try:
            n = len(parked.tokens)
            if n:
                self._fit(n)
                places = self.cells.take(n)
                if not self.cache.restore(lane.sequence, parked.state):
                    self.cache.remove(lane.sequence, 0)
                    self.cells.untake(places)
                    raise EngineError("the library does not take the state of a parked lane")
                lane.places[:n] = places
                lane.n_cells = n
                lane.tokens.extend(parked.tokens)
            lane.read = list(parked.read)
            lane.hidden = parked.hidden.copy()
            if parked.need != "nothing":
                lane.need = parked.need
                self.choose_states()
        except BaseException:
            if into is None:
                lane.close()
            raise
        return lane

    def _mine(self, lane: Lane, *, grows: bool = False) -> CellLane:
        self.cache.require_open()
        if not isinstance(lane, CellLane) or lane.closed or lane.pool is not self:
            raise EngineError("the lane is closed, or of another pool")
        if lane.growing is not None and not grows:
            raise EngineError("a tree must be settled with keep_path")
        return lane

    # -- passes --

    def run(self, parts: Sequence[Part]) -> None:
        if self._only is not None and len(parts) == 1 and self._is_step(parts[0]):
            parts[0].rows = self._step(parts[0])
            return
        pieces = self._check(parts)
        self.settle()
        past = [len(piece.lane.tokens) for piece in pieces]
        try:
            if together := [piece for piece in pieces if not self._read_first(piece)]:
                self._run_padded(together)
        except BaseException:
            for piece, n in zip(pieces, past, strict=True):
                if len(piece.lane.tokens) > n:
                    with suppress(Cancelled):  # a running state that would have to be read again
                        piece.lane.rollback(n)
            raise
        self._seek_only()
        for part, piece in zip(parts, pieces, strict=True):
            part.rows = self._no_rows if piece.rows is None else piece.rows

    def _is_step(self, part: Part) -> bool:
        """True if this is a short pass of a lane alone, with no work for other lanes."""
        lane, n = cast(CellLane, part.lane), len(part.tokens)
        most = self.max_rows if part.outputs == "all" else self.n_batch
        return (
            lane is self._only
            and not lane.closed
            and part.parents is None
            and 0 < n <= most
            and (n == 1 or part.outputs != "last" or not self.kernels.widths)
            and (n == 1 or self.kernels.least(n) == 1 or part.outputs == "all")
            and n < TILE
            and len(lane.tokens) + n <= self.n_ctx
            and not any(map(with_final, self._needs))
        )

    def _step(self, part: Part) -> Rows:
        """Run such a pass without the work that several lanes need."""
        cache, batch = self.cache, self.cache.batch
        cache.require_open()
        cache.stop.check()
        lane, tokens, outputs = cast(CellLane, part.lane), part.tokens, part.outputs
        n = len(tokens)
        wide = n if outputs == "none" else self.plan.rows(n)
        with self._lock:
            self._settle_only(lane)
            past = lane.n_cells
            require_tokens(tokens, self.n_vocab)
            batch.token[:n] = tokens
            batch.token[n:wide] = tokens[-1]
            batch.position[:wide] = self._counting[past : past + wide]
            batch.sequences[:wide, 0] = lane.sequence
            batch.output[:wide] = outputs == "all"
            if outputs == "last":
                batch.output[n - 1 : wide] = 1
            batch.n = wide
            try:
                cache.decode(tiled=False)
            except BaseException as error:
                self._undo([PassPart(lane, tokens, outputs)], error)
                raise
            lane.n_cells = past + wide
            lane.tokens.extend(batch.token[:n].tolist())
            if lane.need != "nothing":
                lane.hidden.add(past, cache.states(lane.need, wide)[:n])
            if wide > n:
                self._decided.append(lane)  # the pads go before the next pass
            return cache.rows(n if outputs == "all" else int(outputs == "last"))

    def _check(self, parts: Sequence[Part]) -> list[PassPart]:
        """Refuse a pass that the library would not take."""
        pieces: list[PassPart] = []
        n = n_rows = leaves = 0
        for part in parts:
            lane = self._mine(part.lane, grows=part.parents is not None)
            if len(parts) > 1 and any(lane is piece.lane for piece in pieces):
                raise ValueError("a lane has one part in a pass")
            require_tokens(part.tokens, self.n_vocab)
            piece = PassPart(lane, part.tokens, part.outputs)
            if part.parents is not None:
                leaves += piece.lay(part.parents, self.max_leaves, kept=bool(self.kernels.widths))
            if piece.past + part.size > self.n_ctx:
                raise ContextFull(f"the context of {self.n_ctx} tokens is full", MAKE_ROOM)
            pieces.append(piece)
            n, n_rows = n + part.size, n_rows + piece.n_rows
        if n > self.n_batch:
            raise ValueError(f"a pass takes at most {self.n_batch} tokens, got {n}")
        if n_rows > self.max_rows:
            raise ValueError(f"a pass returns at most {self.max_rows} rows, got {n_rows}")
        if leaves and leaves > self.free_leaves:
            raise EngineError(f"trees of one pass have at most {self.free_leaves} branches more")
        return pieces

    def _read_first(self, piece: PassPart) -> bool:
        """Read the parts that need a pass of their own; return True if nothing else is left.

        Text in tiles or beside passes of fixed widths, and all before a last row whose bits must be
        those of a later pass over the same text, or whose hidden state only passes of rows give.
        """
        kernels, n, outputs = self.kernels, len(piece.tokens), piece.outputs
        if piece.laid is not None or outputs == "all":
            return False
        last = outputs == "last"
        apart = last and bool(kernels.apart or self.forgets)
        way = kernels.least(n - apart)
        fixed = bool(kernels.widths)
        if (apart and (way > 1 or fixed)) or (last and way == 1 and with_final(piece.lane.need)):
            if n > 1:
                before = PassPart(piece.lane, piece.tokens[:-1], "none")
                if not self._read_first(before):
                    self._pass([before])
                piece.tokens, piece.outputs = piece.tokens[-1:], "all"
            return False
        if way == 1:
            if fixed:
                self._pass([piece])
            return fixed
        if way == TILE and self.cells.has_ghosts and self.cells.held == piece.lane.n_cells:
            self.compact()
        if way < TILE or self.cells.tail == piece.lane.n_cells or not self.cells.in_order:
            room = min(self.n_batch, self.n_ctx - piece.past, self.cells.room)
            piece.fill(0 if self.forgets or way < TILE else room)
            self._pass([piece], way)
            piece.drop_pads()
            self.settle()
        else:
            self._read_apart(piece)
        if last and piece.rows is not None:
            piece.rows = piece.rows.copy()  # the next pass takes their place
        return True

    def _run_padded(self, pieces: Sequence[PassPart]) -> None:
        """Run one pass of the width that is planned for it."""
        if not self.kernels.widths:
            self._pass(pieces)
            return
        n = sum(len(piece.tokens) for piece in pieces)
        longest = max(pieces, key=lambda piece: len(piece.tokens))
        if pads := self.plan.rows(n) - n:
            longest.pad(pads)
        for piece in pieces:
            piece.outputs = "all"  # how many rows come out chooses kernels, too
        self._pass(pieces)
        longest.drop_pads()

    def _pass(self, pieces: Sequence[PassPart], way: int = 1) -> None:
        """Run one pass of the library; ``way``: see ``Kernels.least``."""
        self.cache.stop.check()
        sizes = [len(piece.tokens) for piece in pieces]
        n = sum(sizes)
        self._fit(n)
        at = lay(sizes, in_turn=self.shape.apart)
        batch = self.cache.batch
        for piece, rows in zip(pieces, at, strict=True):
            piece.write(batch, rows)
        batch.n = n
        every = bool(self._needs) and any(piece.gives_final for piece in pieces)
        if every and len(pieces) > 1:
            if n > self.max_rows:
                raise ValueError(f"a pass that keeps final states returns {self.max_rows} rows")
            batch.output[:n] = 1
        with self._lock:
            if self._needs:
                self.cache.prepare(every_row=every)
            places = self.cells.take(n)
            try:
                for piece, rows in zip(pieces, at, strict=True):
                    piece.address(self.cache, self._free, rows)
                self.cache.decode(tiled=way > 1)
            except BaseException as error:
                self.cells.untake(places)
                self._undo(pieces, error)
                raise
            finally:
                batch.n_sequences[:n] = 1
            self._take(pieces, at, places, way)

    def _undo(self, pieces: Sequence[PassPart], error: BaseException) -> None:
        """Restore the cache of every lane as it was before a pass that failed."""
        for piece in pieces:
            piece.undo(self.cache, self._free)

    def _take(
        self, pieces: Sequence[PassPart], at: Sequence[slice | Places], places: Places, way: int
    ) -> None:
        """Enter a pass into the books."""
        batch, n = self.cache.batch, self.cache.batch.n
        order = np.cumsum(batch.output[:n], dtype=np.int64) - 1 if len(pieces) > 1 else None
        total = pieces[0].n_rows if order is None else int(order[-1]) + 1
        given = self.cache.rows(total)
        for piece, rows in zip(pieces, at, strict=True):
            if order is None:
                piece.rows = given[: total - piece.pads * (piece.outputs == "all")]
            else:
                size = len(piece.tokens)
                piece.rows = pick(given, order[rows][size - piece.n_rows : size - piece.pads])
            piece.keep_states(self.cache, rows, order, total)
            piece.enter(batch.token[rows].tolist(), places[rows], way)

    # -- reading apart --

    def _read_apart(self, piece: PassPart) -> None:
        """Read a text in the reading room, and take its cells over."""
        lane, past, n = piece.lane, len(piece.lane.tokens), len(piece.tokens)
        self._fit(n)
        state, hidden, piece.rows = self._reading.read(lane, piece.tokens, piece.outputs)
        places = self.cells.take(n)
        if not state or not self.cache.restore(self._spare, state):
            self.cache.remove(self._spare, 0)
            self.cells.untake(places)
            self._reading.close()
            raise EngineError("llama.cpp does not take over what was read apart")
        self.cache.copy(self._spare, lane.sequence, -1, -1)
        self.cache.remove(self._spare, 0)
        piece.enter([int(token) for token in piece.tokens], places, TILE)
        if (states := hidden.rows(past, past + n)) is not None:
            lane.hidden.add(past, states)
        self._reading.taken(lane)

    def state_behind(self, lane: CellLane, past: int) -> bytes:
        """Return the cache's state of a lane from position ``past`` on."""
        self.cache.copy(lane.sequence, self._spare, past, -1)
        state = self.cache.state(self._spare)
        self.cache.remove(self._spare, 0)
        return state

    def close(self) -> None:
        self._reading.close()
        with self._lock:
            self.cache.close()


@dataclass(slots=True)
class _PromptReader:
    room: CellPool
    lane: CellLane
    of: CellLane  # whose text it holds
    mark: Mark  # and up to where


class ReadingRoom:
    """A side pool that reads long texts for the lanes of a pool.

    Attention in tiles depends on where cells lie (``kernels``). A lane among others has its text
    read in a pool of its own, where it lies as if it were alone, and takes the new cells over.
    """

    def __init__(self, of: CellPool) -> None:
        self._of = of
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
        room = reader.room if reader is not None else self._make(past + len(tokens))
        known = reader is not None and reader.of is lane and len(reader.lane.tokens) == past
        if reader is None or not known or lane.tokens.kept(reader.mark) != past:
            if reader is not None:
                reader.lane.close()
            state = self._of.cache.state(lane.sequence) if past else b""
            copy = room.resume(Parked(list(lane.tokens), state))
            reader = self._reader = _PromptReader(room, copy, lane, lane.tokens.mark())
        reader.lane.capture(lane.need)
        rows = reader.lane.forward(tokens, outputs=outputs)
        return room.state_behind(reader.lane, past), reader.lane.hidden, rows

    def _make(self, n: int) -> CellPool:
        """Make an empty pool for texts of ``n`` tokens and more, computed alike."""
        of = self._of
        n_ctx = min(4 * n, of.shape.n_ctx)
        shape = replace(of.shape, n_ctx=n_ctx, lanes=2, max_leaves=1)
        return CellPool(of.cache.beside(shape), shape, of.n_vocab, of.kernels, in_order=True)

    def taken(self, lane: CellLane) -> None:
        """Remember that the lane took the text read for it last."""
        if self._reader is not None:
            self._reader.mark = lane.tokens.mark()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.room.close()
            self._reader = None

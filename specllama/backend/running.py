"""Pools whose cut may find what came before it gone: one lane, and what is gone is read again.

A running state (recurrent and hybrid models) is not a set of cells, but what a model made of all
tokens so far. Two things set it back:

planes        llama.cpp keeps the states behind the last tokens of a pass. Going back to one costs
              nothing, and is possible once: then a pass has to come first
checkpoints   copies of the state, see below; behind one the text is read again

A checkpoint is taken before a pass that may be cut deeper than planes go, where a text begins to be
read (there a reply ended), now and then within a long one, and shortly before its end: what comes
next writes a prompt's last tokens otherwise where thoughts are cut from the history, and reads them
alike where the same prompt is answered again.

A draft model guesses in passes of one row, which leave no planes: a checkpoint is taken where it
has read the text so far, before the first guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, cast

from specllama.backend.base import Blob, Lane, Part
from specllama.backend.cache import Cache
from specllama.backend.checkpoints import Checkpoint, Checkpoints
from specllama.backend.lane import CellLane, Parked
from specllama.backend.parts import PassPart
from specllama.backend.pool import CellPool
from specllama.errors import Cancelled, EngineError

TAIL = 32  # tokens of a prompt behind its last checkpoint
SPREAD = 1024  # tokens of a long prompt between two


@dataclass(frozen=True, slots=True)
class ParkedWhole(Parked):
    """One that a text can only go on from as it is, or from a checkpoint."""

    checkpoints: Checkpoints = field(default_factory=Checkpoints)

    def exact_prefix(self, keep: int, n: int, begin: int = 0) -> int:
        if keep == len(self.tokens):
            return keep
        found = self.checkpoints.before(keep)
        return 0 if found is None else found.length

    @property
    def n_bytes(self) -> int:
        return len(self.state) + self.checkpoints.n_bytes


class ForgettingPool(CellPool):
    """A pool of one lane that may have to read again what it held."""

    forgets: ClassVar[bool] = True

    def fork(self, lane: Any, keep: int, into: Any = None) -> CellLane:
        raise EngineError("this model's cache cannot be shared")

    def park(self, lane: Lane) -> ParkedWhole:
        one = super().park(lane)
        return ParkedWhole(one.tokens, one.state, one.hidden, one.need, one.tiled, one.tiles)

    def exact_prefix(self, lane: CellLane, keep: int, n: int, begin: int) -> int:
        return self.reusable_prefix(lane, keep)

    def reusable_prefix(self, lane: CellLane, keep: int) -> int:
        raise NotImplementedError

    def _restored(self, lane: CellLane, keep: int) -> int:
        """Go back to ``reusable_prefix(keep)`` and say how far that is; 0 where it failed."""
        raise NotImplementedError

    def _undo(self, pieces: Sequence[PassPart], error: BaseException) -> None:
        self.settle()
        (piece,) = pieces
        self._set_back(piece.lane, replay=not isinstance(error, Cancelled))

    def _cut(self, lane: CellLane, keep: int) -> None:
        lane.n_cells = keep
        lane.tiled.clear()  # not asked for: one lane shares nothing
        self._set_back(lane)

    def _set_back(self, lane: CellLane, *, replay: bool = True) -> None:
        """Make the cache that of the lane's text, or of the beginning that costs nothing."""
        text, keep = list(lane.tokens), len(lane.tokens)
        at = self._restored(lane, keep)
        if at == 0:
            self.cache.clear()
        self.cells.drop(lane.places[at:keep])
        lane.n_cells = at
        lane.tokens.cut(at)
        lane.hidden.cut(at)
        try:
            for i in range(at, keep if replay else at, self.n_batch):
                end = min(i + self.n_batch, keep)
                CellPool._pass(self, [PassPart(lane, text[i:end], "none")])
        except BaseException:
            self._lose()
            raise


class RunningCache(Cache, Protocol):
    """A cache with a running state, with or without cells."""

    @property
    def planes(self) -> int:
        """How many tokens of a pass can be taken from its end again, at most."""
        ...

    @property
    def undivided(self) -> int:
        """Most tokens of a pass that is computed at once; only the last part leaves planes."""
        ...

    def save_running(self, sequence: int, into: Any = None) -> Any:
        """A copy of a sequence's running state, in the buffer ``into`` if it fits; empty where the
        library does not give it away."""
        ...

    def restore_running(self, sequence: int, state: Any) -> bool:
        """Make this the running state of a sequence."""
        ...


class RunningPool(ForgettingPool):
    """The pool of a model with a running state."""

    cache: RunningCache

    def seat(self, lane: CellLane) -> None:
        super().seat(lane)
        self.checkpoints = Checkpoints()
        self._passing: Checkpoint | None = None  # for the last pass, or the last guesses
        self._goes_on = False  # the last pass read a text that goes on
        self._depth = 0  # tokens that planes can take back now
        self._guesses = False  # of a draft model: what comes next may be guesses

    # -- out of the cache, and in again --

    def park(self, lane: Lane) -> ParkedWhole:
        kept, self.checkpoints = self.checkpoints, Checkpoints()
        try:
            return replace(super().park(lane), checkpoints=kept)
        except BaseException:
            self.checkpoints = kept
            raise

    def resume(self, blob: Blob, into: Lane | None = None) -> CellLane:
        lane = super().resume(blob, into)
        self.checkpoints = cast(ParkedWhole, blob).checkpoints.copy()
        self._passing, self._depth = None, 0
        self._goes_on = self._guesses = False
        return lane

    # -- going back --

    @property
    def pads(self) -> int:
        return self.cache.planes

    def reusable_prefix(self, lane: CellLane, keep: int) -> int:
        if keep == len(lane.tokens):
            return keep
        # where rows are judged, the next text is read from where it is read without drafts
        found = self._before(keep) if self._drafts else self.checkpoints.before(keep)
        return 0 if found is None else found.length

    def decided(self, lane: CellLane) -> None:
        super().decided(lane)
        if lane.n_cells - len(lane.tokens) > self._depth:
            self.settle()  # reading again takes time, which is the caller's

    def _before(self, keep: int) -> Checkpoint | None:
        """The last checkpoint within the first ``keep`` tokens."""
        found, passing = self.checkpoints.before(keep), self._passing
        if passing is None or passing.length > keep:
            return found
        return passing if found is None or found.length < passing.length else found

    def _cut(self, lane: CellLane, keep: int) -> None:
        free = lane.n_cells - keep <= self._depth
        self._depth = 0
        if free:
            CellPool._cut(self, lane, keep)
        else:
            super()._cut(lane, keep)
        self._forget(keep)

    def _restored(self, lane: CellLane, keep: int) -> int:
        found, self._depth, self._goes_on = self._before(keep), 0, False
        if found is None or not self._restore(lane.sequence, found):
            self._forget(0)
            return 0
        at = found.length
        self._forget(at)
        lane.hidden.cut(at)
        if found.hidden is not None and lane.hidden.first >= at:
            lane.hidden.add(at - 1, found.hidden)
        return at

    def _restore(self, sequence: int, found: Checkpoint) -> bool:
        cache, n = self.cache, found.length
        return (
            cache.restore_running(sequence, found.state)
            and cache.remove(sequence, n)
            and cache.end(sequence) == n
        )

    def _forget(self, keep: int) -> None:
        self.checkpoints.cut(keep)
        if self._passing is not None and self._passing.length > keep:
            self._passing = None

    def _lose(self) -> None:
        super()._lose()
        self._forget(0)
        self._depth = 0

    # -- passes --

    def _is_step(self, part: Part) -> bool:
        n = len(part.tokens)
        if n > 1:
            return part.outputs == "all" and n <= 1 + self.cache.planes and super()._is_step(part)
        return not self._guesses and super()._is_step(part)

    def _step(self, part: Part) -> Any:
        rows = super()._step(part)
        self._passed(self.cache.batch.n, reading=False)
        return rows

    def _read_first(self, piece: PassPart) -> bool:
        least = TAIL if self._drafts else 1
        if piece.outputs == "last" and len(piece.tokens) > least:
            if len(piece.tokens) > TAIL:
                before = PassPart(piece.lane, piece.tokens[:-TAIL], "none")
                if not super()._read_first(before):
                    self._pass([before])
                piece.tokens = piece.tokens[-TAIL:]
            self._keep_state(piece.lane)
        return super()._read_first(piece)

    def _pass(self, pieces: Sequence[PassPart], *, tiled: bool = False) -> None:
        (piece,) = pieces
        lane, n, reads = piece.lane, len(piece.tokens), piece.outputs == "none"
        if reads and n > 1:
            newest = self.checkpoints.before(lane.n_cells)
            behind = lane.n_cells - (0 if newest is None else newest.length)
            if not self._goes_on or behind >= SPREAD:
                self._keep_state(lane)
        elif self._guesses or (piece.outputs == "all" and n > 1 + self.cache.planes):
            self._keep_passing(lane)
        super()._pass(pieces, tiled=tiled)
        self._passed(n, reading=reads)

    def _passed(self, n: int, *, reading: bool) -> None:
        self._goes_on = reading
        self._guesses = self._drafts and n > 1
        self._depth = min(self.cache.planes, n - 1) if n <= self.cache.undivided else 0

    @property
    def _drafts(self) -> bool:
        """Whether this is a draft model's: no pass is judged."""
        return self.shape.max_rows == 1

    def _keep_passing(self, lane: CellLane) -> None:
        """Take the checkpoint for what is not known to stay; it gives way to the next one."""
        old = self._passing
        if lane.n_cells and (old is None or old.length != lane.n_cells):
            state = self.cache.save_running(lane.sequence, None if old is None else old.state)
            self._passing = Checkpoint(lane.n_cells, state) if len(state) else None

    def _keep_state(self, lane: CellLane) -> None:
        """Leave a checkpoint here, unless there is one."""
        newest = self.checkpoints.before(lane.n_cells)
        if lane.n_cells and (newest is None or newest.length < lane.n_cells):
            n, state = lane.n_cells, self.cache.save_running(lane.sequence)
            hidden = lane.hidden.rows(n - 1, n)
            if len(state):
                self.checkpoints.add(
                    Checkpoint(n, state, None if hidden is None else hidden.copy())
                )

"""Pools whose cuts may lose earlier state, which is then read again.

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

Several lanes have cells of their own each, as if every one were alone. llama.cpp computes those
together whose parts of a pass are equally long and whose sequences follow each other (llama-batch
``split_equal``), and may then move the state of any other lane, but not its planes. So parts are
padded to one length where planes can take the pads back; those that still differ have passes of
their own, after the one that several share.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, cast

from specllama.arrays import Rows
from specllama.backend.base import Blob, Lane, Part
from specllama.backend.lane import CellLane, Parked
from specllama.backend.parts import PassPart
from specllama.backend.pool import CellPool
from specllama.errors import Cancelled, EngineError
from specllama.models.running_state import checkpoints

TAIL = 32  # tokens of a prompt behind its last checkpoint
SPREAD = 1024  # tokens of a long prompt between two


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state after the first ``length`` tokens of a text.

    Attributes:
        state: a buffer of bytes.
        hidden: the hidden state [1, width] of the last of them, where a head will read on from it.
    """

    length: int
    state: Any
    hidden: Rows | None = None


class Checkpoints:
    """The checkpoints of one text: a few, the newest two always, the others spread over it, so that
    going far back reads at most what lies between two of them again."""

    def __init__(self) -> None:
        self._all: list[Checkpoint] = []  # lengths ascend

    def copy(self) -> Checkpoints:
        """Return an independent copy."""
        new = Checkpoints()
        new._all = list(self._all)
        return new

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._all)

    @property
    def lengths(self) -> list[int]:
        return [one.length for one in self._all]

    @property
    def n_bytes(self) -> int:
        """Memory that they take."""
        return sum(len(one.state) for one in self._all)

    def add(self, one: Checkpoint) -> None:
        """Keep this checkpoint, which comes after all others."""
        self._all.append(one)
        while len(self._all) > checkpoints(len(one.state)):
            # the one whose neighbours stay nearest to each other, never the newest two
            ends = [0, *self.lengths]
            gaps = [ends[i + 2] - ends[i] for i in range(len(ends) - 3)]
            del self._all[gaps.index(min(gaps))]

    def cut(self, n: int) -> None:
        """Drop the checkpoints after the first ``n`` tokens of the text."""
        del self._all[bisect_right(self.lengths, n) :]

    def before(self, n: int) -> Checkpoint | None:
        """Return the last checkpoint within the first ``n`` tokens."""
        at = bisect_right(self.lengths, n)
        return self._all[at - 1] if at else None


@dataclass(frozen=True, slots=True)
class ParkedWhole(Parked):
    """Saved state that can be resumed only in full or at a checkpoint."""

    checkpoints: Checkpoints = field(default_factory=Checkpoints)

    @property
    def n_bytes(self) -> int:
        return len(self.state) + self.checkpoints.n_bytes


class ForgettingPool(CellPool):
    """A pool that may have to read parts of a lane's text again."""

    forgets: ClassVar[bool] = True

    def fork(self, lane: Lane, keep: int, into: Lane | None = None) -> CellLane:
        raise EngineError("this model's cache cannot be shared")

    def copied(self, lane: Lane) -> ParkedWhole:
        one = super().copied(lane)
        return ParkedWhole(one.tokens, one.state, one.hidden, one.need, one.read)

    def exact_prefix(self, held: Lane | Blob, keep: int, n: int, begin: int = 0) -> int:
        if not isinstance(held, ParkedWhole):
            return self.reusable_prefix(cast(CellLane, held), keep)
        if keep == len(held.tokens):
            return keep
        found = held.checkpoints.before(keep)
        return 0 if found is None else found.length

    def reusable_prefix(self, lane: CellLane, keep: int) -> int:
        raise NotImplementedError

    def _restored(self, lane: CellLane, keep: int) -> int:
        """Go back to ``reusable_prefix(keep)`` and return its length; 0 if that failed."""
        raise NotImplementedError

    def _undo(self, pieces: Sequence[PassPart], error: BaseException) -> None:
        self.settle()
        for piece in pieces:
            self._set_back(piece.lane, replay=not isinstance(error, Cancelled))

    def _cut(self, lane: CellLane, keep: int) -> None:
        lane.n_cells = keep
        lane.read.clear()  # not asked for: no lane shares cells
        self._set_back(lane)

    def _set_back(self, lane: CellLane, *, replay: bool = True) -> None:
        """Set the cache to the lane's text, or to the prefix that costs nothing."""
        text, keep = list(lane.tokens), len(lane.tokens)
        at = self._restored(lane, keep)
        if at == 0:
            self.cache.remove(lane.sequence, 0)
        self.cells.drop(lane.places[at:keep])
        lane.n_cells = at
        lane.tokens.cut(at)
        lane.hidden.cut(at)
        try:
            for i in range(at, keep if replay else at, self.n_batch):
                end = min(i + self.n_batch, keep)
                CellPool._pass(self, [PassPart(lane, text[i:end], "none")])
        except BaseException:
            self._give_up_all(lane)
            raise

    def _give_up_all(self, lane: CellLane) -> None:
        """Drop the lane's text: it is lost."""
        self.cache.remove(lane.sequence, 0)
        self.cells.drop(lane.places[: lane.n_cells])
        lane.n_cells = 0
        lane.tokens.clear()
        lane.hidden.clear()


@dataclass(slots=True)
class _Running:
    """The state of one lane, as far as it is known.

    Attributes:
        passing: for the last pass, or the last guesses.
        goes_on: the last pass read a text that goes on.
        depth: tokens that planes can take back now.
        guesses: of a draft model: what comes next may be guesses.
    """

    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    passing: Checkpoint | None = None
    goes_on: bool = False
    depth: int = 0
    guesses: bool = False

    def before(self, keep: int) -> Checkpoint | None:
        """Return the last checkpoint within the first ``keep`` tokens."""
        found, passing = self.checkpoints.before(keep), self.passing
        if passing is None or passing.length > keep:
            return found
        return passing if found is None or found.length < passing.length else found

    def forget(self, keep: int) -> None:
        self.checkpoints.cut(keep)
        if self.passing is not None and self.passing.length > keep:
            self.passing = None


class RunningPool(ForgettingPool):
    """The pool of a model with a running state."""

    def seat(self, lane: CellLane) -> None:
        super().seat(lane)
        self._of[lane.sequence] = _Running()

    @cached_property
    def _of(self) -> dict[int, _Running]:
        """The running states by the lane's sequence, which never changes."""
        return {}

    def checkpoints(self, lane: CellLane) -> Checkpoints:
        """Return the checkpoints of a lane's text."""
        return self._of[lane.sequence].checkpoints

    # -- out of the cache, and in again --

    def copied(self, lane: Lane) -> ParkedWhole:
        mine = self._of[self._mine(lane).sequence]
        return replace(super().copied(lane), checkpoints=mine.checkpoints.copy())

    def resume(self, blob: Blob, into: Lane | None = None) -> CellLane:
        lane = super().resume(blob, into)
        kept = cast(ParkedWhole, blob).checkpoints.copy()
        self._of[lane.sequence] = _Running(kept)
        return lane

    def fork(self, lane: Lane, keep: int, into: Lane | None = None) -> CellLane:
        mine = self._mine(lane)
        if not keep:
            return self.open() if into is None else self._emptied(into)
        new = self.resume(self.copied(mine), into)
        new.rollback(keep)
        return new

    # -- going back --

    @property
    def alike(self) -> int | None:
        return self.cache.planes

    def reusable_prefix(self, lane: CellLane, keep: int) -> int:
        if keep == len(lane.tokens):
            return keep
        mine = self._of[lane.sequence]
        # where rows are judged, the next text is read from where it is read without drafts
        found = mine.checkpoints.before(keep) if self.shape.judged else mine.before(keep)
        return 0 if found is None else found.length

    def decided(self, lane: CellLane) -> None:
        super().decided(lane)
        deeper = lane.n_cells - len(lane.tokens) > self._of[lane.sequence].depth
        if deeper and self.lanes == 1:  # others may still look at the rows of the last pass
            self.settle()  # reading again takes time, which is the caller's

    def _cut(self, lane: CellLane, keep: int) -> None:
        mine = self._of[lane.sequence]
        free = lane.n_cells - keep <= mine.depth
        mine.depth = 0
        if free:
            CellPool._cut(self, lane, keep)
        else:
            super()._cut(lane, keep)
        mine.forget(keep)

    def _restored(self, lane: CellLane, keep: int) -> int:
        mine = self._of[lane.sequence]
        found, mine.depth, mine.goes_on = mine.before(keep), 0, False
        if found is None or not self._restore(lane.sequence, found):
            mine.forget(0)
            return 0
        at = found.length
        mine.forget(at)
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

    def _give_up_all(self, lane: CellLane) -> None:
        super()._give_up_all(lane)
        self._of[lane.sequence] = _Running()

    def _lose(self) -> None:
        super()._lose()
        for sequence in self._of:
            self._of[sequence] = _Running()

    # -- passes --

    def _is_step(self, part: Part) -> bool:
        n = len(part.tokens)
        if n > 1:
            return part.outputs == "all" and n <= 1 + self.cache.planes and super()._is_step(part)
        lane = cast(CellLane, part.lane)
        return super()._is_step(part) and not self._of[lane.sequence].guesses

    def _step(self, part: Part) -> Any:
        rows = super()._step(part)
        self._passed(cast(CellLane, part.lane), self.cache.batch.n, reading=False)
        return rows

    def _read_first(self, piece: PassPart) -> bool:
        least = 1 if self.shape.judged else TAIL
        if piece.outputs == "last" and len(piece.tokens) > least:
            if len(piece.tokens) > TAIL:
                before = PassPart(piece.lane, piece.tokens[:-TAIL], "none")
                if not super()._read_first(before):
                    self._pass([before])
                piece.tokens = piece.tokens[-TAIL:]
            self._keep_state(piece.lane)
        return super()._read_first(piece)

    def _pass(self, pieces: Sequence[PassPart], way: int = 1) -> None:
        if len(pieces) == 1:
            self._pass_at_once(pieces, way)
            return
        self._pad(pieces)
        groups = alike(pieces)
        for together in groups:
            self._pass_at_once(together, way)
            for piece in together:
                if piece.rows is not None and len(groups) > 1:  # the next pass takes their place
                    piece.rows = piece.rows.copy()
        for piece in pieces:
            piece.drop_pads()

    def _pad(self, pieces: Sequence[PassPart]) -> None:
        """Pad the parts to one length, if planes can remove the padding."""
        most = max(len(piece.tokens) for piece in pieces)
        longest = max(piece.past for piece in pieces) + most
        widest = min(self.max_rows, self.kernels.shared(self.n_batch))
        fits = most * len(pieces) <= widest and longest <= self.n_ctx
        if fits and most <= 1 + self.cache.planes:
            for piece in pieces:
                if (more := most - len(piece.tokens)) and piece.outputs == "all":
                    piece.pad(more)

    def _pass_at_once(self, pieces: Sequence[PassPart], way: int) -> None:
        planes = self.cache.planes
        for piece in pieces:
            lane, n, mine = piece.lane, len(piece.tokens), self._of[piece.lane.sequence]
            if piece.outputs == "none" and n > 1:
                newest = mine.checkpoints.before(lane.n_cells)
                behind = lane.n_cells - (0 if newest is None else newest.length)
                if not mine.goes_on or behind >= SPREAD:
                    self._keep_state(lane)
            elif mine.guesses or (piece.outputs == "all" and n > 1 + planes):
                self._keep_passing(lane)
        super()._pass(pieces, way)
        if len(pieces) > 1:
            for other in self._of.values():
                other.depth = 0
        for piece in pieces:
            self._passed(piece.lane, len(piece.tokens), reading=piece.outputs == "none")

    def _passed(self, lane: CellLane, n: int, *, reading: bool) -> None:
        whole, mine = self.cache.batch.n <= self.cache.undivided, self._of[lane.sequence]
        mine.depth = min(self.cache.planes, n - 1) if whole else 0
        mine.goes_on = reading
        mine.guesses = n > 1 and not self.shape.judged

    def _keep_passing(self, lane: CellLane) -> None:
        """Save a checkpoint of tokens that may not stay; it replaces the last such one."""
        mine = self._of[lane.sequence]
        old = mine.passing
        if lane.n_cells and (old is None or old.length != lane.n_cells):
            state = self.cache.save_running(lane.sequence, None if old is None else old.state)
            mine.passing = Checkpoint(lane.n_cells, state) if len(state) else None

    def _keep_state(self, lane: CellLane) -> None:
        """Leave a checkpoint here, unless there is one."""
        kept = self.checkpoints(lane)
        newest = kept.before(lane.n_cells)
        if lane.n_cells and (newest is None or newest.length < lane.n_cells):
            n, state = lane.n_cells, self.cache.save_running(lane.sequence)
            hidden = lane.hidden.rows(n - 1, n)
            if len(state):
                kept.add(Checkpoint(n, state, None if hidden is None else hidden.copy()))


def alike(pieces: Sequence[PassPart]) -> list[list[PassPart]]:
    """Group parts into passes: first the one that most lanes share, then one for each other."""
    first, *others = sorted(pieces, key=lambda piece: piece.lane.sequence)
    runs = [[first]]
    for piece in others:
        last = runs[-1][-1]
        follows = piece.lane.sequence == last.lane.sequence + 1
        if follows and len(piece.tokens) == len(last.tokens):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    shared = max(runs, key=len)
    return [shared, *([piece] for run in runs if run is not shared for piece in run)]

"""Pools of llama.cpp: several conversations over one model, or one over a running state.

Models with full attention take as many lanes as they are made for, those with sliding windows one.
A running state (recurrent and hybrid models) is not a set of cells: it takes one lane, cannot be
forked or parked, and is set back by a checkpoint, behind which committed tokens are read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, ClassVar

import llama_cpp as ll

from specllama.backend.cache import Shape
from specllama.backend.lane import CellLane
from specllama.backend.llama import LlamaModel
from specllama.backend.llama_cache import PARTIAL, LlamaCache, Settings
from specllama.backend.pool import CellPool, Piece
from specllama.backend.threads import ThreadChoice
from specllama.backend.watch import Watch
from specllama.errors import Cancelled, EngineError, UsageError
from specllama.params import EngineOptions


class LlamaPool(CellPool):
    """A pool of a loaded model. The model closes it.

    Raises what ``LlamaCache`` raises.
    """

    forgets: ClassVar[bool] = False
    """Whether a cut may find what came before it gone."""

    def __init__(self, model: LlamaModel, shape: Shape, settings: Settings) -> None:
        self.model = model
        self._llama = LlamaCache(model, shape, settings)
        super().__init__(
            self._llama,
            shape,
            model.vocab.n_tokens,
            self._llama.kernels,
            # nobody compares the rows of a draft model, and GPUs compute them in other orders
            in_order=settings.alike and model.gpu_layers == 0 and not self.forgets,
        )
        model.adopt(self)

    @property
    def handle(self) -> Any:
        """llama.cpp's own context, for contexts that borrow from it."""
        return self._llama.handle

    def settings(self) -> Any:
        """A copy of llama.cpp's parameters, for a context that runs beside this one."""
        params = self._llama.params
        return type(params).from_buffer_copy(params)

    def require_layers(self, layers: Sequence[int]) -> None:
        """See ``Capture.require_layers``."""
        self.require_open()
        self._llama.capture.require_layers(layers)

    def choose_threads(self) -> None:
        """From now on try fewer threads as well, where that changes no bit of a row.

        Attention that splits a single query over threads does, which matters where rows are judged.
        """
        kernels, judged = self.kernels, self._llama.settings.alike
        any_count = kernels.alike or not judged or kernels.flash == "off"
        if any_count and kernels.threads > 1 and kernels.on_cpu:
            choice = ThreadChoice(kernels.threads)
            lane = self.open()
            choice.begin(lambda threads: self._time_one_row(lane, threads))
            lane.close()
            self._llama.choice = choice

    def _time_one_row(self, lane: CellLane, threads: int) -> float:
        """Seconds of a pass of one row."""
        self._llama.compute_with(threads)
        begin = perf_counter()
        lane.forward([0], outputs="last")
        seconds = perf_counter() - begin
        lane.rollback(0)
        return seconds


class RunningPool(LlamaPool):
    """The pool of a model with a running state: one lane."""

    forgets = True

    def __init__(self, model: LlamaModel, shape: Shape, settings: Settings) -> None:
        super().__init__(model, replace(shape, lanes=1, max_leaves=1), settings)
        self._checkpoint: tuple[int, bytes] | None = None  # length of the text, and its state

    def decided(self, lane: CellLane) -> None:
        super().decided(lane)
        self.settle()  # it may have to read again, which the caller should hear of

    def _seek_only(self) -> None:
        pass  # every pass may have to leave a checkpoint

    def fork(self, lane: Any, keep: int) -> CellLane:
        raise EngineError("a running state cannot be shared")

    def park(self, lane: Any) -> Any:
        raise EngineError("a running state cannot be parked")

    def _pass(self, pieces: Sequence[Piece], *, tiled: bool = False) -> None:
        (piece,) = pieces
        if piece.n_rows > 1:  # it may be cut
            lane = piece.lane
            state = self._llama.state(lane.sequence, PARTIAL) if lane.n_cells else b""
            self._checkpoint = (lane.n_cells, state) if state else None
        super()._pass(pieces, tiled=tiled)

    def _undo(self, pieces: Sequence[Piece], error: BaseException) -> None:
        (piece,) = pieces
        self._set_back(piece.lane, replay=not isinstance(error, Cancelled))

    def _cut(self, lane: CellLane, keep: int) -> None:
        lane.n_cells = keep
        self._set_back(lane)

    def _set_back(self, lane: CellLane, *, replay: bool = True) -> None:
        """Make the state that of the lane's text, or of the beginning that costs nothing."""
        text, keep = list(lane.tokens), len(lane.tokens)
        at = self._restored(lane, keep)
        if at == 0:
            self._llama.clear()
            self._checkpoint = None
        self.cells.drop(lane.places[at:keep])
        lane.n_cells = at
        lane.tokens.cut(at)
        lane.hidden.cut(at)
        try:
            for i in range(at, keep if replay else at, self.n_batch):
                self._pass([Piece(lane, text[i : min(i + self.n_batch, keep)], "none")])
        except BaseException:
            self._checkpoint = None
            self._lose()
            raise

    def _restored(self, lane: CellLane, keep: int) -> int:
        """Back to the checkpoint if it is not past ``keep``: its length, or 0."""
        if self._checkpoint is None or self._checkpoint[0] > keep:
            return 0
        at, state = self._checkpoint
        fits = self._llama.restore(lane.sequence, state, PARTIAL)
        if fits and self._llama.remove(lane.sequence, at) and self._llama.end(lane.sequence) == at:
            return at
        return 0


class SlidingWindowPool(RunningPool):
    """The pool of a model with sliding windows whose cells are taken again once they have left.

    One lane. A cut is free while the window before it is still there; else the text is read again.
    """

    def _pass(self, pieces: Sequence[Piece], *, tiled: bool = False) -> None:
        LlamaPool._pass(self, pieces, tiled=tiled)

    def _restored(self, lane: CellLane, keep: int) -> int:
        there = self._llama.remove(lane.sequence, keep) and self._llama.end(lane.sequence) == keep
        first = max(keep - self.model.window, 0)
        return keep if there and 0 <= self._llama.begin(lane.sequence) <= first else 0


def open_pool(
    model: LlamaModel,
    *,
    n_ctx: int,
    max_rows: int,
    threads: int,
    options: EngineOptions,
    flash: str,
    lanes: int = 1,
    max_leaves: int = 1,
    alike: bool = True,
    watch: Watch | None = None,
) -> LlamaPool:
    """A pool of a loaded model.

    Models with sliding windows take one lane, those with a running state chains only, too.

    Args:
        alike: see ``Settings``.

    Raises what ``LlamaCache`` raises.
    """
    kind = LlamaPool
    if not model.can_roll_back:
        kind = RunningPool
    elif model.has_windows and not options.swa_full:
        kind = SlidingWindowPool
    if model.has_windows:
        lanes = 1  # what has left a window is not part of a lane's state
    rows = max(max_rows, lanes)
    shape = Shape(
        n_ctx=n_ctx,
        lanes=lanes,
        max_rows=rows,
        max_leaves=min(max_leaves, rows),
        n_batch=max(options.batch(on_gpu=model.gpu_layers != 0), rows),
    )
    most = int(ll.llama_max_parallel_sequences())
    if shape.sequences + model.has_windows > most:
        raise UsageError(
            f"{lanes} conversations and {max_leaves} branches need {shape.sequences} sequences, "
            f"llama.cpp has {most}",
            "choose fewer branches",
        )
    kv = (options.kv_type_k, options.kv_type_v)
    settings = Settings(
        threads=threads,
        flash=flash,
        kv=kv,
        alike=alike,
        watch=watch,
        n_ubatch=options.n_ubatch,
        threads_batch=options.threads_batch,
        rope=options.rope.given,
        swa_full=options.swa_full,
        cpu=options.cpu,
    )
    return kind(model, shape, settings)

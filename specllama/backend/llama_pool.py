"""Pools of llama.cpp: several conversations over one model.

Models with attention take lanes that share cells, those with a running state (``recurrent_pool``)
lanes with cells of their own, and those of which only the windows are kept one lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import llama_cpp as ll

from specllama.backend.batch import Shape
from specllama.backend.kernels import TILE
from specllama.backend.lane import CellLane
from specllama.backend.llama import LlamaModel
from specllama.backend.llama_cache import CacheSettings, LlamaCache
from specllama.backend.pool import CellPool
from specllama.backend.recurrent_pool import ForgettingPool, RunningPool
from specllama.backend.threads import ThreadChoice
from specllama.backend.watch import Watch
from specllama.errors import UsageError
from specllama.settings.params import EngineOptions

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader


class LlamaPool(CellPool):
    """A pool of a loaded model. The model closes it.

    Raises what ``LlamaCache`` raises.
    """

    def __init__(self, model: LlamaModel, shape: Shape, settings: CacheSettings) -> None:
        self.model = model
        cache = LlamaCache(model, shape, settings)
        super().__init__(
            cache,
            shape,
            model.n_vocab,
            # what a running state goes on from was left by steps
            replace(cache.kernels, wide=TILE) if self.forgets else cache.kernels,
            # the rows of a draft model are not compared, and GPUs compute them in other orders;
            # of cells that a lane's window has left llama.cpp takes those below the last one again
            in_order=((settings.any_width and model.gpu_layers == 0) or model.has_windows)
            and not self.forgets,
        )
        model.adopt(self)

    @property
    def handle(self) -> Any:
        """llama.cpp's own context, for contexts that borrow from it."""
        return self.cache.handle

    def settings(self) -> Any:
        """Copy llama.cpp's parameters, for a second context."""
        params = self.cache.params
        copy = type(params).from_buffer_copy(params)
        copy.n_rs_seq = 0  # what runs alongside the target drafts, in passes of one row
        return copy

    def require_layers(self, layers: Sequence[int]) -> None:
        """See ``Capture.require_layers``."""
        self.require_open()
        self.cache.capture.require_layers(layers)

    def choose_threads(self, count: int = 0, *found: Callable[[int], object]) -> None:
        """Let later passes use fewer threads, where that changes no bit of a row; see
        ``ThreadChoice``.

        Attention that splits a single query over threads does, which matters where rows are judged.
        """
        if self._any_count:
            self.cache.threads.choice = ThreadChoice(self.kernels.threads, count, *found)

    @property
    def _any_count(self) -> bool:
        kernels, judged = self.kernels, self.cache.settings.any_width
        same = kernels.any_width or not judged or kernels.flash == "off"
        return same and kernels.threads > 1 and kernels.on_cpu

    def try_one_thread(self) -> None:
        """Compute later narrow passes with one thread, if that is faster and changes no bit.

        It is where little is computed between two of the points at which threads wait for each
        other: in a small model, and in any whose passes are watched.
        """
        if self._any_count:
            lane, threads, took = self.open(), self.cache.threads, list[list[float]]()
            for count in (1, threads.most):
                threads.choice = ThreadChoice(count)
                took.append([self._time_one_row(lane) for _ in range(2)])
            # next to a busy core all threads are fast now and then, and slow in most passes
            threads.choice = ThreadChoice(1) if min(took[0]) <= max(took[1]) else None
            lane.close()

    def take_all_threads(self) -> None:
        """Compute every pass with all threads from now on."""
        self.cache.threads.choice = None

    def _time_one_row(self, lane: CellLane) -> float:
        """Return the seconds of a pass of one row."""
        begin = perf_counter()
        lane.forward([0], outputs="last")
        seconds = perf_counter() - begin
        lane.rollback(0)
        return seconds


class LlamaRunningPool(RunningPool, LlamaPool):
    """The pool of a model with a running state."""


class SlidingWindowPool(ForgettingPool, LlamaPool):
    """The pool of a model with sliding windows; cells that have left the window are reused.

    One lane. A cut is free while the window before it is still there; else the text is read again.
    """

    def decided(self, lane: CellLane) -> None:
        super().decided(lane)
        self.settle()  # it may have to read again, which the caller should hear of

    def _seek_only(self) -> None:
        pass  # a cut needs the books

    def reusable_prefix(self, lane: CellLane, keep: int) -> int:
        return keep if keep >= lane.n_cells or self._is_there(lane, keep) else 0

    def _restored(self, lane: CellLane, keep: int) -> int:
        cut = self.cache.remove(lane.sequence, keep) and self.cache.end(lane.sequence) == keep
        return keep if cut and self._is_there(lane, keep) else 0

    def _is_there(self, lane: CellLane, keep: int) -> bool:
        """True if the cache still holds the window before this position."""
        return 0 <= self.cache.begin(lane.sequence) <= max(keep - self.model.window, 0)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model of a pair with its pool, and whatever drafts for it alone is opened with it.

    ``on_close`` frees what was loaded beside it, before the model goes; last registered, first
    freed.
    """

    header: GgufHeader
    model: LlamaModel
    pool: LlamaPool
    options: EngineOptions
    adapters: tuple[GgufHeader, ...] = ()
    on_close: ExitStack = field(default_factory=ExitStack)

    @property
    def threads(self) -> int:
        return self.pool.kernels.threads

    def load(self, header: GgufHeader, **more: Any) -> LlamaModel:
        """Load a further model, which lies where this one does."""
        model = LlamaModel(
            header.path, pre=header.pre_tokenizer or "", gpu_layers=str(self.model.gpu_layers),
            devices=self.model.devices, use_mmap=self.options.use_mmap, stop=self.model.stop,
            kernels=bool(self.model.kernels), **more,
        )  # fmt: skip
        self.on_close.callback(model.close)
        return model


def open_pool(
    model: LlamaModel,
    *,
    n_ctx: int,
    max_rows: int,
    threads: int,
    options: EngineOptions,
    flash: str = "",
    lanes: int = 1,
    max_leaves: int = 1,
    any_width: bool = True,
    watch: Watch | None = None,
) -> LlamaPool:
    """Open a pool of a loaded model.

    Models with a running state, and with windows that alone are kept, take chains, the latter one
    lane.

    Args:
        flash: attention; "" as the options say. any_width: see ``CacheSettings``.

    Raises what ``LlamaCache`` raises.
    """
    kind = LlamaPool
    if not model.can_roll_back:
        kind = LlamaRunningPool
    elif model.has_windows and not options.swa_full:
        kind = SlidingWindowPool
    if kind is not LlamaPool:
        max_leaves = 1
        max_rows = max_rows if any_width else 1  # a draft model steps, and keeps no planes
        lanes = lanes if kind is LlamaRunningPool else 1
    rows = max(max_rows, lanes)
    shape = Shape(
        n_ctx=n_ctx, lanes=lanes, max_rows=rows, max_leaves=min(max_leaves, rows),
        n_batch=max(options.batch(on_gpu=model.gpu_layers != 0), rows),
        apart=kind is LlamaRunningPool and lanes > 1,
    )  # fmt: skip
    most = int(ll.llama_max_parallel_sequences())
    if shape.sequences + 2 * model.has_windows > most:
        raise UsageError(
            f"{lanes} conversations and {max_leaves} branches need {shape.sequences} sequences, "
            f"llama.cpp has {most}",
            "choose fewer branches",
        )
    return kind(
        model, shape, CacheSettings(options, threads, flash or options.flash_attn, any_width, watch)
    )

"""A KV cache of llama.cpp as a pool sees it: its passes, its sequences, its state."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import Any

import llama_cpp as ll
import numpy as np

from specllama.arrays import HiddenNeed, Rows
from specllama.backend.attention import FLOATS, one_by_one
from specllama.backend.batch import Batch
from specllama.backend.cache import Shape
from specllama.backend.capture import Capture, metadata
from specllama.backend.kernels import TILE, WIDE, Kernels
from specllama.backend.llama import LlamaModel
from specllama.backend.llama_log import last_words, recent
from specllama.backend.threads import ThreadChoice
from specllama.backend.watch import Watch
from specllama.cancel import StopFlag
from specllama.errors import (
    Cancelled,
    CannotLoad,
    ContextFull,
    EngineError,
    UnsupportedModel,
    UsageError,
)
from specllama.models.running_state import planes

_PARTIAL = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: what of a sequence's state is no set of cells
_ABORTED = 2  # llama_decode's word for a pass that the abort callback ended
_CONTEXT_PAD = 256
_SIZE = 8  # bytes of the length before each piece of a state

_KV_TYPES = {
    "auto": ll.GGML_TYPE_F16,
    "f32": ll.GGML_TYPE_F32,
    "f16": ll.GGML_TYPE_F16,
    "bf16": 30,  # GGML_TYPE_BF16, which the binding does not name
    "q8_0": ll.GGML_TYPE_Q8_0,
    "q4_0": ll.GGML_TYPE_Q4_0,
    "q4_1": ll.GGML_TYPE_Q4_1,
    "q5_0": ll.GGML_TYPE_Q5_0,
    "q5_1": ll.GGML_TYPE_Q5_1,
    "iq4_nl": ll.GGML_TYPE_IQ4_NL,
}
_FLASH = {"auto": -1, "off": 0, "on": 1}
# llama_ftype of files with hardly any: F32, F16, Q4_0, Q4_1, Q8_0, Q5_0, Q5_1, IQ4_NL, BF16
_NO_K_QUANTS = ("0", "1", "2", "3", "7", "8", "9", "25", "32")


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The settings that compute the passes of a cache.

    Attributes:
        flash: flash attention, "on", "off" or "auto".
        kv: types of K and V.
        any_width: compute a row alike in passes of any width where that takes a switch; else,
            passes are as fast as they can be.
        watch: looks into the passes.
        rope_scale: the factor by which the trained context is stretched; None is the model's.
        swa_full: keep cells that have left a sliding window.
    """

    threads: int
    flash: str
    kv: tuple[str, str] = ("f16", "f16")
    any_width: bool = True
    watch: Watch | None = None
    rope_scale: float | None = None
    swa_full: bool = True


class LlamaCache:
    """A KV cache of llama.cpp, see ``backend.cache.Cache``. One thread at a time.

    Raises:
        CannotLoad: no memory, or settings that llama.cpp does not accept.
        UnsupportedModel: the model keeps no cache.
        UsageError: a value cache that needs flash attention.
    """

    def __init__(self, model: LlamaModel, shape: Shape, settings: CacheSettings) -> None:
        self.model = model
        self.shape = shape
        self.settings = settings
        self._ctx: Any = None
        params = self.params = _params(model, shape, settings)
        recent.clear()
        self._ctx = ll.llama_init_from_model(model.handle, params)
        if not self._ctx:
            reason = last_words() or "not enough memory, or settings llama.cpp does not accept"
            room = any(word in reason for word in ("memory", "alloc", "n_ctx"))
            raise CannotLoad(
                f"cannot create a context of {params.n_ctx} tokens for {model.path.name}: {reason}",
                "try a smaller --ctx-size"
                if room
                else "leave --cache-type-k, --cache-type-v and --flash-attn out",
            )
        model.loras.apply_to(self._ctx)
        self._memory = ll.llama_get_memory(self._ctx)
        if not self._memory:
            self.close()
            raise UnsupportedModel(f"{model.path.name} keeps no KV cache: not a text generator")
        one_float = params.type_k == params.type_v and params.type_k in FLOATS
        on_cpu = model.gpu_layers == 0 and settings.flash == "on"
        self._one_by_one = (
            one_by_one(self._ctx) if settings.any_width and on_cpu and one_float else None
        )
        self._tiled: bool | None = None  # how the last pass was computed
        self.kernels = Kernels(
            on_cpu=model.gpu_layers == 0,
            threads=settings.threads,
            flash=settings.flash,
            kv=settings.kv,
            any_width=on_cpu and (not one_float or self._one_by_one is not None),
            tiles=self._one_by_one is not None,
            wide=TILE if metadata(model.handle, "general.file_type") in _NO_K_QUANTS else WIDE,
        )
        self.capture = Capture(model.handle, self._ctx)
        self._planes = int(ll.llama_n_rs_seq(self._ctx))  # 0 for models of which it keeps none
        self.choice: ThreadChoice | None = None
        self._threads_now = settings.threads
        # llama.cpp leaves what has left a window out of a state. In pieces as long as a window
        # nothing has: each is that of a further sequence, which holds it for a moment.
        self._piece, self._aside = _piece(model, settings), shape.sequences
        # After a rewrite llama.cpp looks for room from the first cell on and would take cells that
        # have left a sliding window, unless a second sequence holds them until the next pass.
        self._pin, self._pinned = shape.sequences + 1, False
        self._n_vocab = model.vocab.n_tokens
        self.batch = Batch(shape.n_batch, shape.max_leaves)
        self._native = native(self.batch)
        self._rows_at = 0
        self._rows_view: Rows = np.empty((0, self._n_vocab), np.float32)

    # -- facts --

    @property
    def n_cells(self) -> int:
        return int(ll.llama_n_ctx_seq(self._ctx)) * (self.shape.lanes if self.shape.apart else 1)

    @property
    def handle(self) -> Any:
        """llama.cpp's own context."""
        self.require_open()
        return self._ctx

    def require_open(self) -> None:
        """Refuse a closed context: llama.cpp would read freed memory."""
        if not self._ctx:
            raise EngineError("the context is closed")

    def require_running(self) -> None:
        require_running(self.model.stop)

    # -- passes --

    def decode(self, *, tiled: bool) -> None:
        if self._one_by_one is not None and tiled is not self._tiled:
            self._one_by_one(not tiled)
            self._tiled = tiled
        n = self.batch.n
        self._native.n_tokens = n
        choice = self.choice
        begin = 0.0
        reads = tiled or n >= TILE
        if choice is not None and not reads:
            self.compute_with(choice.choose(n))
            begin = perf_counter()
        else:
            self.compute_with(self.settings.threads)
        status = int(ll.llama_decode(self._ctx, self._native))
        if self._pinned:
            self._let_go()
        if status != 0:
            raise decode_error(status, self.shape.n_ctx)
        if choice is not None and not reads:
            choice.took(n, perf_counter() - begin)

    def compute_with(self, threads: int) -> None:
        if threads != self._threads_now:
            ll.llama_set_n_threads(self._ctx, threads, threads)
            self._threads_now = threads

    def rows(self, n: int) -> Rows:
        if n == 0:
            return self._rows_view[:0]
        pointer = ll.llama_get_logits(self._ctx)
        address = ctypes.addressof(pointer.contents)
        if address != self._rows_at:
            most = int(self.params.n_outputs_max)
            self._rows_view = np.ctypeslib.as_array(pointer, (most, self._n_vocab))
            self._rows_at = address
        return self._rows_view[:n]

    # -- hidden states --

    def want(self, needs: set[HiddenNeed]) -> None:
        self.require_open()
        self.capture.choose(needs)

    def prepare(self, *, every_row: bool) -> None:
        self.capture.prepare(every_row)

    def states(self, need: HiddenNeed, n: int) -> Rows:
        return self.capture.rows(need, n)

    # -- sequences --

    def copy(self, sequence: int, to: int, begin: int, end: int) -> None:
        ll.llama_memory_seq_cp(self._memory, sequence, to, begin, end)

    def remove(self, sequence: int, begin: int) -> bool:
        done = bool(ll.llama_memory_seq_rm(self._memory, sequence, begin, -1))
        if self._pinned:
            self._let_go()
            self._hold()
        return done

    def _hold(self) -> None:
        """Protect cells that left a window from reuse until the next pass."""
        for sequence in range(self.shape.sequences):
            self.copy(sequence, self._pin, -1, -1)
        self._pinned = True

    def _let_go(self) -> None:
        ll.llama_memory_seq_rm(self._memory, self._pin, 0, -1)
        self._pinned = False

    def keep(self, sequence: int) -> None:
        ll.llama_memory_seq_keep(self._memory, sequence)

    def clear(self) -> None:
        ll.llama_memory_clear(self._memory, False)

    def begin(self, sequence: int) -> int:
        """Return the first position that the cache still has, -1 for none."""
        return int(ll.llama_memory_seq_pos_min(self._memory, sequence))

    def end(self, sequence: int) -> int:
        return int(ll.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def state(self, sequence: int) -> bytes:
        if not self._piece:
            return self._state(sequence)
        pieces: list[bytes] = []
        first = max(self.begin(sequence), 0)
        for begin in range(first - first % self._piece, self.end(sequence), self._piece):
            self.copy(sequence, self._aside, begin, begin + self._piece)
            pieces.append(piece := self._state(self._aside))
            self.remove(self._aside, 0)
            if not piece:
                return b""
        return b"".join(len(piece).to_bytes(_SIZE) + piece for piece in pieces)

    def _state(self, sequence: int) -> bytes:
        size = int(ll.llama_state_seq_get_size_ext(self._ctx, sequence, 0))
        buffer = (ctypes.c_uint8 * max(size, 1))()
        n = int(ll.llama_state_seq_get_data_ext(self._ctx, buffer, size, sequence, 0))
        return bytes(memoryview(buffer)[:n])

    def restore(self, sequence: int, state: bytes) -> bool:
        if not self._piece:
            return self._restore(sequence, state)
        at = 0
        while at < len(state):
            begin = at + _SIZE
            at = begin + int.from_bytes(state[at:begin])
            done = self._restore(self._aside, state[begin:at])
            if done:
                self.copy(self._aside, sequence, -1, -1)
            self.remove(self._aside, 0)
            if not done:
                return False
        return True

    def _restore(self, sequence: int, state: bytes) -> bool:
        buffer = readable(state)
        return bool(ll.llama_state_seq_set_data_ext(self._ctx, buffer, len(state), sequence, 0))

    # -- a running state, see ``running.RunningCache`` --

    @property
    def planes(self) -> int:
        return self._planes

    @property
    def undivided(self) -> int:
        return int(self.params.n_ubatch)

    def save_running(self, sequence: int, into: Any = None) -> Any:
        size = int(ll.llama_state_seq_get_size_ext(self._ctx, sequence, _PARTIAL))
        if into is None or len(into) != size:
            into = (ctypes.c_uint8 * size)()
        n = int(ll.llama_state_seq_get_data_ext(self._ctx, into, size, sequence, _PARTIAL))
        return into if n == size else b""

    def restore_running(self, sequence: int, state: Any) -> bool:
        size, buffer = len(state), readable(state)
        return bool(ll.llama_state_seq_set_data_ext(self._ctx, buffer, size, sequence, _PARTIAL))

    def rewrite(self) -> bool:
        size = int(ll.llama_state_get_size(self._ctx))
        buffer = (ctypes.c_uint8 * size)()
        written = int(ll.llama_state_get_data(self._ctx, buffer, size))
        done = 0 < written == int(ll.llama_state_set_data(self._ctx, buffer, written))
        if done and self.model.has_windows:
            self._hold()
        return done

    def beside(self, shape: Shape) -> LlamaCache:
        return LlamaCache(self.model, shape, self.settings)

    def close(self) -> None:
        if self._ctx:
            ll.llama_free(self._ctx)
            self._ctx = None


def _params(model: LlamaModel, shape: Shape, settings: CacheSettings) -> Any:
    kv_k, kv_v = settings.kv
    if kv_v not in ("auto", "f16", "f32", "bf16") and settings.flash == "off":
        raise UsageError(
            f"a {kv_v} value cache needs flash attention",
            "add --flash-attn on, or use --cache-type-v f16",
        )
    params = ll.llama_context_default_params()
    params.n_ctx = -(-shape.n_ctx // _CONTEXT_PAD) * _CONTEXT_PAD
    if shape.apart:
        params.n_ctx *= shape.lanes
    params.n_batch = shape.n_batch
    params.n_ubatch = shape.n_batch  # a pass whose rows are judged is never divided
    # of a sequence's last n_rs_seq + 1 tokens llama.cpp asserts that they fit
    params.n_rs_seq = max(min(planes(shape.max_rows), params.n_ubatch - 2), 0) * shape.judged
    params.n_seq_max = shape.sequences + (_piece(model, settings) > 0)
    # cells for all, which sequences can share
    params.kv_unified = params.n_seq_max > 1 and not shape.apart
    params.n_outputs_max = max(shape.max_rows, params.n_seq_max)
    params.n_threads = params.n_threads_batch = settings.threads
    params.flash_attn_type = _FLASH[settings.flash]
    params.type_k, params.type_v = _KV_TYPES[kv_k], _KV_TYPES[kv_v]
    params.no_perf = True
    params.swa_full = settings.swa_full
    if settings.rope_scale is not None:
        params.rope_freq_scale = 1 / settings.rope_scale
    stop_on(model.stop, params)
    if settings.watch is not None:
        params.cb_eval = settings.watch.function
    return params


def _piece(model: LlamaModel, settings: CacheSettings) -> int:
    """Return the number of tokens in a piece of a lane's state; 0 if it is taken as a whole."""
    return model.window if settings.swa_full and model.can_roll_back else 0


def readable(state: Any) -> Any:
    """Return bytes as llama.cpp reads them; without a copy if they are writable."""
    if isinstance(state, ctypes.Array):
        return state
    kind = ctypes.c_uint8 * len(state)
    return kind.from_buffer_copy(state) if memoryview(state).readonly else kind.from_buffer(state)


def native(batch: Batch) -> Any:
    """Return llama.cpp's view of a batch; its memory stays ours."""

    def pointer(array: Any, kind: Any) -> Any:
        return array.ctypes.data_as(ctypes.POINTER(kind))

    i32 = ctypes.c_int32
    base, (step, _) = batch.sequences.ctypes.data, batch.sequences.strides
    n = len(batch.token)
    rows = (ctypes.c_void_p * n)(*range(base, base + n * step, step))
    return ll.llama_batch(
        token=pointer(batch.token, i32),
        pos=pointer(batch.position, i32),
        n_seq_id=pointer(batch.n_sequences, i32),
        seq_id=ctypes.cast(rows, ctypes.POINTER(ctypes.POINTER(i32))),
        logits=pointer(batch.output, ctypes.c_int8),
    )


def decode_error(status: int, n_ctx: int) -> Exception:
    if status == 1:
        return ContextFull(
            f"no room left in the KV cache of {n_ctx} tokens",
            "start a new chat, raise --ctx-size, or use --on-full shift",
        )
    if status == _ABORTED:
        return Cancelled("the pass was cancelled")
    return EngineError(f"llama.cpp could not evaluate the tokens (code {status}): {last_words()}")


def require_running(stop: StopFlag) -> None:
    """Raise Cancelled before a pass if a stop is set: not every device stops within one.

    Raises:
        Cancelled: the engine is to stop.
    """
    if stop.is_set():
        raise decode_error(_ABORTED, 0)


def stop_on(stop: StopFlag, params: Any) -> None:
    """Make the passes of a later context end when ``stop`` is set (on CPUs, within a pass).

    The flag must outlive the context.
    """
    if (reader := _native_flag_reader()) is not None:
        params.abort_callback = reader
        params.abort_callback_data = stop.address


@cache
def _native_flag_reader() -> Any:
    """Return a C function ``bool f(void *flag)`` for llama.cpp's abort callback, without the GIL.

    It is called for every graph node, too often for a Python callback. libc's strlen is that
    function: 0 for an empty string, 1 for one of one character.
    """
    try:
        return ctypes.cast(ctypes.CDLL(None).strlen, ll.ggml_abort_callback)
    except (OSError, AttributeError):
        return None

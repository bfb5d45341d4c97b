"""A KV cache of llama.cpp as a pool sees it: its passes, its sequences, its state."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import llama_cpp as ll
import numpy as np

from specllama.arrays import HiddenNeed, IntArray, Rows
from specllama.backend.base import MAKE_ROOM
from specllama.backend.batch import Batch, Shape
from specllama.backend.capture import Capture, metadata
from specllama.backend.kernels import TILE, WIDE, Kernels
from specllama.backend.llama import LlamaModel
from specllama.backend.llama_log import last_words, recent
from specllama.backend.symbols import FLOATS, one_by_one
from specllama.backend.threads import Threads
from specllama.backend.watch import Watch
from specllama.cancel import Cancel
from specllama.errors import (
    Cancelled,
    CannotLoad,
    ContextFull,
    EngineError,
    UnsupportedModel,
    UsageError,
)
from specllama.models.ggml_types import TENSOR_TYPES
from specllama.models.running_state import planes
from specllama.models.words import Spread
from specllama.settings.params import EngineOptions

_PARTIAL = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: what of a sequence's state is no set of cells
_ABORTED = 2  # llama_decode's word for a pass that the abort callback ended
_CONTEXT_PAD = 256
_SIZE = 8  # bytes of the length before each piece of a state

_TYPES = {"auto": int(ll.GGML_TYPE_F16)}
_TYPES |= {kind.name.lower(): number for number, kind in TENSOR_TYPES.items()}
_FLASH = {"auto": -1, "off": 0, "on": 1}
# llama_ftype of files with hardly any: F32, F16, Q4_0, Q4_1, Q8_0, Q5_0, Q5_1, IQ4_NL, BF16
_NO_K_QUANTS = ("0", "1", "2", "3", "7", "8", "9", "25", "32")


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The settings that compute the passes of a cache.

    Attributes:
        options: of the model, every "auto" decided, apart from the number of ``threads`` and
            ``flash`` attention ("on", "off" or "auto").
        any_width: compute a row alike in passes of any width where that takes a switch; else,
            passes are as fast as they can be.
        watch: looks into the passes.
    """

    options: EngineOptions
    threads: int
    flash: str
    any_width: bool = True
    watch: Watch | None = None

    @property
    def kv(self) -> tuple[str, str]:
        """The types of K and V."""
        return self.options.kv_type_k, self.options.kv_type_v


class LlamaCache:
    """A KV cache of llama.cpp, one thread at a time. A cell holds a token at a position, for one
    sequence or for several.

    A token goes to the first free cell after the last one that was filled, or after the first one
    that was freed since if that comes earlier. A query sees the cells of its first sequence.

    Raises:
        CannotLoad: no memory, or settings that llama.cpp does not accept.
        UnsupportedModel: the model keeps no cache.
        UsageError: a value cache that needs flash attention.
    """

    def __init__(self, model: LlamaModel, shape: Shape, settings: CacheSettings) -> None:
        self.model = model
        self.stop = model.stop
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
        apart = shape.lanes if shape.apart else 1
        self.n_cells = int(ll.llama_n_ctx_seq(self._ctx)) * apart
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
        file_type = metadata(model.handle, "general.file_type")
        self.kernels = Kernels(
            on_cpu=model.gpu_layers == 0,
            threads=settings.threads,
            flash=settings.flash,
            kv=settings.kv,
            any_width=on_cpu and (not one_float or self._one_by_one is not None),
            tiles=self._one_by_one is not None,
            wide=TILE if model.kernels or file_type in _NO_K_QUANTS else WIDE,
        )
        self.capture = Capture(model.handle, self._ctx)
        # the most tokens that can be removed from the end of a pass: 0 for models without planes
        self.planes = int(ll.llama_n_rs_seq(self._ctx))
        # of a pass that is computed at once; only the last part leaves planes
        self.undivided = int(params.n_ubatch)
        self.threads = Threads(lambda n: ll.llama_set_n_threads(self._ctx, n, n), settings.threads)
        # llama.cpp leaves what has left a window out of a state. In pieces as long as a window
        # nothing has: each is that of a further sequence, which holds it for a moment.
        self._piece, self._aside = _piece(model, settings), shape.sequences
        # After a rewrite llama.cpp looks for room from the first cell on and would take cells that
        # have left a sliding window, unless a second sequence holds them until the next pass.
        self._pin, self._pinned = shape.sequences + 1, False
        self._n_vocab = model.vocab.n_tokens
        self._embedding = read = model.embedding
        n, leaves = shape.n_batch, shape.max_leaves
        self.batch = Batch(n, leaves) if read is None else StateBatch(n, read.width, leaves)
        self._native = native(self.batch)
        self._spread = None if read is None else Spread(read.says, read.n_vocab)
        self._rows_at = 0
        self._rows_view: Rows = np.empty((0, self._n_vocab), np.float32)

    # -- facts --

    @property
    def handle(self) -> Any:
        """llama.cpp's own context."""
        self.require_open()
        return self._ctx

    def require_open(self) -> None:
        """Refuse a closed context: llama.cpp would read freed memory."""
        if not self._ctx:
            raise EngineError("the context is closed")

    # -- passes --

    def decode(self, *, tiled: bool) -> None:
        """Run the pass in the batch; errors are those of ``Context.forward``.

        Args:
            tiled: long reads may be computed in tiles, see ``kernels``.
        """
        if self._one_by_one is not None and tiled is not self._tiled:
            self._one_by_one(not tiled)
            self._tiled = tiled
        n = self.batch.n
        batch = self._native
        batch.n_tokens = n
        if self._embedding is not None:
            vectors = cast("StateBatch", self.batch)
            self._embedding.write(vectors.token[:n], vectors.states)
            batch = vectors.ready(tokens=False, states=True)
        status = self.threads.run(n, lambda: ll.llama_decode(self._ctx, batch), tiled or n >= TILE)
        if self._pinned:
            self._let_go()
        if status:
            raise decode_error(status, self.shape.n_ctx)

    def rows(self, n: int) -> Rows:
        """Return the first ``n`` rows of the last pass, in the order of the batch; a view."""
        if n == 0:
            return self._rows_view[:0]
        pointer = ll.llama_get_logits(self._ctx)
        address = ctypes.addressof(pointer.contents)
        if address != self._rows_at:
            most = int(self.params.n_outputs_max)
            self._rows_view = np.ctypeslib.as_array(pointer, (most, self._n_vocab))
            self._rows_at = address
        rows = self._rows_view[:n]
        return rows if self._spread is None else self._spread(rows)

    # -- hidden states --

    def want(self, needs: set[HiddenNeed]) -> None:
        """Keep these hidden states from the next pass on."""
        self.require_open()
        self.capture.choose(needs)

    def prepare(self, *, every_row: bool) -> None:
        """Set whether the next pass returns every row."""
        self.capture.prepare(every_row)

    def states(self, need: HiddenNeed, n: int) -> Rows:
        """Return hidden states [n, width] of the last pass, in the order of the batch; a view."""
        return self.capture.rows(need, n)

    # -- sequences --

    def copy(self, sequence: int, to: int, begin: int, end: int) -> None:
        """Give another sequence the cells of positions ``begin`` to ``end - 1`` as well."""
        ll.llama_memory_seq_cp(self._memory, sequence, to, begin, end)

    def remove(self, sequence: int, begin: int) -> bool:
        """Remove the cells from position ``begin`` on from a sequence; False if that fails."""
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
        """Free every cell that this sequence does not have."""
        ll.llama_memory_seq_keep(self._memory, sequence)

    def clear(self) -> None:
        ll.llama_memory_clear(self._memory, False)

    def begin(self, sequence: int) -> int:
        """Return the first position that the cache still has, -1 for none."""
        return int(ll.llama_memory_seq_pos_min(self._memory, sequence))

    def end(self, sequence: int) -> int:
        """Return the position after the last one of a sequence."""
        return int(ll.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def state(self, sequence: int) -> bytes:
        """Return the whole state of a sequence; empty if the library does not expose it."""
        if not self._piece:
            return bytes(state_of(self._ctx, sequence))
        pieces: list[bytes] = []
        first = max(self.begin(sequence), 0)
        for begin in range(first - first % self._piece, self.end(sequence), self._piece):
            self.copy(sequence, self._aside, begin, begin + self._piece)
            pieces.append(piece := bytes(state_of(self._ctx, self._aside)))
            self.remove(self._aside, 0)
            if not piece:
                return b""
        return b"".join(len(piece).to_bytes(_SIZE) + piece for piece in pieces)

    def restore(self, sequence: int, state: bytes) -> bool:
        """Fill an empty sequence with a result of ``state``."""
        if not self._piece:
            return set_state(self._ctx, sequence, state)
        at = 0
        while at < len(state):
            begin = at + _SIZE
            at = begin + int.from_bytes(state[at:begin])
            done = set_state(self._ctx, self._aside, state[begin:at])
            if done:
                self.copy(self._aside, sequence, -1, -1)
            self.remove(self._aside, 0)
            if not done:
                return False
        return True

    # -- a running state, see ``recurrent_pool`` --

    def save_running(self, sequence: int, into: Any = None) -> Any:
        """Copy a sequence's running state, into the buffer ``into`` if it fits; empty if the
        library does not expose it."""
        return state_of(self._ctx, sequence, _PARTIAL, into)

    def restore_running(self, sequence: int, state: Any) -> bool:
        """Make this the running state of a sequence."""
        return set_state(self._ctx, sequence, state, _PARTIAL)

    def rewrite(self) -> bool:
        """Write all cells out and read them back, in order, into the first ones."""
        size = int(ll.llama_state_get_size(self._ctx))
        buffer = (ctypes.c_uint8 * size)()
        written = int(ll.llama_state_get_data(self._ctx, buffer, size))
        done = 0 < written == int(ll.llama_state_set_data(self._ctx, buffer, written))
        if done and self.model.has_windows:
            self._hold()
        return done

    def beside(self, shape: Shape) -> LlamaCache:
        """Create an empty cache of another shape on the same model, computed alike."""
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
    params.type_k, params.type_v = _TYPES[kv_k], _TYPES[kv_v]
    params.no_perf = True
    params.swa_full = settings.options.swa_full
    if settings.options.rope_scale is not None:
        params.rope_freq_scale = 1 / settings.options.rope_scale
    stop_on(model.stop, params)
    if settings.watch is not None:
        params.cb_eval = settings.watch.function
    return params


def _piece(model: LlamaModel, settings: CacheSettings) -> int:
    """Return the number of tokens in a piece of a lane's state; 0 if it is taken as a whole."""
    return model.window if settings.options.swa_full and model.can_roll_back else 0


def state_of(context: Any, sequence: int, flags: int = 0, into: Any = None) -> Any:
    """Copy the state of a sequence, into the buffer ``into`` if it fits; empty if the library does
    not expose it."""
    size = int(ll.llama_state_seq_get_size_ext(context, sequence, flags))
    if into is None or len(into) != size:
        into = (ctypes.c_uint8 * size)()
    n = int(ll.llama_state_seq_get_data_ext(context, into, size, sequence, flags))
    return into if n == size else b""


def set_state(context: Any, sequence: int, state: Any, flags: int = 0) -> bool:
    """Give a sequence a result of ``state_of``, without a copy if its bytes are writable."""
    size, buffer = len(state), state
    if not isinstance(state, ctypes.Array):
        kind = ctypes.c_uint8 * size
        copies = memoryview(state).readonly
        buffer = kind.from_buffer_copy(state) if copies else kind.from_buffer(state)
    return bool(ll.llama_state_seq_set_data_ext(context, buffer, size, sequence, flags))


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


class StateBatch(Batch):
    """A batch of vectors, tokens, or both; its memory is ours.

    Args:
        size: most rows. width: of a vector. leaves: most sequences of a row.
    """

    def __init__(self, size: int, width: int, leaves: int = 1) -> None:
        super().__init__(size, leaves)
        self.states: Rows = np.zeros((size, width), np.float32)
        # four times over: rotations of several dimensions read a position for each
        self._four: IntArray = np.zeros(4 * size, np.int32)
        self._native = native(self)
        ints = ctypes.POINTER(ctypes.c_int32)
        self._native.pos = self._four.ctypes.data_as(ints)
        self._token = self.token.ctypes.data_as(ints)
        self._embd = self.states.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def ready(self, *, tokens: bool, states: bool) -> Any:
        self._four[: 4 * self.n] = np.tile(self.position[: self.n], 4)
        self._native.n_tokens = self.n
        self._native.token = self._token if tokens else None
        self._native.embd = self._embd if states else None
        return self._native


def decode_error(status: int, n_ctx: int) -> Exception:
    if status == 1:
        return ContextFull(f"no room left in the KV cache of {n_ctx} tokens", MAKE_ROOM)
    if status == _ABORTED:
        return Cancelled("the pass was cancelled")
    return EngineError(f"llama.cpp could not evaluate the tokens (code {status}): {last_words()}")


def stop_on(stop: Cancel, params: Any) -> None:
    """Make the passes of a later context end when ``stop`` is set (on CPUs, within a pass).

    It must outlive the context.
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

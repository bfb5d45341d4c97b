"""One KV cache of llama.cpp: its passes, its rollback, and what would abort, checked before.

Batch sizes, output counts, token ids and sequence ranges are looked at here, because llama.cpp ends
the process on a bad one (``GGML_ASSERT``).
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING, Any

import llama_cpp as ll
import numpy as np
import numpy.typing as npt

from specllama.backend.attention import FLOATS, TILE, one_by_one
from specllama.backend.base import Outputs
from specllama.backend.capture import Capture
from specllama.backend.hidden import HiddenRows
from specllama.backend.llama_log import last_words, recent
from specllama.backend.threads import ThreadChoice
from specllama.cancel import StopFlag
from specllama.errors import (
    Cancelled,
    CannotLoad,
    ContextFull,
    EngineError,
    UnsupportedModel,
    UsageError,
)
from specllama.params import EngineOptions
from specllama.speculative.history import History
from specllama.speculative.types import HiddenNeed, IntArray, Rows

if TYPE_CHECKING:
    from specllama.backend.llama import LlamaModel
    from specllama.backend.watch import Watch

SEQ = 0  # the one sequence of a chain
_PARTIAL = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: the recurrent part of a sequence's state
_ABORTED = 2  # llama_decode's word for a pass that the abort callback ended
_CONTEXT_PAD = 256

_KV_TYPES = {
    "auto": ll.GGML_TYPE_F16,
    "f32": ll.GGML_TYPE_F32,
    "f16": ll.GGML_TYPE_F16,
    "bf16": getattr(ll, "GGML_TYPE_BF16", 30),
    "q8_0": ll.GGML_TYPE_Q8_0,
    "q4_0": ll.GGML_TYPE_Q4_0,
    "q4_1": ll.GGML_TYPE_Q4_1,
    "q5_0": ll.GGML_TYPE_Q5_0,
    "q5_1": ll.GGML_TYPE_Q5_1,
    "iq4_nl": ll.GGML_TYPE_IQ4_NL,
}
_FLASH = {"auto": -1, "off": 0, "on": 1}


class LlamaContext:
    """One KV cache. One thread at a time (two at once abort the process), hence the lock.

    Args:
        alike: compute a row alike in passes of every width where that takes a switch; else, passes
            are as fast as they can be.
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        n_ctx: int,
        max_rows: int,
        threads: int,
        options: EngineOptions,
        flash: str,
        max_leaves: int = 1,
        alike: bool = True,
        watch: Watch | None = None,
    ) -> None:
        self.model = model
        self._max_leaves = min(max_leaves, max_rows, int(ll.llama_max_parallel_sequences()))
        quantized_v = options.kv_type_v not in ("auto", "f16", "f32", "bf16")
        if quantized_v and flash == "off":
            raise UsageError(
                f"a {options.kv_type_v} value cache needs flash attention",
                "add --flash-attn on, or use --cache-type-v f16",
            )
        params = ll.llama_context_default_params()
        params.n_ctx = -(-n_ctx // _CONTEXT_PAD) * _CONTEXT_PAD
        params.n_batch = max(options.batch(on_gpu=model.gpu_layers != 0), max_rows)
        params.n_ubatch = params.n_batch
        params.n_seq_max = self._max_leaves
        params.kv_unified = self._max_leaves > 1  # one pool of cells, which branches can share
        params.n_outputs_max = max_rows
        params.n_threads = threads
        params.n_threads_batch = threads
        params.flash_attn_type = _FLASH[flash]
        params.type_k = _KV_TYPES[options.kv_type_k]
        params.type_v = _KV_TYPES[options.kv_type_v]
        params.no_perf = True
        self._stop = model.stop
        stop_on(self._stop, params)
        if watch is not None:
            params.cb_eval = watch.function
        self._params = params
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
        one_float = params.type_k == params.type_v and params.type_k in FLOATS
        on_cpu = model.gpu_layers == 0 and flash == "on"
        self._one_by_one = one_by_one(self._ctx) if alike and on_cpu and one_float else None
        self._judged = alike
        self._rows_alike = on_cpu and (not one_float or self._one_by_one is not None)
        self._capture = Capture(model.handle, self._ctx)
        self._memory = ll.llama_get_memory(self._ctx)
        if not self._memory:
            self.close()
            raise UnsupportedModel(f"{model.path.name} keeps no KV cache: not a text generator")
        self._n_ctx = min(int(ll.llama_n_ctx_seq(self._ctx)), n_ctx)  # llama.cpp pads it
        self._n_batch = int(params.n_batch)
        self._max_rows = max_rows
        self._n_vocab = model.vocab.n_tokens
        self.threads = threads
        self._threads_now = threads
        self._choice: ThreadChoice | None = None
        self.flash = flash
        self._tokens = History()
        self._checkpoint: tuple[int, Any, int] | None = None
        self._lock = threading.Lock()
        self._batch = ll.llama_batch_init(self._n_batch, 0, self._max_leaves)
        as_array = np.ctypeslib.as_array
        self._b_token: IntArray = as_array(self._batch.token, (self._n_batch,))
        self._b_pos: IntArray = as_array(self._batch.pos, (self._n_batch,))
        self._b_logits: npt.NDArray[np.int8] = as_array(self._batch.logits, (self._n_batch,))
        as_array(self._batch.n_seq_id, (self._n_batch,))[:] = 1
        for i in range(self._n_batch):
            self._batch.seq_id[i][0] = SEQ
        self._rows_at = 0
        self._rows_view: Rows = np.empty((0, self._n_vocab), np.float32)

    # -- facts --

    @property
    def n_ctx(self) -> int:
        return self._n_ctx

    @property
    def n_vocab(self) -> int:
        return self._n_vocab

    @property
    def n_batch(self) -> int:
        return self._n_batch

    @property
    def max_rows(self) -> int:
        return self._max_rows

    @property
    def max_leaves(self) -> int:
        """Most leaves of a tree pass; 1 where only chains are possible."""
        return self._max_leaves

    @property
    def rows_alike(self) -> bool:
        """Whether attention computes a row alike in passes of every width (prompts apart)."""
        return self._rows_alike

    @property
    def tokens(self) -> list[int]:
        return self._tokens

    @property
    def n_past(self) -> int:
        self._require_open()
        return int(ll.llama_memory_seq_pos_max(self._memory, SEQ)) + 1

    @property
    def handle(self) -> Any:
        """llama.cpp's own context, for contexts that borrow from it."""
        self._require_open()
        return self._ctx

    def fill(self, copies: int) -> None:
        """Lengthen the cache by ``copies`` of its text, which no row will ever see.

        They lie in sequences of their own, the last ones that branches would take.

        Raises:
            EngineError: llama.cpp does not take them.
        """
        self._require_open()
        size = int(ll.llama_state_seq_get_size(self._ctx, SEQ))
        buffer = (ctypes.c_uint8 * max(size, 1))()
        written = int(ll.llama_state_seq_get_data(self._ctx, buffer, size, SEQ))
        for i in range(copies):
            sequence = self._max_leaves - 1 - i
            if sequence <= SEQ or not written:
                raise EngineError(f"no room for {copies} copies of the text")
            if not ll.llama_state_seq_set_data(self._ctx, buffer, written, sequence):
                raise EngineError(f"llama.cpp does not take a copied text: {last_words()}")

    def settings(self) -> Any:
        """A copy of llama.cpp's parameters of this context, for one that runs beside it."""
        return type(self._params).from_buffer_copy(self._params)

    # -- hidden states --

    @property
    def hidden(self) -> HiddenRows:
        return self._capture.hidden

    def offer_layers(self, layers: Sequence[int]) -> None:
        """See ``Capture.offer_layers``."""
        self._require_open()
        self._capture.offer_layers(layers)

    def capture(self, need: HiddenNeed) -> None:
        self._require_open()
        with self._lock:
            self._capture.choose(need)

    def _require_open(self) -> None:
        """llama.cpp would read freed memory."""
        if not self._ctx:
            raise EngineError("the context is closed")

    # -- passes --

    def forward(
        self, tokens: Sequence[int], *, outputs: Outputs, parents: Sequence[int] | None = None
    ) -> Rows:
        if parents is not None:
            raise EngineError("this context was not created for tree passes")
        n_rows = self._load(tokens, outputs)
        n, past = len(tokens), len(self._tokens)
        if outputs == "last" and n > 1 and self._last_apart(n):
            self.forward(tokens[:-1], outputs="none")
            try:
                return self.forward(tokens[-1:], outputs="last")
            except BaseException:
                with self._lock:
                    self._cut(past, replay=not self._stop.is_set())
                raise
        with self._lock:
            if not self.model.can_roll_back and outputs == "all" and n > 1:
                self._save_checkpoint()
            self._b_pos[:n] = np.arange(past, past + n, dtype=np.int32)
            self._capture.prepare(n_rows == n)
            status = self._decode(reading=n_rows == 0)
            if status != 0:
                self._cut(past, replay=status != _ABORTED)
                raise decode_error(status, self._n_ctx)
            self._capture.take(past, n, n_rows == n)
            self._tokens.extend(self._b_token[:n].tolist())
            return self._rows(n_rows)

    def _last_apart(self, n: int) -> bool:
        """Whether the last of ``n`` tokens needs a pass of its own if its row is to be returned.

        A tiled row would not be that of a later pass over the same text; and a hidden state behind
        the last norm is given away of passes that return every row.
        """
        tiled = self._one_by_one is not None and n >= TILE
        return tiled or self._capture.need == "final_hidden"

    def _decode(self, *, reading: bool) -> int:
        """Run the pass in the batch; ``reading``: a text whose rows nobody judges."""
        rows = self._batch.n_tokens
        if self._one_by_one is not None:
            self._one_by_one(not reading or rows < TILE)
        if self._choice is None:
            return int(ll.llama_decode(self._ctx, self._batch))
        if rows >= TILE:
            self._compute_with(self.threads)
            return int(ll.llama_decode(self._ctx, self._batch))
        self._compute_with(self._choice.choose(rows))
        begin = perf_counter()
        status = int(ll.llama_decode(self._ctx, self._batch))
        if status == 0:
            self._choice.took(rows, perf_counter() - begin)
        return status

    def _compute_with(self, threads: int) -> None:
        if threads != self._threads_now:
            ll.llama_set_n_threads(self._ctx, threads, threads)
            self._threads_now = threads

    def choose_threads(self) -> None:
        """From now on try fewer threads as well, where that changes no bit of a row.

        Attention that splits a single query over threads does, which matters where rows are judged.
        """
        any_count = self._rows_alike or not self._judged or self.flash == "off"
        if any_count and self.threads > 1 and self.model.gpu_layers == 0:
            choice = ThreadChoice(self.threads)
            choice.begin(self._time_one_row)
            self._choice = choice

    def _time_one_row(self, threads: int) -> float:
        """Seconds of a pass of one row."""
        self._compute_with(threads)
        begin = perf_counter()
        self.forward([0], outputs="last")
        seconds = perf_counter() - begin
        self.rollback(0)
        return seconds

    def _load(self, tokens: Sequence[int], outputs: Outputs) -> int:
        """Check a pass and write its tokens and outputs to the batch; returns how many rows."""
        self._require_open()
        require_running(self._stop)
        n = len(tokens)
        n_rows = n if outputs == "all" else 1 if outputs == "last" else 0
        if n == 0:
            raise ValueError("a pass needs at least one token")
        if n > self._n_batch:
            raise ValueError(f"a pass takes at most {self._n_batch} tokens, got {n}")
        if n_rows > self._max_rows:
            raise ValueError(f"a pass returns at most {self._max_rows} rows, got {n_rows}")
        if len(self._tokens) + n > self._n_ctx:
            raise ContextFull(
                f"the context of {self._n_ctx} tokens is full",
                "start a new chat, raise --ctx-size, or use --on-full shift",
            )
        ids = self._b_token[:n]
        try:
            ids[:] = tokens
        except OverflowError:
            ids[0] = -1
        if int(ids.min()) < 0 or int(ids.max()) >= self._n_vocab:
            raise EngineError(f"a token is outside the vocabulary of {self._n_vocab}")
        self._b_logits[:n] = outputs == "all"
        if outputs == "last":
            self._b_logits[n - 1] = 1
        self._batch.n_tokens = n
        return n_rows

    def _rows(self, n: int) -> Rows:
        if n == 0:
            return self._rows_view[:0]
        pointer = ll.llama_get_logits(self._ctx)
        address = ctypes.addressof(pointer.contents)
        if address != self._rows_at:
            self._rows_view = np.ctypeslib.as_array(pointer, (self._max_rows, self._n_vocab))
            self._rows_at = address
        return self._rows_view[:n]

    def keep_path(self, path: Sequence[int]) -> None:
        raise EngineError("this context was not created for tree passes")

    # -- rollback --

    def rollback(self, keep_len: int) -> None:
        self._require_open()
        n = len(self._tokens)
        if not 0 <= keep_len <= n:
            raise ValueError(f"cannot roll back to {keep_len} of {n} tokens")
        if keep_len == n:
            return
        with self._lock:
            self._cut(keep_len)

    def _cut(self, keep_len: int, *, replay: bool = True) -> None:
        """Make the cache hold exactly ``tokens[:keep_len]``, whatever it holds now.

        Without ``replay`` it holds the beginning of them that costs nothing.
        """
        self._capture.hidden.cut(keep_len)
        if keep_len == 0:
            self._clear()
            return
        if self.model.can_roll_back:
            if not ll.llama_memory_seq_rm(self._memory, SEQ, keep_len, -1):
                self._clear()
                raise EngineError("llama.cpp refused to roll the KV cache back; it was cleared")
            self._tokens.cut(keep_len)
            return
        kept = self._tokens[:keep_len]
        start = self._restore_checkpoint(keep_len)
        if start is None:
            self._clear()
            start = 0
        del self._tokens[start:]
        if replay:
            self._replay(kept[start:])

    def _clear(self) -> None:
        """Forget every token, and the checkpoint with them: another text may follow."""
        ll.llama_memory_clear(self._memory, False)
        self._tokens.clear()
        self._checkpoint = None

    def _replay(self, tokens: list[int]) -> None:
        """Re-evaluate committed tokens; they are facts and are not judged again."""
        for i in range(0, len(tokens), self._n_batch):
            part = tokens[i : i + self._n_batch]
            past = len(self._tokens)
            n = len(part)
            self._b_token[:n] = part
            self._b_pos[:n] = np.arange(past, past + n, dtype=np.int32)
            self._b_logits[:n] = 0
            self._batch.n_tokens = n
            status = _ABORTED if self._stop.is_set() else self._decode(reading=True)
            if status != 0:
                self._clear()
                self._capture.hidden.clear()
                raise decode_error(status, self._n_ctx)
            self._tokens.extend(part)

    def _save_checkpoint(self) -> None:
        size = int(ll.llama_state_seq_get_size_ext(self._ctx, SEQ, _PARTIAL))
        buffer = (ctypes.c_uint8 * max(size, 1))()
        written = int(ll.llama_state_seq_get_data_ext(self._ctx, buffer, size, SEQ, _PARTIAL))
        self._checkpoint = (len(self._tokens), buffer, written) if written else None

    def _restore_checkpoint(self, keep_len: int) -> int | None:
        """Back to the checkpoint if it is not past ``keep_len``; its length, or None."""
        if self._checkpoint is None:
            return None
        at, buffer, size = self._checkpoint
        if at > keep_len or at == 0:
            return None
        if not ll.llama_state_seq_set_data_ext(self._ctx, buffer, size, SEQ, _PARTIAL):
            return None
        if not ll.llama_memory_seq_rm(self._memory, SEQ, at, -1):
            return None
        return at if self.n_past == at else None

    def close(self) -> None:
        if getattr(self, "_batch", None) is not None:
            with self._lock:
                ll.llama_batch_free(self._batch)
                self._batch = None
        if self._ctx:
            ll.llama_free(self._ctx)
            self._ctx = None


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
    """Before a pass: not every device stops within one.

    Raises:
        Cancelled: the engine is to stop.
    """
    if stop.is_set():
        raise decode_error(_ABORTED, 0)


def stop_on(stop: StopFlag, params: Any) -> None:
    """Let the passes of a context to be made end when ``stop`` is set (on CPUs, within a pass).

    The flag must outlive the context.
    """
    if (reader := _native_flag_reader()) is not None:
        params.abort_callback = reader
        params.abort_callback_data = stop.address


@cache
def _native_flag_reader() -> Any:
    """A C function ``bool f(void *flag)`` for llama.cpp's abort callback, without the GIL.

    It is called for every graph node, too often for a Python callback. libc's strlen is that
    function: 0 for an empty string, 1 for one of one character.
    """
    try:
        libc = ctypes.CDLL(None) if os.name == "posix" else ctypes.CDLL("msvcrt")
        return ctypes.cast(libc.strlen, ll.ggml_abort_callback)
    except (OSError, AttributeError):
        return None

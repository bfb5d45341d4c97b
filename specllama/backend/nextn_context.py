"""The NextN block of a target, run by llama.cpp in a second context on the same model.

    pair at position p:   token p, and the target's state behind token p - 1
    what comes out:       logits of token p + 1, and a state that stands in for the target's own

Positions are those of the text. The cache holds the NextN block's keys and values only, so that it
costs one layer, and rolls back like any attention cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import llama_cpp as ll
import numpy as np
import numpy.typing as npt

from specllama.arrays import IntArray, Row, Rows
from specllama.backend.llama_cache import decode_error, require_running
from specllama.backend.llama_log import last_words, recent
from specllama.backend.symbols import function, rows
from specllama.errors import CannotLoad, ContextFull, EngineError

if TYPE_CHECKING:
    from specllama.backend.llama import LlamaModel
    from specllama.backend.llama_pool import LlamaPool
    from specllama.backend.loaded_target import LoadedTarget

_SEQ = 0


class LlamaNextn:
    """The second context. Not for two threads at once.

    Args:
        model: loaded with its NextN blocks; ``nextn.why_not`` has nothing against it, or
            llama.cpp ends the process.
        target: settings are taken over from this pool, which must outlive this one.
        n_ctx: most pairs.

    Raises:
        CannotLoad: no memory, or functions that this libllama lacks.
    """

    def __init__(self, model: LlamaModel, target: LlamaPool, *, n_ctx: int) -> None:
        for name in ("llama_set_embeddings_nextn", "llama_get_embeddings_nextn"):
            function(name)
        self._stop = model.stop
        self._width = int(ll.llama_model_n_embd_out(model.handle))
        params = target.settings()
        params.ctx_type = ll.LLAMA_CONTEXT_TYPE_MTP
        params.n_ctx = n_ctx
        params.n_seq_max = 1
        params.kv_unified = False
        params.n_outputs_max = 1
        recent.clear()
        self._ctx: Any = ll.llama_init_from_model(model.handle, params)
        if not self._ctx:
            raise CannotLoad(
                f"cannot create a context for the NextN layer of {model.path.name}: "
                + (last_words() or "llama.cpp gave no reason"),
                "try a smaller --ctx-size",
            )
        # every row: with outputs only, llama.cpp would return the first row for the last
        function("llama_set_embeddings_nextn")(self._ctx, True, False)
        self._memory = ll.llama_get_memory(self._ctx)
        self._n_ctx = min(int(ll.llama_n_ctx_seq(self._ctx)), n_ctx)
        self._n_batch = int(ll.llama_n_batch(self._ctx))
        self._n_vocab = model.vocab.n_tokens
        self._first = self._end = 0
        as_array = np.ctypeslib.as_array
        self._batch = ll.llama_batch_init(self._n_batch, self._width, 1)
        self._b_states: Rows = as_array(self._batch.embd, (self._n_batch, self._width))
        self._b_pos: IntArray = as_array(self._batch.pos, (self._n_batch,))
        self._b_output: npt.NDArray[np.int8] = as_array(self._batch.logits, (self._n_batch,))
        # a batch is allocated for tokens or for states; this one carries both
        self._b_token: IntArray = np.zeros(self._n_batch, np.int32)
        self._batch.token = self._b_token.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        as_array(self._batch.n_seq_id, (self._n_batch,))[:] = 1
        for i in range(self._n_batch):
            self._batch.seq_id[i][0] = _SEQ

    # -- facts --

    @property
    def n_ctx(self) -> int:
        return self._n_ctx

    @property
    def n_batch(self) -> int:
        return self._n_batch

    @property
    def width(self) -> int:
        return self._width

    @property
    def first(self) -> int:
        return self._first

    @property
    def end(self) -> int:
        return self._end

    @property
    def n_past(self) -> int:
        """One past the last position, as the cache itself reports it; 0 when it is empty."""
        return int(ll.llama_memory_seq_pos_max(self._memory, _SEQ)) + 1

    # -- passes --

    def feed(self, tokens: Sequence[int], states: Rows) -> tuple[Row, Row]:
        n = len(tokens)
        if self._ctx is None:
            raise EngineError("the context is closed")
        require_running(self._stop)
        if not 0 < n <= self._n_batch or states.shape != (n, self._width):
            raise ValueError(f"{n} tokens with states of shape {states.shape}")
        if self._end - self._first + n > self._n_ctx:
            raise ContextFull("the cache of the NextN layer is full")
        ids = np.asarray(tokens, np.int64)
        if int(ids.min()) < 0 or int(ids.max()) >= self._n_vocab:
            raise EngineError(f"a token is outside the vocabulary of {self._n_vocab}")
        self._b_token[:n] = ids
        self._b_states[:n] = states
        self._b_pos[:n] = np.arange(self._end, self._end + n, dtype=np.int32)
        self._b_output[:n] = 0
        self._b_output[n - 1] = 1
        self._batch.n_tokens = n
        status = ll.llama_decode(self._ctx, self._batch)
        if status != 0:
            self._cut(self._end)
            raise decode_error(status, self._n_ctx)
        self._end += n
        logits = np.ctypeslib.as_array(ll.llama_get_logits(self._ctx), (self._n_vocab,))
        after: Rows = rows(function("llama_get_embeddings_nextn")(self._ctx), n, self._width)
        return logits, after[n - 1].copy()

    def rollback_to(self, end: int) -> None:
        if not self._first <= end <= self._end:
            raise ValueError(f"cannot roll back to {end} of {self._first} to {self._end}")
        if end < self._end:
            self._cut(end)

    def begin_at(self, position: int) -> None:
        ll.llama_memory_clear(self._memory, False)
        self._first = self._end = position

    def _cut(self, end: int) -> None:
        if end == self._first:
            self.begin_at(end)
        elif ll.llama_memory_seq_rm(self._memory, _SEQ, end, -1):
            self._end = end
        else:
            self.begin_at(0)
            raise EngineError("llama.cpp refused to roll the NextN cache back; it was cleared")

    def close(self) -> None:
        if self._ctx is not None:
            self._batch.token = None  # numpy's, not llama.cpp's to free
            ll.llama_batch_free(self._batch)
            ll.llama_free(self._ctx)
            self._ctx = None


def open_nextn(target: LoadedTarget) -> LlamaNextn:
    """The NextN layer of a loaded target.

    Raises:
        CannotLoad: see ``LlamaNextn``.
    """
    context = LlamaNextn(target.model, target.pool, n_ctx=target.lane.n_ctx)
    target.on_close.callback(context.close)
    return context

"""The law of a model without some of its layers, from the whole model.

A layer adds to the residual stream. Replacing the output of the last layer of a run by the input of
its first drops the run, so any choice of layers can be tried in one pass of the loaded target:
nothing is cut out, written or loaded. llama.cpp's evaluation callback, meant for looking at
tensors, does it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp as ll
import numpy as np

from specllama.arrays import IntArray
from specllama.backend.llama_cache import decode_error
from specllama.backend.llama_log import last_words, recent
from specllama.backend.llama_pool import LlamaPool
from specllama.backend.symbols import ggml
from specllama.errors import CannotLoad, ContextFull, EngineError
from specllama.models.pruned import runs

_BATCH = 64  # tokens a pass: as many rows of logits are kept
_INPUTS = ("embd", "inp_scaled")  # what enters layer 0; the last one that a graph has counts
_P = ctypes.c_void_p

# name -> (argument types, result type)
_FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    "ggml_get_name": ([_P], ctypes.c_char_p),
    "ggml_nbytes": ([_P], ctypes.c_size_t),
    "ggml_backend_tensor_get": ([_P, _P, ctypes.c_size_t, ctypes.c_size_t], None),
    "ggml_backend_tensor_set": ([_P, _P, ctypes.c_size_t, ctypes.c_size_t], None),
}


class SkippingContext:
    """A cache of its own of a loaded model, any of whose layers can be left out of a text.

    Args:
        target: a pool of the model, whose settings are taken over; it must outlive this.
        n_ctx: tokens of the longest text.

    Raises:
        CannotLoad: no memory for the cache, or this build cannot do it.
    """

    def __init__(self, target: LlamaPool, *, n_ctx: int) -> None:
        self._g = {name: ggml(name, "ggml-base", *types) for name, types in _FUNCTIONS.items()}
        self._n_vocab = target.n_vocab
        params = target.settings()
        params.n_ctx = -(-n_ctx // 256) * 256
        params.n_batch = params.n_ubatch = params.n_outputs_max = _BATCH
        params.n_seq_max, params.kv_unified = 1, False
        self._watcher = ll.ggml_backend_sched_eval_callback(self._watch)
        params.cb_eval = self._watcher
        self._sources: frozenset[str] = frozenset()
        self._sinks: frozenset[str] = frozenset()
        self._entering = b""
        self._replaced = 0
        self._error: BaseException | None = None
        recent.clear()
        self._ctx = ll.llama_init_from_model(target.model.handle, params)
        if not self._ctx:
            reason = last_words() or "llama.cpp gave no reason"
            raise CannotLoad(f"cannot create a context for {target.model.path.name}: {reason}")
        target.model.loras.wear(self._ctx)
        self._n_ctx = int(ll.llama_n_ctx_seq(self._ctx))
        self._memory = ll.llama_get_memory(self._ctx)
        self._batch = ll.llama_batch_init(_BATCH, 0, 1)

    def choices(self, prompt: Sequence[int], reply: Sequence[int], drop: Sequence[int]) -> IntArray:
        """The likeliest token before each token of ``reply``, without the layers ``drop``.

        Args:
            prompt: at least one token.

        Raises:
            ContextFull: the text is longer than the cache.
            EngineError: llama.cpp refused, or this model's layers cannot be left out.
        """
        if not self._ctx:
            raise EngineError("the context is closed")
        text = [*prompt, *reply[:-1]]
        if not prompt or not reply or min(text) < 0 or max(text) >= self._n_vocab:
            raise EngineError("a text needs a prompt, a reply and tokens of the vocabulary")
        if len(text) > self._n_ctx:
            raise ContextFull(f"{len(text)} tokens do not fit a context of {self._n_ctx}")
        ends = runs(drop)
        self._sources = frozenset(
            name for a, _ in ends for name in ((f"l_out-{a - 1}",) if a else _INPUTS)
        )
        self._sinks = frozenset(f"l_out-{b}" for _, b in ends)
        ll.llama_memory_clear(self._memory, False)
        read = len(prompt) - 1
        for at in range(0, read, _BATCH):
            self._decode(text, at, min(at + _BATCH, read), rows=False)
        found = np.empty(len(reply), np.int32)
        for at in range(read, len(text), _BATCH):
            end = min(at + _BATCH, len(text))
            self._decode(text, at, end, rows=True)
            logits = np.ctypeslib.as_array(
                ll.llama_get_logits(self._ctx), (end - at, self._n_vocab)
            )
            found[at - read : end - read] = logits.argmax(axis=1)
        return found

    def _decode(self, text: Sequence[int], at: int, end: int, *, rows: bool) -> None:
        batch = self._batch
        for i, token in enumerate(text[at:end]):
            batch.token[i] = token
            batch.pos[i] = at + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = rows
        batch.n_tokens = end - at
        self._replaced, self._error, self._entering = 0, None, b""
        status = ll.llama_decode(self._ctx, batch)
        if self._error is not None:
            raise self._error
        if status != 0:
            raise decode_error(status, self._n_ctx)
        if self._replaced != len(self._sinks):
            raise EngineError("the layers of this architecture cannot be told apart in its passes")

    def _watch(self, tensor: int, ask: bool, _user: object) -> bool:
        try:
            name = self._g["ggml_get_name"](tensor).decode("utf-8", "replace")
            if ask:
                return name in self._sources or name in self._sinks
            # a layer between two runs ends one and enters no other: runs never touch
            if name in self._sinks:
                self._put_back(tensor)
            else:
                size = self._g["ggml_nbytes"](tensor)
                self._entering = bytes(size)
                self._g["ggml_backend_tensor_get"](tensor, self._entering, 0, size)
            return True
        except BaseException as error:  # ctypes would only print it and continue
            self._error = error
            return False

    def _put_back(self, tensor: int) -> None:
        size = self._g["ggml_nbytes"](tensor)
        if size and size != len(self._entering):  # the last layer has no rows where none is wanted
            raise EngineError("this architecture changes its rows between layers")
        if size:
            self._g["ggml_backend_tensor_set"](tensor, self._entering, 0, size)
        self._replaced += 1

    def close(self) -> None:
        if self._ctx:
            ll.llama_free(self._ctx)
            self._ctx = None
            ll.llama_batch_free(self._batch)

"""An EAGLE-3 head through llama.cpp, dressed as a draft model's context.

The head is one decoder layer. At position j it reads the token x[j+1] and a state g[j]:

    known text    g[j] is the fusion of three of the target's hidden states, which the pass that
                  evaluated x[j] gave away
    guessed text  g[j] is the head's own state after position j - 1 (what its training unrolled)

``forward`` takes tokens only and looks the states up, so the drafting code is that of any draft
model. Positions that were read with the head's own states are dropped as soon as the target's are
there: only accepted tokens are read again.

llama.cpp copies the first rows of a pass whatever their flags say (the graph selects none), so a
pass flags all of its rows or none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp as ll
import numpy as np
import numpy.typing as npt

from specllama.arrays import Row, Rows
from specllama.backend.base import Lane, Outputs
from specllama.backend.hidden import HiddenRows
from specllama.backend.llama import LlamaModel
from specllama.backend.llama_cache import decode_error, require_running, stop_on
from specllama.backend.llama_log import last_words, recent
from specllama.backend.llama_pool import LlamaPool
from specllama.backend.symbols import function
from specllama.backend.symbols import rows as view
from specllama.errors import CannotLoad, ContextFull, EngineError
from specllama.history import History, common_prefix
from specllama.models.eagle3_file import EagleFacts, check_target, read_facts
from specllama.models.gguf import read_header
from specllama.models.memory import HEAD_BATCH, estimate_head, require_fit

if TYPE_CHECKING:
    from specllama.backend.loaded_target import LoadedTarget

_SEQ = 0
_BATCH = HEAD_BATCH
_FLAGGED = 16  # a pass of up to as many rows gives all their logits, of which the last are used


def open_eagle3(path: Path, target: LoadedTarget) -> EagleContext:
    """A lane of the head of ``path``.

    Raises:
        PairIncompatible: no EAGLE-3 head, one of another target, or an architecture whose hidden
            states llama.cpp does not give away.
        BadGguf, UnsupportedModel, CannotLoad: damaged, or refused by llama.cpp.
        DoesNotFit: not enough memory is free beside the target.
    """
    header = read_header(path)
    facts = read_facts(header)
    check_target(facts, header, target.header)
    target.pool.offer_layers(facts.layers)
    if target.options.check_memory and target.model.gpu_layers == 0:
        require_fit(estimate_head(header, target.header, n_ctx=target.lane.n_ctx))
    model = LlamaModel(
        path,
        pre=header.pre_tokenizer or "",
        gpu_layers=str(target.model.gpu_layers),
        use_mmap=target.options.use_mmap,
        head=True,
        stop=target.model.stop,
    )
    target.on_close.callback(model.close)
    return EagleContext(model, target.pool, target.lane, facts, threads=target.threads)


class EagleContext:
    """One cache of a head, as a context of text tokens (see ``backend.base.Context``).

    Of the tokens in the cache the first has no cell of its own: cell i holds token i + 1.

    Args:
        model: the head. target: the lane whose hidden states it reads, in ``pool``.
    """

    pool = None  # its passes are its own
    max_rows = 1
    max_leaves = 1

    def __init__(
        self,
        model: LlamaModel,
        pool: LlamaPool,
        target: Lane,
        facts: EagleFacts,
        *,
        threads: int,
    ) -> None:
        self.base = 0
        self._target = target
        self._width = facts.width
        self._wide = len(facts.layers) * facts.target_width
        self._n_vocab = model.vocab.n_tokens
        self._tokens: list[int] = []
        self._true = 0  # tokens in the cache that were read with states of the target
        self._fused = HiddenRows()  # g by position in the target's text
        self._read = History()  # the text that the fused states belong to
        self._own: dict[tuple[int, ...], Row] = {}  # the head's states by guessed tokens
        params = ll.llama_context_default_params()
        params.n_ctx = -(-target.n_ctx // 256) * 256
        params.n_batch = params.n_ubatch = _BATCH
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        self._stop = pool.model.stop
        stop_on(self._stop, params)
        params.ctx_other = pool.handle  # whose matrices the head may borrow
        recent.clear()
        self._ctx = ll.llama_init_from_model(model.handle, params)
        if not self._ctx:
            reason = last_words() or "llama.cpp gave no reason"
            raise CannotLoad(f"cannot create a context for {model.path.name}: {reason}")
        self._n_ctx = min(int(ll.llama_n_ctx_seq(self._ctx)), target.n_ctx)
        self._memory = ll.llama_get_memory(self._ctx)
        function("llama_set_embeddings_nextn")(self._ctx, True, True)
        self._nextn = function("llama_get_embeddings_nextn")
        self._pairs = ll.llama_batch_init(_BATCH, self._width, 1)
        self._features = ll.llama_batch_init(_BATCH, self._wide, 1)
        # a batch is either of tokens or of vectors; the decoder takes both side by side
        self._ids = (ctypes.c_int32 * _BATCH)()
        self._pairs.token = ctypes.cast(self._ids, ctypes.POINTER(ctypes.c_int32))

    # -- facts --

    @property
    def n_ctx(self) -> int:
        return self._n_ctx

    @property
    def n_vocab(self) -> int:
        return self._n_vocab

    @property
    def n_batch(self) -> int:
        return _BATCH

    @property
    def tokens(self) -> list[int]:
        return self._tokens

    @property
    def n_past(self) -> int:
        self._require_open()
        cells = int(ll.llama_memory_seq_pos_max(self._memory, _SEQ)) + 1
        return cells + 1 if self._tokens else 0

    def _require_open(self) -> None:
        """llama.cpp would read freed memory."""
        if not self._ctx:
            raise EngineError("the context is closed")

    # -- the target's states --

    @property
    def first_known(self) -> int:
        """The first position of the target's text from which on its states are known."""
        return self._fused.first

    @property
    def known(self) -> int:
        """One past the last position of the target's text whose state is known."""
        return self._fused.end

    @property
    def settled(self) -> int:
        """Tokens of the cache that were read with states of the target."""
        return self._true

    def fuse(self) -> None:
        """Take what the target's passes gave away since the last call: a new round may begin."""
        self._own.clear()
        hidden, text = self._target.hidden, self._target.tokens
        same = common_prefix(self._read, text)
        self._fused.cut(min(same, hidden.first, self._fused.end))
        for at in range(hidden.first, hidden.end, _BATCH):
            end = min(at + _BATCH, hidden.end)
            features = hidden.rows(at, end)
            if features is not None:
                self._fused.add(at, self._encode(features))
        self._read.cut(min(same, self._fused.end))
        self._read += text[len(self._read) : self._fused.end]
        hidden.forget(hidden.end)

    def covers(self, tokens: Sequence[int]) -> int:
        """How many of the first of these tokens belong to the text that was fused."""
        return common_prefix(self._read, tokens)

    def _encode(self, features: Rows) -> Rows:
        """Fused states [n, width] of the target's states [n, 3 * target_width]."""
        self._require_open()
        n = len(features)
        batch = self._features
        self._floats(batch.embd, n, self._wide)[:] = features
        past = int(ll.llama_memory_seq_pos_max(self._memory, _SEQ)) + 1
        for i in range(n):
            batch.pos[i] = past + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = _SEQ
            batch.logits[i] = 1
        batch.n_tokens = n
        require_running(self._stop)
        status = ll.llama_encode(self._ctx, batch)
        if status != 0:
            raise decode_error(status, self._n_ctx)
        fused: Rows = view(self._nextn(self._ctx), n, self._width).copy()
        return fused

    # -- passes --

    def forward(
        self, tokens: Sequence[int], *, outputs: Outputs, parents: Sequence[int] | None = None
    ) -> Rows:
        """See ``Context.forward``; the first token of all gives no row."""
        self._require_open()
        if parents is not None or outputs == "all":
            raise EngineError("an EAGLE head reads chains and answers for the last token")
        n = len(tokens)
        if n == 0 or len(self._tokens) + n > self._n_ctx:
            raise ContextFull(f"the head's context of {self._n_ctx} tokens is full")
        if min(tokens) < 0 or max(tokens) >= self._n_vocab:
            raise EngineError(f"a token is outside the vocabulary of {self._n_vocab}")
        text = [*self._tokens, *(int(t) for t in tokens)]
        first = max(len(self._tokens), 1)
        if outputs == "last" and len(text) <= first:
            raise EngineError("the first token of a text gives no row")
        if not self._tokens:
            self._tokens, self._true = text[:1], 1
        row: Rows = np.empty((0, self._n_vocab), np.float32)
        while len(self._tokens) < len(text):
            at = len(self._tokens)
            left = len(text) - at
            # the last token goes with the few before it, or alone
            size = left if left <= _FLAGGED else min(left - 1, _BATCH)
            last = size == left and outputs == "last"
            row = self._decode(text, at, size, last)
            self._tokens = text[: at + size]
        return row

    def _decode(self, text: list[int], at: int, n: int, last: bool) -> Rows:
        """Read ``text[at : at + n]``; logits of the last one if asked for."""
        batch = self._pairs
        states = self._floats(batch.embd, n, self._width)
        for i in range(n):
            states[i] = self._state(text, at + i)
            self._ids[i] = text[at + i]
            batch.pos[i] = at + i - 1
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = _SEQ
            batch.logits[i] = last
        batch.n_tokens = n
        require_running(self._stop)
        status = ll.llama_decode(self._ctx, batch)
        if status != 0:
            self.rollback(len(self._tokens))
            raise decode_error(status, self._n_ctx)
        end = at + n
        true = self._fused.end - self.base + 1  # tokens that the target's states suffice for
        if self._true >= at:
            self._true = min(end, max(true, self._true))
        if not last:
            return np.empty((0, self._n_vocab), np.float32)
        if end >= true:
            own = view(self._nextn(self._ctx), n, self._width)[n - 1]
            self._own[tuple(text[true:end])] = own.copy()
        logits: Rows = view(ll.llama_get_logits(self._ctx), n, self._n_vocab)[n - 1 :]
        return logits

    def _state(self, text: list[int], i: int) -> Row:
        """The state beside token ``i`` of the cache's text: the target's, else the head's."""
        position = self.base + i - 1
        if position < self._fused.end:
            found = self._fused.rows(position, position + 1)
            if found is not None:
                row: Row = found[0]
                return row
        else:
            own = self._own.get(tuple(text[self._fused.end - self.base + 1 : i]))
            if own is not None:
                return own
        raise EngineError("the head was not given the state of a token before")

    @staticmethod
    def _floats(pointer: Any, n: int, width: int) -> npt.NDArray[np.float32]:
        return np.ctypeslib.as_array(pointer, (n * width,)).reshape(n, width)

    # -- rollback --

    def keep_path(self, path: Sequence[int]) -> None:
        raise EngineError("an EAGLE head reads chains")

    def rollback(self, keep_len: int) -> None:
        self._require_open()
        if not 0 <= keep_len <= len(self._tokens):
            raise ValueError(f"cannot roll back to {keep_len} of {len(self._tokens)} tokens")
        if keep_len <= 1:
            ll.llama_memory_clear(self._memory, False)
        elif not ll.llama_memory_seq_rm(self._memory, _SEQ, keep_len - 1, -1):
            ll.llama_memory_clear(self._memory, False)
            keep_len = 0
        self._tokens = self._tokens[:keep_len]
        self._true = min(self._true, keep_len)

    def close(self) -> None:
        if self._ctx:
            ll.llama_free(self._ctx)
            self._ctx = None
            self._pairs.token = None  # ours, not llama.cpp's to free
            ll.llama_batch_free(self._pairs)
            ll.llama_batch_free(self._features)

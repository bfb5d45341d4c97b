"""An EAGLE-3 head through llama.cpp: one decoder layer beside states, and an encoder of its own.

The encoder fuses three hidden states of the target's pass over token p to the state g[p]. The
decoder's pair at position p is token p with g[p - 1]; behind guessed tokens the head's own state
stands in for g (what its training unrolled).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import llama_cpp as ll

from specllama.arrays import Rows
from specllama.backend.llama import LlamaModel
from specllama.backend.llama_cache import decode_error, require_running, stop_on
from specllama.backend.llama_pool import LlamaPool
from specllama.backend.state_lanes import LlamaStates, StateBatch, StateContext
from specllama.backend.symbols import rows as view
from specllama.errors import EngineError
from specllama.models.eagle3_file import EagleFacts, check_target, read_facts
from specllama.models.memory import HEAD_BATCH, estimate_head, require_fit

if TYPE_CHECKING:
    from specllama.backend.loaded_target import LoadedTarget
    from specllama.models.gguf import GgufHeader


class EagleContext(StateContext):
    """The head's context.

    Args:
        model: the head. pool: the target's, whose matrices the head may borrow.
    """

    def __init__(
        self, model: LlamaModel, pool: LlamaPool, facts: EagleFacts, *, threads: int, lanes: int = 1
    ) -> None:
        params = ll.llama_context_default_params()
        params.n_ctx = pool.n_ctx
        params.n_batch = params.n_ubatch = HEAD_BATCH
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        stop_on(pool.model.stop, params)
        params.ctx_other = pool.handle
        super().__init__(model, params, width=facts.width, lanes=lanes, flags="all or none")
        self._features = StateBatch(HEAD_BATCH, len(facts.layers) * facts.target_width)

    def open(self) -> EagleStates:
        return EagleStates(self, self.take())

    def encode(self, sequence: int, past: int, features: Rows) -> Rows:
        """See ``asking.Encoder``."""
        if not self.handle:
            raise EngineError("the context is closed")
        n = len(features)
        batch = self._features.fill(sequence, past, features, "all")
        require_running(self.stop)
        status = ll.llama_encode(self.handle, batch)
        if status != 0:
            raise decode_error(status, self.n_ctx)
        fused: Rows = view(self._nextn(self.handle), n, self.width)
        return fused.copy()

    def close(self) -> None:
        if self.handle:
            self._features.close()
        super().close()


class EagleStates(LlamaStates):
    """A lane of the head."""

    def __init__(self, context: EagleContext, sequence: int) -> None:
        super().__init__(context, sequence)
        self._encoder = context

    def encode(self, features: Rows) -> Rows:
        return self._encoder.encode(self._sequence, self.n_past, features)


def open_eagle3(header: GgufHeader, target: LoadedTarget) -> EagleContext:
    """The head of a file.

    Raises:
        PairIncompatible: no EAGLE-3 head, one of another target, or an architecture whose hidden
            states llama.cpp does not give away.
        BadGguf, UnsupportedModel, CannotLoad: damaged, or refused by llama.cpp.
        DoesNotFit: not enough memory is free beside the target.
    """
    facts = read_facts(header)
    check_target(facts, header, target.header)
    target.pool.offer_layers(facts.layers)
    if target.options.check_memory and target.model.gpu_layers == 0:
        n_ctx = target.pool.n_ctx * target.options.parallel
        require_fit(estimate_head(header, target.header, n_ctx=n_ctx))
    model = LlamaModel(
        header.path,
        pre=header.pre_tokenizer or "",
        gpu_layers=str(target.model.gpu_layers),
        use_mmap=target.options.use_mmap,
        head=True,
        stop=target.model.stop,
    )
    target.on_close.callback(model.close)
    context = EagleContext(
        model, target.pool, facts, threads=target.threads, lanes=target.options.parallel
    )
    target.on_close.callback(context.close)
    return context

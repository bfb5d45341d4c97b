"""An EAGLE-3 head through llama.cpp: one decoder layer beside states, and an encoder of its own.

The encoder fuses three hidden states of the target's pass over token p to the state g[p]. The
decoder's pair at position p is token p with g[p - 1]; behind guessed tokens the head's own state
stands in for g (what its training unrolled).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import llama_cpp as ll

from specllama.arrays import Rows
from specllama.backend.head_model import head_params, load_head
from specllama.backend.llama import LlamaModel
from specllama.backend.llama_cache import decode_error, require_running
from specllama.backend.llama_pool import LlamaPool
from specllama.backend.state_lanes import LlamaStates, StateBatch, StateContext
from specllama.backend.symbols import rows as view
from specllama.errors import EngineError
from specllama.models.eagle3_file import read_facts
from specllama.models.layer_inputs import HeadFacts, check_target
from specllama.models.memory import HEAD_BATCH

if TYPE_CHECKING:
    from specllama.backend.loaded_target import LoadedTarget
    from specllama.models.gguf import GgufHeader


class EagleContext(StateContext):
    """The head's context.

    Args:
        model: the head. pool: the target's, whose matrices the head may borrow.
    """

    def __init__(
        self, model: LlamaModel, pool: LlamaPool, facts: HeadFacts, *, threads: int, lanes: int = 1
    ) -> None:
        params = head_params(pool, threads)
        super().__init__(
            model,
            params,
            width=facts.width,
            lanes=lanes,
            outputs_only=True,
            flags="all or none",
            leaves=pool.max_leaves,
        )
        self.layers = facts.layers
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
        self._encoder, self.layers = context, context.layers

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
    target.pool.require_layers(facts.layers)
    model = load_head(header, target)
    context = EagleContext(
        model, target.pool, facts, threads=target.threads, lanes=target.options.parallel
    )
    target.on_close.callback(context.close)
    return context

"""An EAGLE-3 head through llama.cpp: an encoder, and one decoder layer that also reads states.

The encoder fuses three hidden states of the target's pass over token p to the state g[p]. The
decoder's pair at position p is token p with g[p - 1]; behind guessed tokens the head's own state
stands in for g (what its training unrolled).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specllama.backend.heads.head_pool import HeadGraph, HeadPool, head_params, load_head

if TYPE_CHECKING:
    from specllama.backend.llama import LlamaModel
    from specllama.backend.llama_pool import LlamaPool, LoadedModel
    from specllama.models.gguf import GgufHeader
    from specllama.models.layer_inputs import HeadFacts


def eagle_pool(
    model: LlamaModel, target: LlamaPool, facts: HeadFacts, *, threads: int, lanes: int = 1
) -> HeadPool:
    """Open the head's pool.

    Args:
        model: the head. target: whose matrices it may borrow.
    """
    graph = HeadGraph(
        reads=facts.width,
        gives=facts.width,
        masked=True,
        selects=False,
        features=len(facts.layers) * facts.target_width,
        layers=facts.layers,
    )
    params = head_params(target, threads)
    return HeadPool(model, params, graph, lanes=lanes, leaves=target.max_leaves)


def open_eagle3(header: GgufHeader, target: LoadedModel, facts: HeadFacts) -> HeadPool:
    """Open the head of a file.

    Raises:
        PairIncompatible: an architecture whose hidden states llama.cpp does not give away.
        CannotLoad: damaged, or refused by llama.cpp.
        DoesNotFit: not enough memory is free beside the target.
    """
    target.pool.require_layers(facts.layers)
    model = load_head(header, target)
    lanes = target.options.parallel
    return eagle_pool(model, target.pool, facts, threads=target.threads, lanes=lanes)

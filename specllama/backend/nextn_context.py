"""The NextN blocks of a target, in a second context on the same model.

The context holds their keys and values only, and rolls back like any attention cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import llama_cpp as ll

from specllama.backend.head_model import load_head
from specllama.backend.state_lanes import StateContext
from specllama.models.nextn import GRAPHS, nextn_blocks
from specllama.models.nextn_file import check_target

if TYPE_CHECKING:
    from specllama.backend.llama import LlamaModel
    from specllama.backend.llama_pool import LlamaPool
    from specllama.backend.loaded_target import LoadedTarget
    from specllama.models.gguf import GgufHeader


def nextn_context(
    header: GgufHeader, model: LlamaModel, target: LlamaPool, *, n_ctx: int, lanes: int
) -> StateContext:
    """The blocks' context.

    Args:
        header: of the file with the blocks; ``nextn.why_not`` has nothing against it, or llama.cpp
            ends the process.
        model: what was loaded of it, NextN blocks included.
        target: settings are taken over from this pool, which must outlive the context.

    Raises:
        CannotLoad: no memory, or functions that this libllama lacks.
    """
    params = target.settings()
    params.ctx_type = ll.LLAMA_CONTEXT_TYPE_MTP
    params.n_ctx = n_ctx
    heads, leaves = nextn_blocks(header), target.max_leaves
    # llama.cpp makes room for one of each sequence; of several heads each reads all above
    params.n_outputs_max = max(lanes + leaves - 1, leaves * heads)
    params.swa_full = True  # so that any depth of rollback is possible
    width = int(ll.llama_model_n_embd_out(model.handle))
    return StateContext(
        model,
        params,
        width=width,
        lanes=lanes,
        flags="last",
        outputs_only=GRAPHS[header.architecture].outputs_only,
        heads=heads,
        leaves=leaves,
    )


def open_nextn(header: GgufHeader, target: LoadedTarget) -> StateContext:
    """The NextN layers of a file: of the target's own, or of one that belongs to it.

    Raises:
        PairIncompatible: one of another target.
        BadGguf, UnsupportedModel, CannotLoad: damaged, or refused by llama.cpp.
        DoesNotFit: not enough memory is free beside the target.
    """
    model = target.model
    if header is not target.header:
        check_target(header, target.header)
        model = load_head(header, target)
    context = nextn_context(
        header, model, target.pool, n_ctx=target.pool.n_ctx, lanes=target.options.parallel
    )
    target.on_close.callback(context.close)
    return context

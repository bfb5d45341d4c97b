"""The NextN blocks of a target: a second context on the same model, which holds their keys and
values only and rolls back like any attention cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import llama_cpp as ll

from specllama.backend.state_lanes import StateContext
from specllama.models.nextn import GRAPHS, nextn_blocks

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
        header: of the model; ``nextn.why_not`` has nothing against it, or llama.cpp ends the
            process.
        model: loaded with its NextN blocks.
        target: settings are taken over from this pool, which must outlive the context.

    Raises:
        CannotLoad: no memory, or functions that this libllama lacks.
    """
    params = target.settings()
    params.ctx_type = ll.LLAMA_CONTEXT_TYPE_MTP
    params.n_ctx = n_ctx
    params.n_outputs_max = lanes  # llama.cpp makes room for one of each
    params.n_rs_seq = 0
    params.swa_full = True  # so that any depth of rollback is possible
    width = int(ll.llama_model_n_embd_out(model.handle))
    return StateContext(
        model,
        params,
        width=width,
        lanes=lanes,
        flags="last",
        outputs_only=GRAPHS[header.architecture].outputs_only,
        heads=nextn_blocks(header),
    )


def open_nextn(target: LoadedTarget) -> StateContext:
    """The NextN layers of a loaded target.

    Raises:
        CannotLoad: see ``nextn_context``.
    """
    context = nextn_context(
        target.header,
        target.model,
        target.pool,
        n_ctx=target.pool.n_ctx,
        lanes=target.options.parallel,
    )
    target.on_close.callback(context.close)
    return context

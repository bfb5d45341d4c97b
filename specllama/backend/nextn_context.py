"""The NextN block of a target: a second context on the same model, which holds one layer's keys
and values only and rolls back like any attention cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import llama_cpp as ll

from specllama.backend.state_lanes import StateContext

if TYPE_CHECKING:
    from specllama.backend.llama import LlamaModel
    from specllama.backend.llama_pool import LlamaPool
    from specllama.backend.loaded_target import LoadedTarget


def nextn_context(model: LlamaModel, target: LlamaPool, *, n_ctx: int, lanes: int) -> StateContext:
    """The block's context.

    Args:
        model: loaded with its NextN blocks; ``nextn.why_not`` has nothing against it, or
            llama.cpp ends the process.
        target: settings are taken over from this pool, which must outlive the context.

    Raises:
        CannotLoad: no memory, or functions that this libllama lacks.
    """
    params = target.settings()
    params.ctx_type = ll.LLAMA_CONTEXT_TYPE_MTP
    params.n_ctx = n_ctx
    params.n_outputs_max = 1
    width = int(ll.llama_model_n_embd_out(model.handle))
    return StateContext(model, params, width=width, lanes=lanes, flags="last")


def open_nextn(target: LoadedTarget) -> StateContext:
    """The NextN layer of a loaded target.

    Raises:
        CannotLoad: see ``nextn_context``.
    """
    context = nextn_context(
        target.model, target.pool, n_ctx=target.pool.n_ctx, lanes=target.options.parallel
    )
    target.on_close.callback(context.close)
    return context

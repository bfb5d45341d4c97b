"""Heads with a file of their own, which llama.cpp loads in addition to the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import llama_cpp as ll

from specllama.backend.llama import LlamaModel
from specllama.backend.llama_cache import stop_on
from specllama.models.memory import HEAD_BATCH, estimate_head, require_fit

if TYPE_CHECKING:
    from specllama.backend.llama_pool import LlamaPool
    from specllama.backend.loaded_target import LoadedTarget
    from specllama.models.gguf import GgufHeader


def load_head(header: GgufHeader, target: LoadedTarget) -> LlamaModel:
    """Load the model of a head that belongs to the target.

    Raises:
        BadGguf, UnsupportedModel, CannotLoad: damaged, or refused by llama.cpp.
        DoesNotFit: not enough memory is free alongside the target.
    """
    if target.options.check_memory and target.model.gpu_layers == 0:
        n_ctx = target.pool.n_ctx * target.options.parallel
        require_fit(estimate_head(header, target.header, n_ctx=n_ctx))
    model = LlamaModel(
        header.path,
        pre=header.pre_tokenizer or "",
        gpu_layers=str(target.model.gpu_layers),
        devices=target.model.devices,
        use_mmap=target.options.use_mmap,
        load_mtp=True,
        head=True,
        stop=target.model.stop,
    )
    target.on_close.callback(model.close)
    return model


def head_params(pool: LlamaPool, threads: int) -> Any:
    """Return llama.cpp's parameters for a head, which may borrow the target's matrices."""
    params = ll.llama_context_default_params()
    params.n_ctx = pool.n_ctx
    params.n_batch = params.n_ubatch = HEAD_BATCH
    params.n_threads = params.n_threads_batch = threads
    params.no_perf = True
    stop_on(pool.model.stop, params)
    params.ctx_other = pool.handle
    return params

"""By what a state on disk is known to be of what is loaded: files, build, machine, settings."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from specllama.engine.probing import kernel_key
from specllama.settings.hardware import Adapter

if TYPE_CHECKING:
    from specllama.backend.llama import LlamaModel
    from specllama.backend.llama_pool import LlamaPool
    from specllama.models.gguf import GgufHeader
    from specllama.settings.params import EngineOptions

VERSION = 1  # of what is written, and of how llama.cpp's own bytes are taken over


def state_key(
    header: GgufHeader, model: LlamaModel, pool: LlamaPool, options: EngineOptions
) -> str:
    """The name of everything that decides what a pool's cells hold, and how they are written."""
    n_ctx = header.metadata.get(header.own("rope.scaling.original_context_length"))
    key = {
        **kernel_key(header, model, pool, options),
        "version": VERSION,
        "swa": options.swa_full,
        "forgets": pool.forgets,
        "adapters": [_changed(text) for text in options.loras],
        # some models turn positions otherwise in a context that is longer
        "long": isinstance(n_ctx, int) and pool.n_ctx > n_ctx,
    }
    return hashlib.sha256(msgspec.json.encode(key, order="sorted")).hexdigest()[:16]


def _changed(adapter: str) -> list[int]:
    """Size and time of an adapter's file."""
    stat = Path(Adapter.read(adapter).path).expanduser().stat()
    return [stat.st_size, stat.st_mtime_ns]

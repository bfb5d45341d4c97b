"""A loaded target, as seen by whatever drafts for that target alone."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specllama.backend.llama import LlamaModel
    from specllama.backend.llama_pool import LlamaPool
    from specllama.models.gguf import GgufHeader
    from specllama.settings.params import EngineOptions


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """The target's parts that a head, or a draft cut out of the target, is opened with.

    ``on_close`` frees what an opener loads, before the target goes; last registered, first freed.
    """

    header: GgufHeader
    model: LlamaModel
    pool: LlamaPool
    options: EngineOptions
    threads: int
    on_close: ExitStack

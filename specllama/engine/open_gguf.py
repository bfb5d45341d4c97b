"""Opens a pair of GGUF files: headers first, because importing llama.cpp takes a while."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from specllama.backend.base import OpenedPair
from specllama.cancel import StopFlag
from specllama.engine.gguf_pair import read_pair
from specllama.events import Event
from specllama.settings.params import EngineOptions


def open_pair(
    target: Path,
    draft: Path | None,
    options: EngineOptions,
    on_progress: Callable[[Event], None] | None,
    stop: StopFlag,
) -> OpenedPair:
    """See ``base.Opener``."""
    pair = read_pair(target, draft, options)
    from specllama.engine.gguf_models import open_models

    return open_models(pair, on_progress, stop)

"""The opener of a pair of GGUF files: headers first, because importing llama.cpp takes a while."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from specllama.backend import trial
from specllama.backend.base import OpenedPair
from specllama.cancel import StopFlag
from specllama.engine.gguf_pair import read_pair
from specllama.events import Event, Notice
from specllama.settings.params import EngineOptions

logger = logging.getLogger("specllama.engine.open_gguf")


def open_pair(
    target: Path,
    draft: Path | None,
    options: EngineOptions,
    on_progress: Callable[[Event], None] | None,
    stop: StopFlag,
) -> OpenedPair:
    """See ``base.Opener``."""
    pair = read_pair(target, draft, options)
    for said in trial.untold():
        if on_progress is None:
            logger.warning("%s", said)
        else:
            on_progress(Notice(said, "warning", "trial"))
    from specllama.engine.gguf_models import open_models

    return open_models(pair, on_progress, stop)

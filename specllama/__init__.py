"""specllama: quantized GGUF models on your own machine, with speculative decoding you can watch.

    from specllama import Engine, GenerateParams, Message

    with Engine.load("tiny") as engine:
        question = [Message("user", "What is a draft model?")]
        *_, done = engine.generate(question, GenerateParams(seed=7, max_tokens=60))
        print(done.text)

Names below load lazily, so that importing specllama (and ``specllama --help``) stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from specllama.cancel import Cancel as Cancel
    from specllama.engine.engine import Engine as Engine
    from specllama.errors import SpecllamaError as SpecllamaError
    from specllama.interface import Message as Message
    from specllama.session import Session as Session
    from specllama.settings.params import EngineOptions as EngineOptions
    from specllama.settings.params import GenerateParams as GenerateParams
    from specllama.settings.params import SamplingParams as SamplingParams
    from specllama.store.sessions import SessionStore as SessionStore

_EXPORTS = {
    "Cancel": "specllama.cancel",
    "Engine": "specllama.engine.engine",
    "EngineOptions": "specllama.settings.params",
    "GenerateParams": "specllama.settings.params",
    "Message": "specllama.interface",
    "SamplingParams": "specllama.settings.params",
    "Session": "specllama.session",
    "SessionStore": "specllama.store.sessions",
    "SpecllamaError": "specllama.errors",
}
__all__ = ["__version__", *_EXPORTS]


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'specllama' has no attribute {name!r}")

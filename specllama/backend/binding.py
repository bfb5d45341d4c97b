"""The binding's package without its Llama class, which takes longer to import than all of ours."""

from __future__ import annotations

import re
import sys
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """The package, of which the low-level API is there; whoever asks for more gets all of it."""

    def __getattr__(self, name: str) -> Any:
        package: Any = self
        package.__class__ = ModuleType
        package.__spec__.loader.exec_module(package)
        return getattr(package, name)


def lighten() -> None:
    """Have ``import llama_cpp`` import the low-level API alone.

    Raises:
        ImportError: llama-cpp-python is not installed.
        RuntimeError: its library cannot be loaded.
    """
    spec = util.find_spec("llama_cpp") if "llama_cpp" not in sys.modules else None
    if spec is None or spec.origin is None:
        return
    package = sys.modules["llama_cpp"] = util.module_from_spec(spec)
    try:
        low = vars(import_module("llama_cpp.llama_cpp"))
    except BaseException:
        del sys.modules["llama_cpp"]
        raise
    vars(package).update({name: value for name, value in low.items() if name[0] != "_"})
    if version := re.search(r'__version__ = "(.+)"', Path(spec.origin).read_text("utf-8")):
        vars(package)["__version__"] = version[1]
    package.__class__ = _Package

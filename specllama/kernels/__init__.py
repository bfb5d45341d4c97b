"""CPU kernels of our own for llama.cpp: a row of a pass costs little and is the same in any width.

    from specllama import kernels

    kernels.install()            # before a model is loaded
    llama = llama_cpp.Llama(…)   # any program over llama-cpp-python

llama.cpp's kernels compute one row, or hundreds; a pass that verifies guesses has 2 to 16. These
read the weights once for up to eight rows, and add up a row in one order whatever stands beside it
(``layout.h``). The library is C++ beside this file; it enters llama.cpp as a buffer type of its CPU
backend (``door.cpp``), so models keep their files, and nothing of llama.cpp is changed.
"""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).with_name("libspecllama_kernels.so")
# the build of ggml whose structs ggml_abi.h declares
GGML = ("0.25.3", "0c1e570")


@dataclass(frozen=True, slots=True)
class Installed:
    """The kernels of this process.

    Attributes:
        name: their instruction set, "" if there are none.
        why: the reason why there are none.
    """

    name: str = ""
    why: str = ""


_lock = threading.Lock()
_installed: Installed | None = None


def library() -> Any:
    """Return the library.

    Raises:
        OSError: it was not built, or cannot be loaded here.
    """
    lib = ctypes.CDLL(str(LIBRARY))
    for name, result, *arguments in (
        ("set", ctypes.c_char_p, ctypes.c_char_p),
        ("install", ctypes.c_char_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int),
        ("offer", None, ctypes.c_int),
        ("check", ctypes.c_int, ctypes.c_void_p),
    ):
        function = getattr(lib, f"specllama_kernels_{name}")
        function.restype, function.argtypes = result, arguments
    return lib


def best() -> str:
    """Return the name of the best instruction set that this processor has and the library knows.

    Raises:
        OSError: see ``library``.
    """
    found = library().specllama_kernels_set(b"")
    return bytes(found).decode() if found else ""


def install(name: str = "", *, threads: int | None = None) -> Installed:
    """Let llama.cpp use the kernels for models that are loaded from now on; once in a process.

    Args:
        name: of an instruction set, instead of the best one.
        threads: pack weights while a file is read; None takes all processors.
    """
    global _installed
    with _lock:
        if _installed is None:
            _installed = _install(name, threads or _processors())
        return _installed


def offer(yes: bool) -> None:
    """Use the kernels for models that are loaded from now on, or do not, once installed."""
    if _installed is not None and _installed.name:
        library().specllama_kernels_offer(int(yes))


def missing() -> str:
    """Return the reason why there is no library; "" if there is one."""
    if LIBRARY.exists():
        return ""
    return "the package was installed where no C++ compiler was: install one, then specllama again"


def _processors() -> int:
    mine = getattr(os, "sched_getaffinity", None)  # Linux
    return len(mine(0)) if mine else os.cpu_count() or 1


def _install(name: str, threads: int) -> Installed:
    if why := missing():
        return Installed(why=why)
    try:
        lib = library()
        build = _text("ggml_version"), _text("ggml_commit")
    except (OSError, ImportError, AttributeError) as error:
        return Installed(why=f"they cannot be loaded: {error}")
    if build[0] != GGML[0] or not build[1].startswith((GGML[1], "unknown")):
        return Installed(why=f"llama.cpp is another build: ggml {' '.join(build)}")
    refused = lib.specllama_kernels_install(handle(), name.encode(), threads)
    if refused:
        return Installed(why=f"llama.cpp is another build: {bytes(refused).decode()}")
    return Installed(bytes(lib.specllama_kernels_set(name.encode())).decode())


def handle() -> int:
    """Return the handle of the llama.cpp that the binding has loaded."""
    from llama_cpp import llama_cpp

    return int(llama_cpp._lib._handle)


def _text(name: str) -> str:
    from llama_cpp import llama_cpp

    function = getattr(llama_cpp._lib, name)
    function.restype = ctypes.c_char_p
    return bytes(function() or b"").decode()

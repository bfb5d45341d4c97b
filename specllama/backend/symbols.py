"""Functions of llama.cpp and ggml that the binding does not wrap, found by symbol.

Those of llama.cpp are C++ and marked unstable, so their names are mangled and may change between
versions: each is looked up when first used, and what is missing is reported instead of crashing.
Signatures are those of the pinned binding's libraries.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import llama_cpp as ll
import numpy as np

from specllama.backend.devices import library_folder
from specllama.errors import CannotLoad
from specllama.paths import pip_install

_CONTEXT = ll.llama_context_p_ctypes
_FLOATS = ctypes.POINTER(ctypes.c_float)

# name -> (symbol, argument types, result type)
_FUNCTIONS: dict[str, tuple[str, list[Any], Any]] = {
    # (ctx, layer, on): keep the input of a layer, one row per token of a pass
    "llama_set_embeddings_layer_inp": (
        "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
        [_CONTEXT, ctypes.c_uint32, ctypes.c_bool],
        None,
    ),
    "llama_get_embeddings_layer_inp": (
        "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
        [_CONTEXT, ctypes.c_uint32],
        _FLOATS,
    ),
    # (ctx, on, masked): masked keeps the rows of outputs only
    "llama_set_embeddings_nextn": (
        "_Z26llama_set_embeddings_nextnP13llama_contextbb",
        [_CONTEXT, ctypes.c_bool, ctypes.c_bool],
        None,
    ),
    "llama_get_embeddings_nextn": (
        "_Z26llama_get_embeddings_nextnP13llama_context",
        [_CONTEXT],
        _FLOATS,
    ),
    # (ctx, block): which NextN block the next passes run, from 0
    "llama_set_nextn_layer_offset": (
        "_Z28llama_set_nextn_layer_offsetP13llama_contexti",
        [_CONTEXT, ctypes.c_int32],
        None,
    ),
    # (ctx) -> ggml_backend_sched_t; a const member, which takes its object first
    "llama_context_get_sched": (
        "_ZNK13llama_context9get_schedEv",
        [_CONTEXT],
        ctypes.c_void_p,
    ),
}


@cache
def function(name: str) -> Any:
    """Return the C function ``name`` of libllama.

    Raises:
        CannotLoad: this libllama does not export it.
    """
    mangled, arguments, result = _FUNCTIONS[name]
    library = ll.llama_cpp._lib
    for symbol in (name, mangled):
        if hasattr(library, symbol):
            return _typed(library[symbol], arguments, result)
    raise CannotLoad(
        f"the installed llama.cpp has no {name}",
        f"install the pinned binding: {pip_install('llama-cpp-python==0.3.36')}",
    )


@cache
def _ggml_library(library: str) -> ctypes.CDLL:
    """Return a library of ggml that the binding has loaded, such as ``ggml-base``.

    Raises:
        CannotLoad: it is built in another way here.
    """
    folder = library_folder() or Path()
    # the name that libllama asks for comes first: wheels hold copies instead of links
    names = (f"*{library}.so.?", f"*{library}.so", f"*{library}.dylib")
    files = [file for name in names for file in folder.glob(name)]
    try:
        return ctypes.CDLL(str(files[0]))
    except (IndexError, OSError):
        raise CannotLoad(f"the installed llama.cpp has no library {library}") from None


def ggml(name: str, library: str, arguments: list[Any], result: Any) -> Any:
    """Return the C function ``name`` of one of ggml's libraries.

    Raises:
        CannotLoad: it is not there.
    """
    try:
        found = _ggml_library(library)[name]
    except AttributeError:
        raise CannotLoad(f"the installed llama.cpp does not export {name}") from None
    return _typed(found, arguments, result)


def _typed(function: Any, arguments: list[Any], result: Any) -> Any:
    function.argtypes, function.restype = arguments, result
    return function


def rows(pointer: Any, n: int, width: int) -> Any:
    """View llama.cpp's buffer as float32 [n, width]; valid until the next pass."""
    return np.ctypeslib.as_array(pointer, (n, width))

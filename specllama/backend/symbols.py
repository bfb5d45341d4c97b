"""Functions of llama.cpp that the binding does not wrap, found by symbol.

They are C++ and marked unstable, so their names are mangled and may change between
versions: each is looked up when first used, and what is missing is reported instead of crashing.
Signatures are those of the pinned binding's libraries.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import llama_cpp as ll
import numpy as np

from specllama.errors import CannotLoad
from specllama.paths import pip_install

_CONTEXT = ll.llama_context_p_ctypes
_FLOATS = ctypes.POINTER(ctypes.c_float)

# name -> (mangled arguments after the context, result type)
_ARGUMENTS = {"j": ctypes.c_uint32, "b": ctypes.c_bool, "i": ctypes.c_int32}
_FUNCTIONS: dict[str, tuple[str, Any]] = {
    # (ctx, layer, on): keep the input of a layer, one row per token of a pass
    "llama_set_embeddings_layer_inp": ("jb", None),
    "llama_get_embeddings_layer_inp": ("j", _FLOATS),
    # (ctx, on, masked): masked keeps the rows of outputs only
    "llama_set_embeddings_nextn": ("bb", None),
    "llama_get_embeddings_nextn": ("", _FLOATS),
    # (ctx, block): which NextN block the next passes run, from 0
    "llama_set_nextn_layer_offset": ("i", None),
    # (ctx) -> ggml_backend_sched_t
    "llama_context_get_sched": ("", ctypes.c_void_p),
}
# a const member, which takes its object first
_MEMBERS = {"llama_context_get_sched": "_ZNK13llama_context9get_schedEv"}


@cache
def function(name: str) -> Any:
    """Return the C function ``name`` of libllama.

    Raises:
        CannotLoad: this libllama does not export it.
    """
    arguments, result = _FUNCTIONS[name]
    mangled = f"_Z{len(name)}{name}P13llama_context{arguments}"
    library = ll.llama_cpp._lib
    for symbol in (name, _MEMBERS.get(name, mangled)):
        if hasattr(library, symbol):
            found = library[symbol]
            found.argtypes = [_CONTEXT, *(_ARGUMENTS[kind] for kind in arguments)]
            found.restype = result
            return found
    raise CannotLoad(
        f"the installed llama.cpp has no {name}",
        f"install the pinned binding: {pip_install('llama-cpp-python==0.3.36')}",
    )


def rows(pointer: Any, n: int, width: int) -> Any:
    """View llama.cpp's buffer as float32 [n, width]; valid until the next pass."""
    return np.ctypeslib.as_array(pointer, (n, width))

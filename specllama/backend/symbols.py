"""Functions of llama.cpp that the binding does not wrap, found by symbol.

They are C++ and marked unstable, so their names are mangled and may change between
versions: each is looked up when first used, and what is missing is reported instead of crashing.
Signatures are those of the pinned binding's libraries.

One of them chooses the kernel for attention in a pass on the CPU: one query at a time, or tiles of
queries.

Where K and V share a float type, ggml's flash attention on CPUs (ggml-cpu/ops.cpp
``ggml_compute_forward_flash_attn_ext_f16``) computes a pass of 64 rows and more in tiles, which
reads long prompts several times faster, and splits a single query over threads from 512 cells on.
Anything else takes queries one by one. The three add up in different orders, so a token's row would
depend on the width of its pass. ``use_ref`` of ggml's CPU backend leaves the last alone, pass by
pass: on where rows are judged, off where a prompt is read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import llama_cpp as ll
import numpy as np

from specllama.backend.devices import ggml
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


FLOATS = (ll.GGML_TYPE_F16, ll.GGML_TYPE_F32)  # caches of other types are never tiled or split

Switch = Callable[[bool], None]

_CPU = 0  # GGML_BACKEND_DEVICE_TYPE_CPU
_P = ctypes.c_void_p
_SET_USE_REF = ctypes.CFUNCTYPE(None, _P, ctypes.c_bool)


def can_switch() -> bool:
    """True if this libllama lets the attention of a context be chosen."""
    try:
        _functions()
    except CannotLoad:
        return False
    return True


def one_by_one(ctx: Any) -> Switch | None:
    """Return a switch for the later passes of a context: True computes one query at a time.

    None where llama.cpp does not let us reach its CPU backend. Not to be called once the context is
    freed.
    """
    try:
        sched_of, n_backends, backend_at, device_of, kind_of, registry_of, look_up = _functions()
    except CannotLoad:
        return None
    sched = sched_of(ctx)
    if not sched:
        return None
    for i in range(n_backends(sched)):
        backend = backend_at(sched, i)
        device = device_of(backend)
        if not device or kind_of(device) != _CPU:
            continue
        address = look_up(registry_of(device), b"ggml_backend_cpu_set_use_ref")
        if address:
            set_use_ref = _SET_USE_REF(address)
            return lambda on: set_use_ref(backend, on)
    return None


def _functions() -> tuple[Callable[..., Any], ...]:
    return (
        function("llama_context_get_sched"),
        ggml("ggml_backend_sched_get_n_backends", ctypes.c_int, _P),
        ggml("ggml_backend_sched_get_backend", _P, _P, ctypes.c_int),
        ggml("ggml_backend_get_device", _P, _P),
        ggml("ggml_backend_dev_type", ctypes.c_int, _P),
        ggml("ggml_backend_dev_backend_reg", _P, _P),
        ggml("ggml_backend_reg_get_proc_address", _P, _P, ctypes.c_char_p),
    )

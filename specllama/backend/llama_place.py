"""A placement as llama.cpp wants it: devices, buffer types by pattern, shares, adapters.

The binding has no types for some of it ("unused"); the structures here are those of ``llama.h``.
Names were compared with what is there before (``backend.planning``).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp as ll

from specllama.backend.devices import ggml, handles
from specllama.backend.llama_log import last_words, recent
from specllama.errors import CannotLoad, UsageError
from specllama.settings.hardware import Adapter


class _Override(ctypes.Structure):
    """``llama_model_tensor_buft_override``."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def buffer_type(device: str) -> int:
    """Return the buffer type for tensors on a device; "CPU" is RAM.

    Raises:
        UsageError: there is no such device.
    """
    if device == "CPU":  # this very one lets llama.cpp rearrange weights for the processor
        return int(ggml("ggml_backend_cpu_buffer_type", ctypes.c_void_p)())
    handle = handles().get(device)
    if handle is None:
        raise UsageError(f"there is no device {device!r}", "specllama doctor names them")
    return int(ggml("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)(handle))


def place(
    params: Any,
    *,
    split: Sequence[int],
    devices: Sequence[str] | None,
    patterns: Sequence[tuple[str, str]],
) -> list[Any]:
    """Write a placement into llama.cpp's model parameters.

    Args:
        split: layers per device, of those that the model may use.
        devices: their names; None leaves them to llama.cpp.

    Returns:
        What has to outlive loading.

    Raises:
        UsageError: there is no such device.
    """
    alive: list[Any] = []
    if any(split):
        # llama.cpp reads one number for every device that it could have, and copies them
        shares = (ctypes.c_float * max(int(ll.llama_max_devices()), len(split)))(*split)
        params.tensor_split = shares
        alive.append(shares)
    if devices is not None:
        known = handles()
        for name in devices:
            if name not in known:
                raise UsageError(f"there is no device {name!r}", "specllama doctor names them")
        listed = (ctypes.c_void_p * (len(devices) + 1))(*(known[name] for name in devices), None)
        params.devices = ctypes.cast(listed, ctypes.c_void_p).value
        alive.append(listed)
    if patterns:
        overrides = (_Override * (len(patterns) + 1))()  # the last one, all null, ends the list
        for override, (pattern, device) in zip(overrides, patterns, strict=False):
            override.pattern, override.buffer_type = pattern.encode(), buffer_type(device)
        params.tensor_buft_overrides = ctypes.addressof(overrides)
        alive.append(overrides)
    return alive


class Loras:
    """Adapters of a loaded model, for every context made of it.

    Raises:
        CannotLoad: llama.cpp does not accept one, with its reason.
    """

    def __init__(self, model: Any, adapters: Sequence[Adapter]) -> None:
        self._handles: list[Any] = []
        self._scales = [adapter.scale for adapter in adapters]
        for adapter in adapters:
            recent.clear()
            handle = ll.llama_adapter_lora_init(model, os.fsencode(adapter.path))
            if not handle:
                reason = last_words() or "llama.cpp gave no reason"
                raise CannotLoad(f"cannot use the adapter {Path(adapter.path).name}: {reason}")
            self._handles.append(handle)  # the model frees them

    def apply_to(self, context: Any) -> None:
        """Apply the adapters to the passes of a context."""
        n = len(self._handles)
        if n:
            handles = (ll.llama_adapter_lora_p_ctypes * n)(*self._handles)
            scales = (ctypes.c_float * n)(*self._scales)
            if ll.llama_set_adapters_lora(context, handles, n, scales) != 0:
                raise CannotLoad("llama.cpp does not accept these adapters together")

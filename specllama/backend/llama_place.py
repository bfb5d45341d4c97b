"""A placement as llama.cpp wants it: devices, buffer types by pattern, shares, cores, adapters.

The binding has no types for some of it ("unused"); the structures here are those of ``llama.h`` and
``ggml-cpu.h``. Names were compared with what is there before (``backend.planning``).
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
from specllama.settings.hardware import (
    MOST_CORES,
    NUMA,
    PRIORITIES,
    SPLIT_MODES,
    Adapter,
    CpuOptions,
)

_SPLIT = {"none": 0, "layer": 1, "row": 2}  # enum llama_split_mode
assert set(_SPLIT) == set(SPLIT_MODES)


class _Override(ctypes.Structure):
    """``llama_model_tensor_buft_override``."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


class _Threads(ctypes.Structure):
    """``ggml_threadpool_params``."""

    _fields_ = (
        ("cpumask", ctypes.c_bool * MOST_CORES),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    )


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
    split_mode: str,
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
    params.split_mode = _SPLIT[split_mode]
    params.main_gpu = 0  # of the devices given
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


class Cores:
    """The threads that compute for one context, on the cores that were chosen.

    Raises:
        UsageError: no chosen core is one of this process.
        CannotLoad: the system does not give the threads.
    """

    def __init__(self, context: Any, threads: int, options: CpuOptions) -> None:
        wanted = _Threads()
        fill = ggml("ggml_threadpool_params_init", None, ctypes.POINTER(_Threads), ctypes.c_int)
        fill(ctypes.byref(wanted), threads)
        for core in options.allowed:
            wanted.cpumask[core] = True
        wanted.prio = PRIORITIES.index(options.priority) - 1
        wanted.poll = options.poll
        wanted.strict_cpu = options.strict
        new = ggml("ggml_threadpool_new", ctypes.c_void_p, ctypes.POINTER(_Threads))
        self._pool: int | None = new(ctypes.byref(wanted))
        if not self._pool:
            raise CannotLoad("the system gives no threads for the chosen cores")
        attach = ggml("llama_attach_threadpool", None, *[ctypes.c_void_p] * 3)
        attach(context, self._pool, self._pool)

    def close(self) -> None:
        """Free the threads, after the context that uses them."""
        if self._pool:
            ggml("ggml_threadpool_free", None, ctypes.c_void_p)(self._pool)
            self._pool = None


def use_numa(options: CpuOptions) -> None:
    """Apply the NUMA choice before a model is loaded; the first one of a process counts."""
    if options.numa != "off":
        ll.llama_numa_init(NUMA.index(options.numa))


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

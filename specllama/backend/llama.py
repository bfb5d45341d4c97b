"""llama.cpp through the low-level API of llama-cpp-python (pinned): models and their places.

llama.cpp ends the process on some bad calls (``GGML_ASSERT``), so everything it would assert on is
checked before the call. Nothing is printed. The ``llama_*`` neighbours hold caches, pools, the log,
the vocabulary and grammars; outside this folder nothing in the run-time path imports the binding.
The binding has no types for some of a placement ("unused"): the structures here are those of
``llama.h``.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llama_cpp as ll

from specllama import kernels as own_kernels
from specllama.backend import trial
from specllama.backend.devices import devices as devices_here
from specllama.backend.devices import ggml, gpus, handles
from specllama.backend.embedding import Embedding
from specllama.backend.llama_log import last_words, recent, start
from specllama.backend.llama_vocab import LlamaVocab
from specllama.backend.placement import CPU, Placement
from specllama.cancel import Cancel
from specllama.errors import Cancelled, CannotLoad, UnsupportedModel, UsageError
from specllama.settings.hardware import Adapter

_LOAD_MODES = {  # by whether to map the file, and whether to keep it in memory
    (True, True): ll.LLAMA_LOAD_MODE_MMAP_MLOCK,
    (False, True): ll.LLAMA_LOAD_MODE_MLOCK,
    (True, False): ll.LLAMA_LOAD_MODE_MMAP,
    (False, False): ll.LLAMA_LOAD_MODE_NONE,
}


class _Override(ctypes.Structure):
    """``llama_model_tensor_buft_override``."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def _handle(device: str) -> int:
    handle = handles().get(device)
    if handle is None:
        raise UsageError(f"there is no device {device!r}", "specllama doctor names them")
    return handle


def buffer_type(device: str) -> int:
    """Return the buffer type for tensors on a device; "CPU" is RAM.

    Raises:
        UsageError: there is no such device.
    """
    if device == CPU:  # this very one lets llama.cpp rearrange weights for the processor
        return int(ggml("ggml_backend_cpu_buffer_type", ctypes.c_void_p)())
    buffer_of = ggml("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)
    return int(buffer_of(_handle(device)))


def place_layers(params: Any, place: Placement | None, devices: Sequence[str] | None) -> list[Any]:
    """Write a placement into llama.cpp's model parameters.

    Args:
        devices: those that the model may use; None leaves them to llama.cpp.

    Returns:
        What has to outlive loading.

    Raises:
        UsageError: there is no such device.
    """
    split = () if place is None else place.own_split
    patterns = () if place is None else place.patterns
    alive: list[Any] = []
    if any(split):
        # llama.cpp reads one number for every device that it could have, and copies them
        shares = (ctypes.c_float * max(int(ll.llama_max_devices()), len(split)))(*split)
        params.tensor_split = shares
        alive.append(shares)
    if devices is not None:
        listed = (ctypes.c_void_p * (len(devices) + 1))(*map(_handle, devices), None)
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


def _own_kernels(wanted: bool) -> str:
    """Offer our kernels to the model that is loaded next, or do not; return their name, "" for
    none. llama.cpp freezes its list of layouts at the first model: they enter it before that."""
    if not trial.kernels().name:
        return ""
    name = own_kernels.install().name
    own_kernels.offer(wanted)
    return name if wanted else ""


class LlamaModel:
    """A loaded GGUF file. Pools made from it share its weights.

    Args:
        embedding: of a model that knows only some of its tokens.
        longest: bytes of the longest token text.
        gpu_layers, devices: how many layers go to which devices; None lets llama.cpp choose.
        place: where layers and tensors go, instead of these.
        loras: adapters that every context of the model wears.
        repack: rearrange weights for this processor's wide products, where llama.cpp can.
        kernels: pack them for specllama's own kernels instead, where these can be used.
        load_mtp: load NextN blocks as well, where the file has them.
        stop: ends loading, and the passes of every context of the model, when it is set.

    Raises:
        CannotLoad, UnsupportedModel: with llama.cpp's own reason.
        Cancelled: ``stop`` was set.
    """

    def __init__(
        self,
        path: Path,
        *,
        embedding: Embedding | None = None,
        pre: str = "",
        longest: int = 0,
        gpu_layers: str = "auto",
        devices: Sequence[str] | None = None,
        place: Placement | None = None,
        loras: Sequence[Adapter] = (),
        use_mmap: bool = True,
        use_mlock: bool = False,
        repack: bool = True,
        kernels: bool = False,
        load_mtp: bool = False,
        progress: Callable[[float], None] | None = None,
        head: bool = False,
        stop: Cancel | None = None,
    ) -> None:
        start()
        self.path = path
        self.embedding = embedding
        self.stop = stop = stop or Cancel()
        params = ll.llama_model_default_params()
        if place is not None:
            gpu_layers, devices = str(place.layers), place.devices
        wanted = 999 if gpu_layers in ("auto", "all") else int(gpu_layers)
        self.gpu_layers = wanted if gpus(devices_here()) else 0
        self.repacks = repack and trial.repacks()
        params.n_gpu_layers = self.gpu_layers
        # a device that llama.cpp knows of takes buffers and wide passes without any layer, too
        moved = place is not None and any(device != CPU for _, device in place.moves)
        self.devices = devices if self.gpu_layers or moved else ()
        alive = place_layers(params, place, self.devices)
        params.load_mode = _LOAD_MODES[use_mmap, use_mlock]
        params.load_mtp = load_mtp
        self.kernels = _own_kernels(kernels)
        params.use_extra_bufts = self.repacks or bool(self.kernels)

        @ll.llama_progress_callback  # type: ignore[untyped-decorator]
        def on_progress(fraction: float, user_data: object) -> bool:
            if progress is not None:
                progress(float(fraction))
            return not stop.is_set()

        params.progress_callback = on_progress
        self._parts: list[Any] = []
        recent.clear()
        self._model = ll.llama_model_load_from_file(os.fsencode(path), params)
        del alive  # llama.cpp has read it
        if not self._model:
            if stop.is_set():
                raise Cancelled(f"loading {path.name} was stopped")
            reason = last_words() or "llama.cpp gave no reason"
            raise CannotLoad(f"cannot load {path.name}: {reason}")
        self.vocab = LlamaVocab(self._model, pre, longest)
        self.is_recurrent = bool(ll.llama_model_is_recurrent(self._model))
        self.is_hybrid = bool(ll.llama_model_is_hybrid(self._model))
        self.window = int(ll.llama_model_n_swa(self._model))
        self.has_windows = self.window > 0
        self.n_ctx_train = int(ll.llama_model_n_ctx_train(self._model))
        self.n_params = int(ll.llama_model_n_params(self._model))
        self.n_bytes = int(ll.llama_model_size(self._model))
        self.n_layer = int(ll.llama_model_n_layer(self._model))
        if ll.llama_model_has_encoder(self._model) and not head:
            self.close()
            raise UnsupportedModel(
                f"{path.name} is an encoder-decoder or embedding model; specllama generates text "
                "with decoder-only models"
            )
        try:
            self.loras = Loras(self._model, loras)
        except BaseException:
            self.close()
            raise

    @property
    def handle(self) -> Any:
        return self._model

    @property
    def n_vocab(self) -> int:
        """Tokens that it reads."""
        return self.vocab.n_tokens if self.embedding is None else self.embedding.n_vocab

    @property
    def can_roll_back(self) -> bool:
        """True if a partial rollback is a metadata change (attention) rather than a replay."""
        return not (self.is_recurrent or self.is_hybrid)

    def adopt(self, part: Any) -> None:
        """Register a part to close before the model, whose weights it reads."""
        self._parts.append(part)

    def drop(self, part: Any) -> None:
        """Close one such part before the model is closed."""
        self._parts.remove(part)
        part.close()

    def close(self) -> None:
        while self._parts:
            self._parts.pop(0).close()
        if self._model:
            self.vocab.close()
            ll.llama_model_free(self._model)
            self._model = None

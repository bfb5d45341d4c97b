"""Which devices llama.cpp sees, and how it was built."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specllama.models import memory

Kind = Literal["cpu", "gpu", "igpu", "accel"]
_KINDS: dict[int, Kind] = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel"}


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a ggml backend; sizes in bytes, 0 where the backend does not say.

    ``splits_rows``: matrices can be divided between it and others of its kind.
    """

    name: str
    kind: Kind
    backend: str
    description: str
    free: int
    total: int
    splits_rows: bool = False

    @property
    def shares_ram(self) -> bool:
        """Whether it shares the machine's memory: what it takes is missing from RAM."""
        return self.kind == "igpu" or self.backend in ("Metal", "MTL")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """How the native library was built."""

    binding: str
    llama_cpp: str
    features: tuple[str, ...]
    backends: tuple[str, ...]
    gpu_offload: bool
    mmap: bool
    mlock: bool

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def devices() -> list[Device]:
    """Every device that the native library was built for and finds.

    Raises:
        ImportError: llama-cpp-python is not installed.
    """
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    import llama_cpp

    # through the binding's handle: a second copy of the library would have its own registry
    library = llama_cpp.llama_cpp._lib

    def call(name: str, result: Any, *arguments: Any) -> Any:
        function = library[f"ggml_backend_{name}"]
        function.restype = result
        return function(*arguments)

    def text(name: str, handle: Any) -> str:
        raw = call(name, ctypes.c_char_p, ctypes.c_void_p(handle))
        return (raw or b"").decode("utf-8", "replace").strip()

    found = []
    try:
        for i in range(call("dev_count", ctypes.c_size_t)):
            handle = call("dev_get", ctypes.c_void_p, ctypes.c_size_t(i))
            device = ctypes.c_void_p(handle)
            free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
            call("dev_memory", None, device, ctypes.byref(free), ctypes.byref(total))
            kind = _KINDS.get(call("dev_type", ctypes.c_int, device), "accel")
            registry = ctypes.c_void_p(call("dev_backend_reg", ctypes.c_void_p, device))
            split = b"ggml_backend_split_buffer_type"
            found.append(
                Device(
                    name=text("dev_name", handle),
                    kind=kind,
                    backend=text("reg_name", registry.value),
                    description=text("dev_description", handle),
                    free=memory.available_memory() if kind == "cpu" else free.value,
                    total=memory.total_memory() if kind == "cpu" else total.value,
                    splits_rows=bool(
                        call("reg_get_proc_address", ctypes.c_void_p, registry, split)
                    ),
                )
            )
    except AttributeError:  # it does not export them
        return []
    return found


def gpus(found: Sequence[Device]) -> list[Device]:
    """The devices that llama.cpp moves layers to: integrated GPUs only if there are no others."""
    cards = [device for device in found if device.kind == "gpu"]
    return cards or [device for device in found if device.kind == "igpu"]


def build_info() -> BuildInfo:
    """What the installed llama-cpp-python can do.

    Raises:
        ImportError: it is not installed.
    """
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    import llama_cpp

    text = llama_cpp.llama_print_system_info().decode("utf-8", "replace")
    backends: list[str] = []
    features: list[str] = []
    for field_ in text.replace(":", "|").split("|"):
        name, _, value = (part.strip() for part in field_.partition("="))
        if not name:
            continue
        if not value:
            backends.append(name)
        elif value != "0":
            features.append(name if value == "1" else f"{name}={value}")
    return BuildInfo(
        binding=llama_cpp.__version__,
        llama_cpp=_commit(),
        features=tuple(features),
        backends=tuple(backends),
        gpu_offload=bool(llama_cpp.llama_supports_gpu_offload()),
        mmap=bool(llama_cpp.llama_supports_mmap()),
        mlock=bool(llama_cpp.llama_supports_mlock()),
    )


# the llama.cpp commit that each binding release vendors: a release reports only its own version,
# while security notes name llama.cpp's
_COMMITS = {"0.3.36": "0c1e57098"}


def _commit() -> str:
    return _COMMITS.get(importlib.metadata.version("llama-cpp-python"), "?")


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    return " ".join(_cpuinfo("model name").split()) or platform.processor() or platform.machine()


def cpu_features() -> str:
    """The features of this processor, as far as the system lists them; else ""."""
    return " ".join(sorted(_cpuinfo("flags", "Features").split()))


def _cpuinfo(*names: str) -> str:
    """What Linux says of the first processor under one of these names; else ""."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2] for line in file if line.startswith(names)), "")
    except OSError:
        return ""


def library_files() -> list[str]:
    """Name, size and time of each library of the binding, which differ between builds; nothing is
    loaded."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return []
    folder = Path(spec.origin).parent / "lib"
    found = ((file, file.stat()) for file in sorted(folder.iterdir()) if file.is_file())
    return [f"{file.name} {stat.st_size} {stat.st_mtime_ns}" for file, stat in found]


def gpu_build_command(found: Sequence[Device]) -> tuple[str, str] | None:
    """(what was seen, command) when this machine has a GPU that the installed build cannot use."""
    if gpus(found):
        return None
    reinstall = "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python"
    version = importlib.metadata.version("llama-cpp-python")
    package = f"llama-cpp-python=={version}"
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return "Apple GPU", f'CMAKE_ARGS="-DGGML_METAL=on" {reinstall} {package}'
    if os.path.exists("/proc/driver/nvidia/version") or shutil.which("nvidia-smi"):
        return "NVIDIA GPU", f'CMAKE_ARGS="-DGGML_CUDA=on" {reinstall} {package}'
    if os.path.exists("/dev/kfd"):
        return "AMD GPU", f'CMAKE_ARGS="-DGGML_HIP=on" {reinstall} {package}'
    if os.path.isdir("/dev/dri") and any(n.startswith("renderD") for n in os.listdir("/dev/dri")):
        return "GPU", f'CMAKE_ARGS="-DGGML_VULKAN=on" {reinstall} {package}'
    return None

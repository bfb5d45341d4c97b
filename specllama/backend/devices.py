"""The devices that llama.cpp sees, and the build of llama.cpp."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from specllama import paths
from specllama.errors import CannotLoad
from specllama.models import memory

Kind = Literal["cpu", "gpu", "igpu", "accel"]
_KINDS: dict[int, Kind] = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel"}


class _Props(ctypes.Structure):
    """``ggml_backend_dev_props``."""

    _fields_ = (
        ("name", ctypes.c_char_p), ("description", ctypes.c_char_p), ("free", ctypes.c_size_t),
        ("total", ctypes.c_size_t), ("kind", ctypes.c_int), ("id", ctypes.c_char_p),
        ("asynchronous", ctypes.c_bool), ("host_buffer", ctypes.c_bool),
        ("buffer_from_host_ptr", ctypes.c_bool), ("events", ctypes.c_bool),
        ("mmap_support", ctypes.c_bool),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a ggml backend; sizes in bytes, 0 where the backend does not say.

    Attributes:
        maps_ram: it computes with RAM that is handed to it, as Apple chips do.
        id: of the hardware; "" where the backend does not say.
    """

    name: str
    kind: Kind
    backend: str
    description: str
    free: int
    total: int
    maps_ram: bool = False
    id: str = ""

    @property
    def is_remote(self) -> bool:
        """True if it belongs to another program and is reached over a network."""
        return self.backend == "RPC"

    @property
    def shares_ram(self) -> bool:
        """True if it uses the machine's own memory: its allocations reduce the free RAM."""
        return self.kind == "igpu" or self.maps_ram

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """Facts about the build of the native library."""

    binding: str
    llama_cpp: str
    features: tuple[str, ...]
    backends: tuple[str, ...]


class _Package(ModuleType):
    """The binding as far as its low-level API goes; a name of the rest brings all of it."""

    def __getattr__(self, name: str) -> Any:
        package: Any = self
        package.__class__ = ModuleType
        package.__spec__.loader.exec_module(package)
        return getattr(package, name)


def _lighten() -> None:
    """Make ``import llama_cpp`` load only the low-level API: a tenth of the whole import.

    Raises:
        ImportError: llama-cpp-python is not installed.
        RuntimeError: its library cannot be loaded.
    """
    spec = importlib.util.find_spec("llama_cpp") if "llama_cpp" not in sys.modules else None
    if spec is None or spec.origin is None:
        return
    package = sys.modules["llama_cpp"] = importlib.util.module_from_spec(spec)
    try:
        low = vars(importlib.import_module("llama_cpp.llama_cpp"))
    except BaseException:
        del sys.modules["llama_cpp"]
        raise
    vars(package).update({name: value for name, value in low.items() if name[0] != "_"})
    if version := re.search(r'__version__ = "(.+)"', Path(spec.origin).read_text("utf-8")):
        vars(package)["__version__"] = version[1]
    package.__class__ = _Package


def ggml(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of ggml from the instance that libllama uses: another copy of the library
    would have its own devices.

    Raises:
        ImportError: llama-cpp-python is not installed.
        CannotLoad: this build does not have it.
    """
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    _lighten()
    import llama_cpp

    try:
        function = llama_cpp.llama_cpp._lib[name]
    except AttributeError:
        raise CannotLoad(f"this build of llama.cpp has no {name}") from None
    function.restype, function.argtypes = result, arguments
    return function


def handles() -> dict[str, int]:
    """Return ggml's handles of the devices, by name."""
    get = ggml("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    name = ggml("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
    found = [get(i) for i in range(ggml("ggml_backend_dev_count", ctypes.c_size_t)())]
    return {name(handle).decode("utf-8", "replace"): handle for handle in found}


def devices() -> list[Device]:
    """List every device that the native library was built for and finds.

    Raises:
        ImportError: llama-cpp-python is not installed.
    """
    try:
        return [_device(handle) for handle in handles().values()]
    except CannotLoad:
        return []


def _device(handle: int) -> Device:
    def text(raw: bytes | None) -> str:
        return (raw or b"").decode("utf-8", "replace").strip()

    pointer = ctypes.c_void_p
    props = _Props()
    ggml("ggml_backend_dev_get_props", None, pointer, pointer)(handle, ctypes.byref(props))
    registry = ggml("ggml_backend_dev_backend_reg", pointer, pointer)(handle)
    kind = _KINDS.get(props.kind, "accel")
    return Device(
        name=text(props.name),
        kind=kind,
        backend=text(ggml("ggml_backend_reg_name", ctypes.c_char_p, pointer)(registry)),
        description=text(props.description),
        free=memory.available_memory() if kind == "cpu" else props.free,
        total=memory.total_memory() if kind == "cpu" else props.total,
        maps_ram=props.buffer_from_host_ptr,
        id=text(props.id),
    )


def gpus(found: Sequence[Device]) -> list[Device]:
    """List the devices that get layers by default, in llama.cpp's order: remote ones, then cards,
    each once though several backends may see it; integrated GPUs, of one backend, only if there is
    no card."""
    remote = [device for device in found if device.kind == "gpu" and device.is_remote]
    cards: list[Device] = []
    for device in found:
        known = device.id and device.id in (card.id for card in cards)
        if device.kind == "gpu" and not (device.is_remote or known):
            cards.append(device)
    chips = [device for device in found if device.kind == "igpu"]
    return remote + (cards or [chip for chip in chips if chip.backend == chips[0].backend])


def build_info() -> BuildInfo:
    """Return the abilities of the installed llama-cpp-python.

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
        llama_cpp=_COMMITS.get(llama_cpp.__version__, "?"),
        features=tuple(features),
        backends=tuple(backends),
    )


# the llama.cpp commit that each binding release vendors: a release reports only its own version,
# while security notes name llama.cpp's
_COMMITS = {"0.3.36": "0c1e57098"}


def cpu_name() -> str:
    """Return the processor's name as the system gives it."""
    return " ".join(_cpuinfo("model name").split()) or platform.processor() or platform.machine()


def cpu_features() -> str:
    """Return the features of this processor, if the system lists them; else ""."""
    return " ".join(sorted(_cpuinfo("flags", "Features").split()))


def _cpuinfo(*names: str) -> str:
    """Return the first value under one of these names in /proc/cpuinfo; else ""."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2] for line in file if line.startswith(names)), "")
    except OSError:
        return ""


def library_folder() -> Path | None:
    """Return the folder of the binding's libraries; nothing is loaded."""
    chosen = os.environ.get("LLAMA_CPP_LIB_PATH")  # the binding's own variable
    if chosen is not None:
        return Path(chosen)
    spec = importlib.util.find_spec("llama_cpp")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "lib"


def library_files() -> list[str]:
    """Return the name, size and time of each of these libraries; they differ between builds."""
    folder = library_folder()
    files = sorted(folder.iterdir()) if folder is not None and folder.is_dir() else []
    found = ((file, file.stat()) for file in files if file.is_file())
    return [f"{file.name} {stat.st_size} {stat.st_mtime_ns}" for file, stat in found]


# where the binding says which wheels it has ready: CPU, CUDA, Metal, ROCm, Vulkan
WHEELS_PAGE = "https://llama-cpp-python.readthedocs.io/en/latest/#supported-backends"


def build_command(switch: str = "", *, cxxflags: str = "") -> str:
    """Return the command that rebuilds the binding with a switch of llama.cpp or the compiler."""
    from importlib import metadata

    command = paths.pip_install(
        "--force-reinstall --no-deps --no-cache-dir --no-binary llama-cpp-python "
        f"llama-cpp-python=={metadata.version('llama-cpp-python')}"
    )
    if not switch:
        return f'CXXFLAGS="{cxxflags}" {command}' if cxxflags else command
    return f'CMAKE_ARGS="-D{switch}=on" {command}'


def gpu_build_command(found: Sequence[Device]) -> tuple[str, str] | None:
    """Return (GPU that was seen, command) if this machine has a GPU that the build cannot use."""
    if any(device.kind in ("gpu", "igpu") and not device.is_remote for device in found):
        return None
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return "Apple GPU", build_command("GGML_METAL")
    if os.path.exists("/proc/driver/nvidia/version") or shutil.which("nvidia-smi"):
        return "NVIDIA GPU", build_command("GGML_CUDA")
    if os.path.exists("/dev/kfd"):
        return "AMD GPU", build_command("GGML_HIP")
    if os.path.isdir("/dev/dri") and any(n.startswith("renderD") for n in os.listdir("/dev/dri")):
        return "GPU", build_command("GGML_VULKAN")
    return None

"""Which devices llama.cpp sees, how it was built, and how to place a pair on them.

``devices()`` and ``build_info()`` ask the native library; ``plan_offload`` is arithmetic on headers
and can be tested with devices that do not exist.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specllama.models import memory

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader

Kind = Literal["cpu", "gpu", "igpu", "accel"]
_KINDS: dict[int, Kind] = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel"}

# left free on every device: driver, display, fragmentation
RESERVE_BYTES = 512 << 20
USABLE = 0.92


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a ggml backend; sizes in bytes, 0 where the backend does not say."""

    name: str
    kind: Kind
    backend: str
    description: str
    free: int
    total: int

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
            found.append(
                Device(
                    name=text("dev_name", handle),
                    kind=kind,
                    backend=text("reg_name", call("dev_backend_reg", ctypes.c_void_p, device)),
                    description=text("dev_description", handle),
                    free=memory.available_memory() if kind == "cpu" else free.value,
                    total=memory.total_memory() if kind == "cpu" else total.value,
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
    """Name, size and time of each library of the binding, which differ between builds."""
    import llama_cpp

    folder = Path(llama_cpp.__file__).parent / "lib"
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


# -- planning --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one model's layers go.

    Attributes:
        layers: how many to offload, the output layer counted (llama.cpp's ``n_gpu_layers``).
        of: how many there are, the output layer counted.
        split: offloaded layers per GPU, in device order: the first GPU has the first of them
            (llama.cpp's ``tensor_split``).
        bytes: per GPU.
    """

    role: str
    layers: int
    of: int
    split: tuple[int, ...]
    bytes: tuple[int, ...]

    @property
    def whole(self) -> bool:
        return self.layers >= self.of


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """A pair laid out over the devices."""

    target: Placement
    draft: Placement | None
    gpus: tuple[Device, ...]
    warnings: tuple[str, ...] = field(default=())

    def lines(self) -> list[str]:
        """The plan in words, for ``-v``."""
        if not self.gpus:
            return ["offload: no GPU that this build can use; everything runs on the CPU"]
        lines = []
        for placement in (self.target, self.draft):
            if placement is None:
                continue
            where = ", ".join(
                f"{n} on {device.name} ({size / 1e9:.1f} GB)"
                for n, device, size in zip(placement.split, self.gpus, placement.bytes, strict=True)
                if n
            )
            lines.append(
                f"offload: {placement.role} {placement.layers} of {placement.of} layers"
                + (f": {where}" if where else ": all on the CPU")
            )
        return lines + [f"offload: {warning}" for warning in self.warnings]


def layer_weights(header: GgufHeader) -> list[int]:
    """Weights of each layer; the output layer (and what belongs to no layer) comes last."""
    n = header.block_count
    sizes = [0] * (n + 1)
    for tensor in header.tensors:
        first, _, rest = tensor.name.partition(".")
        number = rest.partition(".")[0]
        if first == "blk" and number.isdigit() and int(number) < n:
            sizes[int(number)] += tensor.n_bytes
        elif tensor.name != "token_embd.weight" or "output.weight" not in header.by_name:
            # the embedding table itself stays on the CPU; tied, a copy of it is the output
            sizes[n] += tensor.n_bytes
    return sizes


def layer_bytes(header: GgufHeader, n_ctx: int, **kv: Any) -> list[int]:
    """Weights and KV of each layer, the output layer last."""
    sizes = layer_weights(header)
    per_layer = memory.kv_bytes(header, n_ctx, **kv) // max(header.block_count, 1)
    return [size + per_layer for size in sizes[:-1]] + [sizes[-1]]


def left_in_ram(
    need: memory.PairMemory, plan: OffloadPlan, target: GgufHeader, draft: GgufHeader | None
) -> memory.PairMemory:
    """What a pair needs in RAM when some of its layers lie in the memory of GPUs.

    Args:
        need: the pair's memory with everything in one place.
    """
    if all(card.shares_ram for card in plan.gpus):
        return need
    second = need.draft
    if second is not None and draft is not None and plan.draft is not None:
        second = _remainder(second, draft, plan.draft)
    return dataclasses.replace(
        need, target=_remainder(need.target, target, plan.target), draft=second
    )


def _remainder(
    need: memory.ModelMemory, header: GgufHeader, placement: Placement
) -> memory.ModelMemory:
    if placement.layers == 0:
        return need
    moved = sum(layer_weights(header)[placement.of - placement.layers :])
    blocks = max(placement.of - placement.layers, 0)  # the output layer is the first to move
    left = blocks / max(placement.of - 1, 1)
    return dataclasses.replace(
        need,
        weights=max(need.weights - moved, 0),
        repacked=int(need.repacked * left),
        kv=int(need.kv * left),
        compute=need.compute if blocks else 0,
    )


def plan_offload(
    target: GgufHeader,
    draft: GgufHeader | None,
    found: Sequence[Device],
    *,
    gpu_layers: str = "auto",
    draft_gpu_layers: str = "auto",
    n_ctx: int | None = None,
    n_ubatch: int = 512,
    n_outputs: int = 16,
    flash_attn: bool = True,
    type_k: str = "f16",
    type_v: str = "f16",
) -> OffloadPlan:
    """Decide how many layers of target and draft go to the GPUs.

    "auto" takes what fits after buffers and a reserve: the whole draft first (it runs several times
    a round and is small), then target layers. A number or "all" is taken as asked, with a warning
    if it will not fit.

    Args:
        found: all devices; the CPU among them is ignored.
        n_ctx: context length; None takes the engine's default.
    """
    cards = tuple(gpus(found))
    context = memory.padded_ctx(memory.context_length(target, n_ctx))
    kv = {"type_k": type_k, "type_v": type_v}
    buffers: dict[str, Any] = {"n_ubatch": n_ubatch, "flash_attn": flash_attn}
    free = [max(int(card.free * USABLE) - RESERVE_BYTES, 0) for card in cards]
    warnings: list[str] = []
    target_buffer = memory.compute_bytes(target, context, n_outputs=n_outputs, **buffers)
    draft_placement = None
    if draft is not None:
        draft_buffer = memory.compute_bytes(draft, context, n_outputs=2, **buffers)
        sizes = layer_bytes(draft, context, **kv)
        # a draft may take half of the memory: more would starve the target
        cap = [size // 2 for size in free] if draft_gpu_layers == "auto" else free
        draft_placement = _place("draft", sizes, draft_buffer, cap, draft_gpu_layers, warnings)
        if draft_gpu_layers == "auto" and not draft_placement.whole:
            # half a draft on the GPU costs a transfer per step and gains little
            draft_placement = _place("draft", sizes, draft_buffer, cap, "0", [])
        for i, used in enumerate(draft_placement.bytes):
            free[i] = max(free[i] - used, 0)
    placement = _place(
        "target", layer_bytes(target, context, **kv), target_buffer, free, gpu_layers, warnings
    )
    return OffloadPlan(placement, draft_placement, cards, tuple(warnings))


def _place(
    role: str,
    sizes: list[int],
    buffer: int,
    free: list[int],
    asked: str,
    warnings: list[str],
) -> Placement:
    """The last layers go to the devices, first to first, as in llama.cpp."""
    of = len(sizes)
    if not free or asked == "0":
        if asked not in ("auto", "0") and not free:
            warnings.append(f"the {role} cannot be offloaded: there is no usable GPU")
        return Placement(role, 0, of, (0,) * len(free), (0,) * len(free))
    wanted = of if asked in ("auto", "all") else min(int(asked), of)
    room = [max(size - buffer, 0) for size in free]
    # the output layer is the last one: it moves first, and stays as long as anything does
    fitting = (n for n in range(wanted, 0, -1) if _fill(sizes[of - n :], room) is not None)
    placed = next(fitting, 0)
    split = _fill(sizes[of - placed :], room) if placed else None
    if asked != "auto" and placed < wanted:
        warnings.append(
            f"{wanted} layers of the {role} need more GPU memory than is free;"
            f" {placed} would fit (-ngl auto)"
        )
        split = split or [0] * len(free)
        split[-1] += wanted - placed
        placed = wanted
    if split is None:
        return Placement(role, 0, of, (0,) * len(free), (0,) * len(free))
    used, at = [], of - placed
    for count in split:
        used.append(sum(sizes[at : at + count]) + buffer if count else 0)
        at += count
    return Placement(role, placed, of, tuple(split), tuple(used))


def _fill(layers: Sequence[int], room: Sequence[int]) -> list[int] | None:
    """How many of the layers each device takes, in order; None if they do not fit."""
    split, used, card = [0] * len(room), 0, 0
    for size in layers:
        while card < len(room) and used + size > room[card]:
            card, used = card + 1, 0
        if card == len(room):
            return None
        split[card] += 1
        used += size
    return split


def fewer_layers(plan: OffloadPlan) -> OffloadPlan | None:
    """The next smaller plan after a load failed on the GPU; None when nothing is offloaded.

    Target layers go first, a quarter at a time; then the draft; the last plan is the CPU alone.
    """
    target, draft = plan.target, plan.draft
    if target.layers > 0:
        keep = target.layers * 3 // 4 if target.layers > 3 else 0
        return dataclasses.replace(plan, target=_shrunk(target, keep))
    if draft is not None and draft.layers > 0:
        return dataclasses.replace(plan, draft=_shrunk(draft, 0))
    return None


def _shrunk(placement: Placement, keep: int) -> Placement:
    share = keep / max(placement.layers, 1)
    split = [int(n * share) for n in placement.split]
    while sum(split) < keep:
        cut = [before - now for before, now in zip(placement.split, split, strict=True)]
        split[cut.index(max(cut))] += 1
    sizes = tuple(int(n * share) for n in placement.bytes)
    return dataclasses.replace(placement, layers=keep, split=tuple(split), bytes=sizes)

"""What a caller can ask of the machine: where weights go, which cores compute, how positions turn.

Values are checked here as far as they can be without a model and a machine; ``backend.planning``
and ``backend.llama_place`` compare them with both. Light to import.
"""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass

from specllama.errors import UsageError

SPLIT_MODES = ("layer", "row", "none")
NUMA = ("off", "distribute", "isolate", "numactl")
ROPE_SCALINGS = ("auto", "none", "linear", "yarn", "longrope")
PRIORITIES = ("low", "normal", "medium", "high", "realtime")
CPU_POLL = 50  # llama.cpp's own
MOST_CORES = 512  # GGML_MAX_N_THREADS: bits of a mask
_MASK = re.compile(r"^(0[xX])?[0-9a-fA-F]+$")
_RANGES = re.compile(r"^\d+(-\d+)?(,\d+(-\d+)?)*$")
# what Python's patterns have and C++'s (std::regex, ECMAScript) do not
_ONLY_HERE = re.compile(r"\(\?(?![:=!])|\\[AZzGQ]|[*+?}]\+")


@dataclass(frozen=True, slots=True)
class PlaceOptions:
    """Where the weights of one model go; how many layers go there is said elsewhere (gpu_layers).

    Attributes:
        devices: names of the devices that may take layers, comma-separated; "" means every GPU,
            "none" the CPU alone.
        split_mode: "layer" (and its cache on one device), "row" (matrices over all devices) or
            "none" (one device takes everything).
        tensor_split: shares of the devices, comma-separated; "" fills them by what is free.
        main_gpu: the device of split mode "none", and of what split mode "row" leaves whole.
        cpu_moe, n_cpu_moe: keep the experts of all layers, or of the first N, in RAM; neither
            given, they stay there as far as the devices are too small.
        overrides: "PATTERN=DEVICE": tensors whose name has a match of the pattern.
    """

    devices: str = ""
    split_mode: str = "layer"
    tensor_split: str = ""
    main_gpu: int = 0
    cpu_moe: bool = False
    n_cpu_moe: int | None = None
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.split_mode not in SPLIT_MODES:
            raise UsageError(
                f"unknown split mode {self.split_mode!r}", f"choose one of {', '.join(SPLIT_MODES)}"
            )
        if not 0 <= self.main_gpu <= 255:
            raise UsageError(f"main-gpu must be the number of a device, got {self.main_gpu}")
        if self.n_cpu_moe is not None and not 0 <= self.n_cpu_moe <= 4096:
            raise UsageError(f"n-cpu-moe must be a number of layers, got {self.n_cpu_moe}")
        if self.cpu_moe and self.n_cpu_moe is not None:
            raise UsageError("give --cpu-moe or --n-cpu-moe, not both")
        if "" in self.names and self.devices:
            raise UsageError(f"device needs names separated by commas, got {self.devices!r}")
        if len(set(self.names)) < len(self.names):
            raise UsageError(f"device names one twice: {self.devices}")
        _ = self.shares, self.moves

    @property
    def names(self) -> tuple[str, ...]:
        """The devices by name; () where nobody chose."""
        return tuple(name.strip() for name in self.devices.split(",")) if self.devices else ()

    @property
    def shares(self) -> tuple[float, ...]:
        """``tensor_split`` as numbers.

        Raises:
            UsageError: they are not numbers, or are all 0.
        """
        if not self.tensor_split:
            return ()
        try:
            shares = tuple(float(text) for text in re.split(r"[,/]", self.tensor_split))
        except ValueError:
            shares = ()
        if not shares or not all(math.isfinite(s) and s >= 0 for s in shares) or not any(shares):
            raise UsageError(
                f"cannot read the tensor split {self.tensor_split!r}",
                "write one share a device, for example 3,1",
            )
        return shares

    @property
    def moves(self) -> tuple[tuple[str, str], ...]:
        """``overrides`` as (pattern, device).

        Raises:
            UsageError: one is not PATTERN=DEVICE, or llama.cpp could not read its pattern.
        """
        found = []
        for text in self.overrides:
            pattern, _, device = text.rpartition("=")
            if not pattern or not device.strip():
                raise UsageError(
                    f"cannot read the override {text!r}", r"write it as '\.ffn_.*_exps=CPU'"
                )
            try:
                re.compile(pattern)
            except re.error as error:
                raise UsageError(f"the pattern {pattern!r} is not one: {error}") from None
            if _ONLY_HERE.search(pattern) or "\0" in pattern or len(pattern) > 512:
                raise UsageError(f"llama.cpp cannot read the pattern {pattern!r}")
            found.append((pattern, device.strip()))
        return tuple(found)


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine is meant."""
    if host.lower().rstrip(".") == "localhost" or host.lower().endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def endpoints(text: str) -> tuple[tuple[str, int], ...]:
    """(host, port) of llama.cpp workers, which are written HOST:PORT and separated by commas.

    Raises:
        UsageError: one is something else; llama.cpp would end the process.
    """
    found = []
    for part in text.split(",") if text else ():
        host, colon, port = part.strip().rpartition(":")
        if not (host and colon and port.isdigit() and 0 < int(port) < 2**16) or ":" in host:
            raise UsageError(
                f"cannot read the worker {part.strip()!r}",
                "write HOST:PORT, for example 127.0.0.1:50052; llama.cpp knows no IPv6",
            )
        found.append((host, int(port)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class CpuOptions:
    """Which cores compute, and how.

    Attributes:
        numa: how to spread over the nodes of a machine that has several; "numactl" keeps to the
            nodes that numactl allows.
        mask, cores: the logical cores that may compute, as a hexadecimal mask or as ranges
            ("0-7,16"); "" means any.
        strict: each thread keeps its own core of them.
        priority: of the computing threads.
        poll: how long they wait busily between passes, 0 (they sleep) to 100.
    """

    numa: str = "off"
    mask: str = ""
    cores: str = ""
    strict: bool = False
    priority: str = "normal"
    poll: int = CPU_POLL

    def __post_init__(self) -> None:
        if self.numa not in NUMA:
            raise UsageError(f"numa must be one of {', '.join(NUMA)}, got {self.numa!r}")
        if self.priority not in PRIORITIES:
            raise UsageError(f"prio must be one of {', '.join(PRIORITIES)}, got {self.priority!r}")
        if not 0 <= self.poll <= 100:
            raise UsageError(f"poll must be from 0 to 100, got {self.poll}")
        if self.mask and self.cores:
            raise UsageError("give --cpu-mask or --cpu-range, not both")
        _ = self.allowed

    @property
    def allowed(self) -> tuple[int, ...]:
        """The logical cores that may compute; () means any.

        Raises:
            UsageError: the mask or the ranges cannot be read, or name no core.
        """
        if self.mask:
            if not _MASK.match(self.mask):
                raise UsageError(f"cpu-mask must be hexadecimal, got {self.mask!r}")
            bits = int(self.mask, 16)
            found = {i for i in range(bits.bit_length()) if bits >> i & 1}
        elif self.cores:
            if not _RANGES.match(self.cores) or len(self.cores) > 1024:
                raise UsageError(f"cannot read the cores {self.cores!r}", "write 0-7,16 or 3")
            found = set()
            for part in self.cores.split(","):
                first, _, last = part.partition("-")
                if int(last or first) >= MOST_CORES:
                    raise UsageError(f"cores are counted from 0 to {MOST_CORES - 1}")
                found.update(range(int(first), int(last or first) + 1))
        else:
            return ()
        if not found or max(found) >= MOST_CORES:
            raise UsageError(f"cores are counted from 0 to {MOST_CORES - 1}, and one is needed")
        return tuple(sorted(found))

    @property
    def usual(self) -> bool:
        """Whether llama.cpp's own threads will do."""
        return not self.allowed and self.priority == "normal" and self.poll == CPU_POLL


@dataclass(frozen=True, slots=True)
class RopeOptions:
    """How positions are turned into angles; whatever is unset comes from the model.

    Attributes:
        scaling: kind of scaling for contexts beyond the trained length.
        scale: stretches the context by this factor (``freq_scale`` is its inverse).
        freq_base, freq_scale: of RoPE.
        yarn_orig_ctx: the trained length that YaRN starts from.
        yarn_ext_factor: mix of extrapolation; 0 is full interpolation.
        yarn_attn_factor, yarn_beta_fast, yarn_beta_slow: as in the paper.
    """

    scaling: str = "auto"
    scale: float | None = None
    freq_base: float | None = None
    freq_scale: float | None = None
    yarn_orig_ctx: int | None = None
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None

    def __post_init__(self) -> None:
        if self.scaling not in ROPE_SCALINGS:
            raise UsageError(
                f"unknown RoPE scaling {self.scaling!r}", f"one of {', '.join(ROPE_SCALINGS)}"
            )
        if self.scale is not None and self.freq_scale is not None:
            raise UsageError("give --rope-scale or --rope-freq-scale, not both")
        for name, value, low, high in (
            ("rope-scale", self.scale, 1e-3, 1e3),
            ("rope-freq-base", self.freq_base, 1.0, 1e12),
            ("rope-freq-scale", self.freq_scale, 1e-3, 1e3),
            ("yarn-ext-factor", self.yarn_ext_factor, 0.0, 1e3),
            ("yarn-attn-factor", self.yarn_attn_factor, 1e-3, 1e3),
            ("yarn-beta-fast", self.yarn_beta_fast, 1e-3, 1e6),
            ("yarn-beta-slow", self.yarn_beta_slow, 1e-3, 1e6),
        ):
            if value is not None and not (math.isfinite(value) and low <= value <= high):
                raise UsageError(f"{name} must be from {low:g} to {high:g}, got {value!r}")
        if self.yarn_orig_ctx is not None and not 1 <= self.yarn_orig_ctx <= 2**24:
            raise UsageError(f"yarn-orig-ctx must be a length in tokens, got {self.yarn_orig_ctx}")

    @property
    def given(self) -> dict[str, float]:
        """What was chosen, under the names of llama.cpp's context parameters."""
        chosen: dict[str, float | None] = {
            "rope_freq_base": self.freq_base,
            "rope_freq_scale": 1 / self.scale if self.scale is not None else self.freq_scale,
            "yarn_orig_ctx": self.yarn_orig_ctx,
            "yarn_ext_factor": self.yarn_ext_factor,
            "yarn_attn_factor": self.yarn_attn_factor,
            "yarn_beta_fast": self.yarn_beta_fast,
            "yarn_beta_slow": self.yarn_beta_slow,
        }
        if self.scaling != "auto":
            chosen["rope_scaling_type"] = ROPE_SCALINGS.index(self.scaling) - 1
        return {name: value for name, value in chosen.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter and its strength."""

    path: str
    scale: float = 1.0

    @staticmethod
    def read(text: str) -> Adapter:
        """From FILE or FILE:SCALE.

        Raises:
            UsageError: no file, or a scale out of range.
        """
        path, colon, scale = text.rpartition(":")
        number = 1.0
        if colon:
            try:
                number = float(scale)
            except ValueError:  # a path with a colon in it
                path = text
        else:
            path = text
        if not path or not math.isfinite(number) or abs(number) > 100:
            raise UsageError(f"cannot read the adapter {text!r}", "write FILE or FILE:SCALE")
        return Adapter(path, number)

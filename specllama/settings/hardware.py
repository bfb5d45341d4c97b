"""Options of the machine: places of weights, cores that compute, angles of positions.

Values are checked here as far as they can be without a model and a machine; ``backend.planning``
and ``backend.llama_place`` compare them with both. Light to import.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from dataclasses import dataclass

from specllama.errors import UsageError
from specllama.settings.setting import check, long_context, placement

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
    """The places of one model's weights; ``gpu_layers`` gives the number of layers there.

    Attributes:
        split_mode: "layer" (and its cache on one device), "row" (matrices over all devices) or
            "none" (one device takes everything).
        main_gpu: the device of split mode "none", and of what split mode "row" leaves whole.
        cpu_moe, n_cpu_moe: neither given, experts stay in RAM as far as the devices are too small.
    """

    devices: str = placement(
        "",
        "Devices for the target, separated by commas; none is the CPU alone. Unset: every GPU. "
        "doctor names them.",
        name="device",
        metavar="NAME,…",
        draft="Devices for the draft model.",
    )
    split_mode: str = placement(
        "layer",
        "Over several devices: whole layers, the rows of each matrix, or no splitting.",
        choices=SPLIT_MODES,
    )
    tensor_split: str = placement(
        "",
        "Share of the model on each device, such as 3,1. Unset: in proportion to free memory.",
        metavar="N,N,…",
    )
    main_gpu: int = placement(
        0,
        "Number of the device that holds the parts that are not split.",
        within=(0, 255),
    )
    cpu_moe: bool = placement(
        False,
        "Keep the experts of every layer in RAM.",
        draft="Keep the draft model's experts in RAM.",
    )
    n_cpu_moe: int | None = placement(
        None,
        "Keep the experts of the first N layers in RAM. Unset: as many as the GPUs have no room "
        "for.",
        within=(0, 4096),
        draft="Keep the experts of the draft model's first N layers in RAM.",
    )
    overrides: tuple[str, ...] = placement(
        (),
        "Put the tensors whose names match a pattern on a device; repeatable.",
        name="override-tensor",
        flags=("-ot", "--override-tensor"),
        metavar="PATTERN=DEVICE",
        draft="Put tensors of the draft model on a device; repeatable.",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.cpu_moe and self.n_cpu_moe is not None:
            raise UsageError("give --cpu-moe or --n-cpu-moe, not both")
        if "" in self.names and self.devices:
            raise UsageError(f"device needs names separated by commas, got {self.devices!r}")
        if len(set(self.names)) < len(self.names):
            raise UsageError(f"device names one twice: {self.devices}")
        _ = self.shares, self.moves

    @property
    def names(self) -> tuple[str, ...]:
        """The devices by name; () if the user chose none."""
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
    """True if the host means only this machine."""
    if host.lower().rstrip(".") == "localhost" or host.lower().endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def endpoints(text: str) -> tuple[tuple[str, int], ...]:
    """Read the (host, port) of llama.cpp workers, written HOST:PORT and separated by commas.

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
    """The cores that compute, and their use; "" for both mask and cores means any."""

    numa: str = placement(
        "off",
        "On a machine of several NUMA nodes: distribute over all, isolate on the one it starts on, "
        "or keep to numactl's.",
        choices=NUMA,
    )
    mask: str = placement(
        "",
        "CPU cores that may compute, as a hexadecimal mask.",
        name="cpu-mask",
        metavar="HEX",
    )
    cores: str = placement(
        "",
        "CPU cores that may compute, as ranges.",
        name="cpu-range",
        metavar="0-7,16",
    )
    strict: bool = placement(
        False,
        "Bind each computing thread to one core of --cpu-mask or --cpu-range.",
        name="cpu-strict",
    )
    priority: str = placement(
        "normal",
        "Priority of the computing threads.",
        name="prio",
        choices=PRIORITIES,
    )
    poll: int = placement(
        CPU_POLL,
        "How busily the computing threads wait between passes: 0 sleeps, 100 never sleeps.",
        within=(0, 100),
    )

    def __post_init__(self) -> None:
        check(self)
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
        """True if llama.cpp's own threads will do."""
        return not self.allowed and self.priority == "normal" and self.poll == CPU_POLL


@dataclass(frozen=True, slots=True)
class RopeOptions:
    """The conversion of positions to angles; unset fields come from the model. The parameters of
    YaRN are those of the paper."""

    scaling: str = long_context(
        "auto",
        "Scaling of positions beyond the trained length; auto is the model's.",
        name="rope-scaling",
        choices=ROPE_SCALINGS,
    )
    scale: float | None = long_context(
        None,
        "Stretch the context by this factor.",
        name="rope-scale",
        within=(1e-3, 1e3),
    )
    freq_base: float | None = long_context(
        None,
        "Base frequency of RoPE. Unset: the model's.",
        name="rope-freq-base",
        within=(1, 1e12),
    )
    freq_scale: float | None = long_context(
        None,
        "The inverse of --rope-scale.",
        name="rope-freq-scale",
        within=(1e-3, 1e3),
    )
    yarn_orig_ctx: int | None = long_context(
        None,
        "Trained length that YaRN starts from. Unset: the model's.",
        within=(1, 2**24),
    )
    yarn_ext_factor: float | None = long_context(
        None,
        "How much YaRN extrapolates; 0 only interpolates.",
        within=(0, 1e3),
    )
    yarn_attn_factor: float | None = long_context(
        None, "Factor by which YaRN scales attention.", within=(1e-3, 1e3)
    )
    yarn_beta_fast: float | None = long_context(
        None,
        "Rotations above which YaRN leaves a dimension as it is (beta_fast).",
        within=(1e-3, 1e6),
    )
    yarn_beta_slow: float | None = long_context(
        None,
        "Rotations below which YaRN only interpolates a dimension (beta_slow).",
        within=(1e-3, 1e6),
    )

    def __post_init__(self) -> None:
        check(self)
        if self.scale is not None and self.freq_scale is not None:
            raise UsageError("give --rope-scale or --rope-freq-scale, not both")

    @property
    def given(self) -> dict[str, float]:
        """The chosen values, under the names of llama.cpp's context parameters."""
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
        """Read FILE or FILE:SCALE.

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
        return Adapter(os.path.expanduser(path), number)

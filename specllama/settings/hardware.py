"""Options of the machine: places of weights, workers, adapters.

Values are checked here as far as they can be without a model and a machine; ``backend.planning``
and ``backend.llama`` compare them with both. Light to import.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from dataclasses import dataclass

from specllama.errors import UsageError
from specllama.settings.setting import check, placement

# what Python's patterns have and C++'s (std::regex, ECMAScript) do not
_ONLY_HERE = re.compile(r"\(\?(?![:=!])|\\[AZzGQ]|[*+?}]\+")


@dataclass(frozen=True, slots=True)
class PlaceOptions:
    """The places of one model's weights; ``gpu_layers`` gives the number of layers there.

    Attributes:
        cpu_moe, n_cpu_moe: neither given, experts stay in RAM as far as the devices are too small.
    """

    devices: str = placement(
        "",
        "Devices for the target, separated by commas; none is the CPU alone. Unset: every GPU. "
        "doctor names them.",
        name="device",
        metavar="NAME,…",
    )
    tensor_split: str = placement(
        "",
        "Share of the model on each device, such as 3,1. Unset: in proportion to free memory.",
        metavar="N,N,…",
        flag=False,
    )
    cpu_moe: bool = placement(False, "Keep the experts of every layer in RAM.")
    n_cpu_moe: int | None = placement(
        None,
        "Keep the experts of the first N layers in RAM. Unset: as many as the GPUs have no room "
        "for.",
        within=(0, 4096),
    )
    overrides: tuple[str, ...] = placement(
        (),
        "Put the tensors whose names match a pattern on a device; repeatable.",
        name="override-tensor",
        flags=("-ot", "--override-tensor"),
        metavar="PATTERN=DEVICE",
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

"""The places of a pair's weights: layers and experts by device, in words and in bytes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specllama.backend.devices import Device
from specllama.models import memory
from specllama.models.gguf_format import EXPERTS
from specllama.text import size

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader

CPU = "CPU"


@dataclass(frozen=True, slots=True)
class Placement:
    """The places of one model's layers.

    Attributes:
        layers: how many to offload, the output layer counted (llama.cpp's ``n_gpu_layers``).
        of: how many there are, the output layer counted.
        split: offloaded layers per GPU, in device order: the first GPU has the first of them
            (llama.cpp's ``tensor_split``).
        bytes: per GPU.
        experts: of the first so many layers, the experts stay in RAM.
        expert_bytes: what these are, of layers that are offloaded.
        moves: (pattern, device) of tensors that were given a place, the first match counts.
        devices: those that take something of it, the only ones that llama.cpp is given.
        usable: which of the plan's devices these are.
    """

    role: str
    layers: int
    of: int
    split: tuple[int, ...]
    bytes: tuple[int, ...]
    experts: int = 0
    expert_bytes: int = 0
    moves: tuple[tuple[str, str], ...] = ()
    devices: tuple[str, ...] = ()
    usable: tuple[bool, ...] = ()

    @property
    def whole(self) -> bool:
        return self.layers >= self.of

    @property
    def own_split(self) -> tuple[int, ...]:
        """``split`` over the devices that llama.cpp is given."""
        return tuple(n for n, may in zip(self.split, self.usable, strict=True) if may)

    @property
    def patterns(self) -> tuple[tuple[str, str], ...]:
        """Every (pattern, device) for llama.cpp: the user's choices come first."""
        if self.experts >= self.of - 1 > 0:
            return (*self.moves, (EXPERTS, CPU))
        kept = tuple((rf"blk\.{i}{EXPERTS}", CPU) for i in range(self.experts))
        return (*self.moves, *kept)

    def lines(self, gpus: Sequence[Device]) -> list[str]:
        """Describe it in words, for ``-v`` and ``doctor``."""
        where = ", ".join(
            f"{n} on {device.name} ({size(taken)})"
            for n, device, taken in zip(self.split, gpus, self.bytes, strict=True)
            if n
        )
        lines = [
            f"offload: {self.role} {self.layers} of {self.of} layers"
            + (f": {where}" if where else ": all on the CPU")
        ]
        if self.experts and self.layers:
            which = f"the first {self.experts} of {self.of - 1} layers"
            which = "every layer" if self.experts >= self.of - 1 else which
            lines.append(
                f"offload: {self.role} experts of {which} in RAM ({size(self.expert_bytes)})"
            )
        return lines


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """A pair laid out over the devices."""

    target: Placement
    draft: Placement | None
    gpus: tuple[Device, ...]
    warnings: tuple[str, ...] = field(default=())

    @property
    def uses_ram(self) -> bool:
        """True if some weights or the cache of some layers lie in RAM, or GPUs share it."""
        placed = [one for one in (self.target, self.draft) if one is not None]
        in_ram = any(not one.whole or one.expert_bytes for one in placed)
        return in_ram or any(device.shares_ram for device in self.gpus)

    def as_good_as(self, other: OffloadPlan) -> bool:
        """True if the GPUs hold no less of the pair than in the other plan."""

        def key(plan: OffloadPlan) -> tuple[int, int, int]:
            draft = plan.draft.layers if plan.draft is not None else 0
            return plan.target.layers, -plan.target.experts, draft

        return all(mine >= theirs for mine, theirs in zip(key(self), key(other), strict=True))

    def lines(self) -> list[str]:
        """Describe the plan in words, for ``-v`` and ``doctor``."""
        if not self.gpus:
            return ["offload: no GPU that this build can use; everything runs on the CPU"]
        placed = [one for one in (self.target, self.draft) if one is not None]
        lines = [line for one in placed for line in one.lines(self.gpus)]
        return lines + [f"offload: {text}" for text in self.warnings]


def left_in_ram(
    need: memory.PairMemory, plan: OffloadPlan, target: GgufHeader, draft: GgufHeader | None
) -> memory.PairMemory:
    """Return the RAM that a pair needs when some of its weights lie in the memory of GPUs.

    Args:
        need: the pair's memory with everything in one place.
    """
    if all(device.shares_ram for device in plan.gpus):
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
    first = placement.of - placement.layers
    moved = sum(layer_weights(header)[first:]) - placement.expert_bytes
    left = first / max(placement.of - 1, 1)  # the output layer is the first to move
    in_ram = max(need.weights - moved, 0)
    return dataclasses.replace(
        need,
        weights=in_ram,
        repacked=int(need.repacked * in_ram / max(need.weights, 1)),
        kv=int(need.kv * left),
        compute=need.compute if first or placement.expert_bytes else 0,
    )


def fewer_layers(plan: OffloadPlan) -> OffloadPlan | None:
    """Return the next smaller plan after a load failed on the GPU; None if nothing is offloaded.

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
    return dataclasses.replace(
        placement,
        layers=keep,
        split=tuple(split),
        bytes=sizes,
        expert_bytes=int(placement.expert_bytes * share),
    )


# -- the size of each layer: weights, experts among them, KV --


def layer_weights(
    header: GgufHeader, *, moves: Sequence[tuple[str, str]] = (), experts: bool = False
) -> list[int]:
    """Return the weights of each layer; the output layer (with tensors of no layer) comes last.

    Args:
        moves: patterns of tensors that have a place of their own, and so are left out.
        experts: count those alone.
    """
    n = header.block_count
    sizes = [0] * (n + 1)
    for tensor in header.tensors:
        moved = any(re.search(pattern, tensor.name) for pattern, _ in moves)
        if moved or (experts and not tensor.is_expert):
            continue
        layer = layer_of(tensor.name, n)
        if layer < n or tensor.name != "token_embd.weight" or "output.weight" not in header.by_name:
            # the embedding table itself stays on the CPU; tied, a copy of it is the output
            sizes[layer] += tensor.n_bytes
    return sizes


def layer_of(name: str, n: int) -> int:
    """Return the layer of a tensor; ``n`` for a tensor of no layer."""
    first, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if first == "blk" and number.isdigit() and int(number) < n else n


def layer_bytes(
    header: GgufHeader, n_ctx: int, *, moves: Sequence[tuple[str, str]] = (), **kv: Any
) -> list[int]:
    """Return the weights and KV of each layer, the output layer last."""
    *sizes, last = layer_weights(header, moves=moves)
    per_layer = memory.kv_bytes(header, n_ctx, **kv) // max(header.block_count, 1)
    return [*(size + per_layer for size in sizes), last]

"""The planned places of a pair's weights: layers and experts by device.

Arithmetic on headers: it can be tested with devices that do not exist. What was asked for is
compared with model and devices here, because llama.cpp ends the process on some of it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from specllama.backend.devices import Device, gpus
from specllama.backend.placement import CPU, OffloadPlan, Placement, layer_bytes, layer_weights
from specllama.errors import UsageError
from specllama.models import memory
from specllama.settings.hardware import PlaceOptions

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader
    from specllama.settings.params import EngineOptions

# left free on every device: driver, display, fragmentation
RESERVE_BYTES = 512 << 20
USABLE = 0.92

# -- what was asked for ----------------------------------------------------------------------------


def chosen_devices(options: PlaceOptions, found: Sequence[Device]) -> tuple[Device, ...]:
    """Choose the devices that may take layers.

    Raises:
        UsageError: there is no such device, not as many as were counted on, or one cannot do what
            is asked of it.
    """
    devices: tuple[Device, ...] = tuple(gpus(found))
    if options.names == ("none",):
        devices = ()
    elif options.names:
        by_name = {device.name: device for device in found if device.kind != "cpu"}
        for name in options.names:
            if name not in by_name:
                known = ", ".join(by_name) or "none, so only: --device none"
                raise UsageError(f"there is no device {name!r} for layers", f"there is {known}")
        devices = tuple(by_name[name] for name in options.names)
    if options.shares and len(options.shares) != len(devices):
        raise UsageError(
            f"--tensor-split has {len(options.shares)} shares, there are {len(devices)} devices"
        )
    return devices


def checked_moves(
    options: PlaceOptions, header: GgufHeader, devices: Sequence[Device]
) -> tuple[tuple[str, str], ...]:
    """Check the overrides of tensors.

    Raises:
        UsageError: a device is not there, or no tensor matches.
    """
    known = [CPU, *(device.name for device in devices)]
    for pattern, device in options.moves:
        if device not in known:
            raise UsageError(
                f"there is no device {device!r} for {pattern!r}", f"there is {', '.join(known)}"
            )
        if not any(re.search(pattern, tensor.name) for tensor in header.tensors):
            raise UsageError(f"no tensor of {header.path.name} matches {pattern!r}")
    wanted = options.cpu_moe or options.n_cpu_moe
    if wanted and not any(layer_weights(header, experts=True)):
        raise UsageError(f"{header.path.name} has no experts to keep in RAM")
    return options.moves


# -- planning --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Placed:
    """One model's sizes and options, for placing it."""

    role: str
    options: PlaceOptions
    asked: str  # layers: "auto", "all" or a count
    sizes: list[int]  # with KV, the output layer last
    experts: list[int]
    moves: tuple[tuple[str, str], ...]
    buffer: int
    pipelining: int  # on top of it, where whole layers lie on several devices
    devices: tuple[str, ...]  # of the plan
    usable: tuple[bool, ...]  # which of them may be used

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of each of the plan's devices; () where the user chose none."""
        own = iter(self.options.shares)
        return (
            tuple(next(own) if may else 0.0 for may in self.usable) if self.options.shares else ()
        )

    @property
    def of(self) -> int:
        return len(self.sizes)

    def kept(self, experts: int) -> list[int]:
        """Return each layer's bytes on a GPU when the experts of the first N layers stay in RAM."""
        return [size - (self.experts[i] if i < experts else 0) for i, size in enumerate(self.sizes)]


def plan_offload(
    target: GgufHeader,
    draft: GgufHeader | None,
    found: Sequence[Device],
    options: EngineOptions,
    *,
    n_ctx: int | None = None,
    lanes: int = 1,
) -> OffloadPlan:
    """Decide which parts of target and draft go to the GPUs.

    "auto" takes what fits after buffers and a reserve. Of a model with experts, these are the first
    to stay in RAM, from the first layer on: a token uses few of them. A draft goes where its target
    goes: whole, while layers of the target fit beside it. A number or "all" is taken as asked, with
    a warning if it will not fit.

    Args:
        found: all devices; the CPU among them is ignored. lanes: conversations at once.
        n_ctx: context length; None takes the engine's default.

    Raises:
        UsageError: something was asked for that is not there.
    """
    place, draft_place = options.place, PlaceOptions(devices=options.draft_devices)
    context = memory.padded_ctx(memory.context_length(target, n_ctx))
    kv = {"type_k": options.kv_type_k, "type_v": options.kv_type_v}
    n_ubatch = options.batch(on_gpu=True)
    buffers: dict[str, Any] = {"n_ubatch": n_ubatch, "flash_attn": options.flash_attn != "off"}
    on_gpu: dict[str, Any] = {"on_cpu": False, "lanes": lanes}
    own = chosen_devices(place, found)
    drafts_own = chosen_devices(draft_place, found) if draft_place.names else own
    devices = (*own, *(device for device in drafts_own if device not in own))
    free = [max(int(device.free * USABLE) - RESERVE_BYTES, 0) for device in devices]

    def sizes(header: GgufHeader, moves: Sequence[tuple[str, str]]) -> list[int]:
        """Return the sizes with KV, by layer; the output layer last."""
        shape = {"max_rows": options.max_rows, "lanes": lanes}
        *every, last = layer_bytes(header, context, moves=moves, **shape, **kv)
        if not options.swa_full and header.block_count:
            saved = memory.window_bytes(header, context, n_ubatch=n_ubatch, **kv)
            every = [max(size - saved // header.block_count, 0) for size in every]
        return [*every, last]

    def model(role: str, header: GgufHeader, asked: str, place: PlaceOptions) -> _Placed:
        outputs = options.max_rows if role == "target" else options.max_leaves
        on = own if role == "target" else drafts_own
        return _Placed(
            role=role, options=place, asked=asked, sizes=sizes(header, place.moves),
            experts=layer_weights(header, moves=place.moves, experts=True),
            moves=checked_moves(place, header, on),
            buffer=memory.compute_bytes(header, context, n_outputs=outputs, **on_gpu, **buffers),
            pipelining=memory.pipelining_bytes(header, context, **buffers),
            devices=tuple(device.name for device in devices),
            usable=tuple(device in on for device in devices),
        )  # fmt: skip

    warnings: list[str] = []
    first = model("target", target, options.gpu_layers, place)
    if draft is None:
        return OffloadPlan(_place(first, free, warnings), None, devices, tuple(warnings))
    second = model("draft", draft, options.draft_gpu_layers, draft_place)
    beside, said = _place(second, free, warnings), list[str]()
    where = _place(first, _left(free, beside), said)
    auto = options.draft_gpu_layers == "auto"
    if auto and not (beside.whole and (where.layers or draft_place.names)):
        # half a draft on a GPU costs a transfer per step and gains little
        said, beside = [], _place(dataclasses.replace(second, asked="0"), free, [])
        where = _place(first, _left(free, beside), said)
    return OffloadPlan(where, beside, devices, (*warnings, *said))


def _left(free: list[int], taken: Placement) -> list[int]:
    """Return the bytes of each device that stay free once a model is placed."""
    return [max(size - used, 0) for size, used in zip(free, taken.bytes, strict=True)]


def _place(model: _Placed, free: list[int], warnings: list[str]) -> Placement:
    """Place the last layers on the devices, first to first, as in llama.cpp."""
    of, asked = model.of, model.asked
    free = [size if may else 0 for size, may in zip(free, model.usable, strict=True)]
    none = (0,) * len(free)
    nowhere = _on_devices(Placement(model.role, 0, of, none, none, moves=model.moves), model)
    if not free or asked == "0":
        if asked not in ("auto", "0") and not free:
            warnings.append(f"the {model.role} cannot be offloaded: there is no usable GPU")
        return nowhere
    wanted = of if asked in ("auto", "all") else min(int(asked), of)

    def fit(buffer: int) -> tuple[int, int, list[int] | None]:
        return _fitting(model, wanted, [max(size - buffer, 0) for size in free])

    buffer = model.buffer
    layers, experts, split = fit(buffer)
    whole = split is not None and layers == of and not (experts or model.moves)
    if whole and sum(map(bool, split or ())) > 1:
        buffer += model.pipelining
        roomier = fit(buffer)
        if roomier[:2] == (of, 0):  # else llama.cpp takes it of the reserve, or does without
            layers, experts, split = roomier
    if asked != "auto" and layers < wanted:
        warnings.append(
            f"{wanted} layers of the {model.role} need more GPU memory than is free;"
            f" {layers} would fit (-ngl auto)"
        )
        split = split or [0] * len(free)
        split[-1] += wanted - layers
        layers = wanted
    if not layers or split is None:
        return nowhere
    sizes = model.kept(experts)
    used, at = [], of - layers
    for count in split:
        used.append(sum(sizes[at : at + count]) + buffer if count else 0)
        at += count
    placed = dataclasses.replace(
        nowhere, layers=layers, split=tuple(split), bytes=tuple(used), experts=experts,
        expert_bytes=sum(model.experts[of - layers : experts]),
    )  # fmt: skip
    return _on_devices(placed, model)


def _on_devices(placement: Placement, model: _Placed) -> Placement:
    """Drop the devices that take nothing: llama.cpp keeps buffers on every one it is given."""
    moved = {device for _, device in model.moves}
    parts = zip(placement.split, model.devices, strict=True)
    usable = tuple(n > 0 or device in moved for n, device in parts)
    names = (device for device, may in zip(model.devices, usable, strict=True) if may)
    return dataclasses.replace(placement, usable=usable, devices=tuple(names))


def _fitting(model: _Placed, wanted: int, room: list[int]) -> tuple[int, int, list[int] | None]:
    """Return the (layers, experts of the first layers in RAM, layers per device) that fit."""
    options, of = model.options, model.of
    blocks = of - 1

    def fill(layers: int, experts: int) -> list[int] | None:
        return _fill(model.kept(experts)[of - layers :], room, model.shares)

    if options.cpu_moe or options.n_cpu_moe is not None or not any(model.experts):
        fixed = blocks if options.cpu_moe else min(options.n_cpu_moe or 0, blocks)
    else:
        for experts in range(blocks + 1):  # keep as few in RAM as possible
            if (split := fill(wanted, experts)) is not None:
                return wanted, experts, split
        fixed = blocks
    # the output layer is the last one: it moves first, and stays as long as anything does
    for layers in range(wanted, 0, -1):
        if (split := fill(layers, fixed)) is not None:
            return layers, fixed, split
    return 0, fixed, None


def _fill(
    layers: Sequence[int], room: Sequence[int], shares: Sequence[float] = ()
) -> list[int] | None:
    """Return the number of layers on each device, in order; None if they do not fit."""
    split = [0] * len(room)
    if shares:  # as llama.cpp does: layer i goes where i / n falls among the sums of the shares
        ends = [end / sum(shares) for end in accumulate(shares)]
        used = [0] * len(room)
        for i, size in enumerate(layers):
            device = next((c for c, end in enumerate(ends) if i / len(layers) < end), len(room) - 1)
            split[device] += 1
            used[device] += size
        return split if all(u <= r for u, r in zip(used, room, strict=True)) else None
    taken, device = 0, 0
    for size in layers:
        while device < len(room) and taken + size > room[device]:
            device, taken = device + 1, 0
        if device == len(room):
            return None
        split[device] += 1
        taken += size
    return split

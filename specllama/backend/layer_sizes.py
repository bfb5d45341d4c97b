"""The size of each layer of a model, from its header: weights, experts among them, KV."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specllama.models import memory

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader


def layer_weights(header: GgufHeader) -> list[int]:
    """Return the weights of each layer; the output layer (with tensors of no layer) comes last."""
    n = header.block_count
    sizes = [0] * (n + 1)
    for tensor in header.tensors:
        layer = layer_of(tensor.name, n)
        if layer < n or tensor.name != "token_embd.weight" or "output.weight" not in header.by_name:
            # the embedding table itself stays on the CPU; tied, a copy of it is the output
            sizes[layer] += tensor.n_bytes
    return sizes


def expert_weights(header: GgufHeader) -> list[int]:
    """Return the bytes of experts in each layer; the output layer comes last."""
    sizes = [0] * (header.block_count + 1)
    for tensor in header.tensors:
        if tensor.is_expert:
            sizes[layer_of(tensor.name, header.block_count)] += tensor.n_bytes
    return sizes


def layer_of(name: str, n: int) -> int:
    """Return the layer of a tensor; ``n`` for a tensor of no layer."""
    first, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if first == "blk" and number.isdigit() and int(number) < n else n


def layer_bytes(header: GgufHeader, n_ctx: int, **kv: Any) -> list[int]:
    """Return the weights and KV of each layer, the output layer last."""
    sizes = layer_weights(header)
    per_layer = memory.kv_bytes(header, n_ctx, **kv) // max(header.block_count, 1)
    return [size + per_layer for size in sizes[:-1]] + [sizes[-1]]


def without_moved(
    sizes: list[int],
    header: GgufHeader,
    moves: Sequence[tuple[str, str]],
    *,
    experts: bool = False,
) -> list[int]:
    """Return the sizes without the tensors that have a place of their own."""
    if not moves:
        return sizes
    left = list(sizes)
    for tensor in header.tensors:
        if experts and not tensor.is_expert:
            continue
        if any(re.search(pattern, tensor.name) for pattern, _ in moves):
            at = layer_of(tensor.name, header.block_count)
            left[at] = max(left[at] - tensor.n_bytes, 0)
    return left

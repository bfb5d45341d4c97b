"""Layers that see only a sliding window, and the memory that they save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specllama.models.ggml_types import KV_BYTES
from specllama.models.memory import padded_ctx

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader

# every n-th layer has full attention in architectures that do not spell the pattern out
_PERIODS = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "cohere2": 4, "exaone4": 4}


def windowed_layers(header: GgufHeader) -> list[bool]:
    """Return for each layer whether it sees only a window."""
    n = header.block_count
    if not header.sliding_window:
        return [False] * n
    key = header.own("attention.sliding_window_pattern")
    if key in header.arrays:
        pattern = [bool(value) for value in header.array(key)]
        return (pattern + [False] * n)[:n]
    period = header.integer(key) or _PERIODS.get(header.architecture, 1)
    if period == 1:
        return [header.architecture in _PERIODS] * n
    return [(i + 1) % period != 0 for i in range(n)]


def saved_bytes(
    header: GgufHeader, n_ctx: int, *, n_ubatch: int, type_k: str = "f16", type_v: str = "f16"
) -> int:
    """Return the bytes that the cache saves when windowed layers keep only their window."""
    cells = padded_ctx(n_ctx)
    gone = max(cells - padded_ctx(header.sliding_window + n_ubatch), 0)
    per_cell = header.key_length * KV_BYTES[type_k] + header.value_length * KV_BYTES[type_v]
    layers = zip(header.head_counts_kv, windowed_layers(header), strict=False)
    return int(gone * per_cell * sum(heads for heads, windowed in layers if windowed))

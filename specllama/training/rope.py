"""Rotation of queries and keys by their position, as llama.cpp's NORM order has it."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=8)
def rope_tables(head_size: int, base: float, length: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, one row per position, one column per pair."""
    half = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    angles = torch.arange(length, dtype=torch.float64)[:, None] * base**-half
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighboring pairs (2i, 2i+1)."""
    pairs = x.unflatten(-1, (-1, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)

"""A head for the recipe's targets, and the states of theirs that it learns from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specllama.models.recipe.model import Tiny
from specllama.models.recipe.scale import LlamaShape
from specllama.models.recipe.train import Packer
from specllama.training.eagle_head import EagleHead
from specllama.training.head_file import HeadShape

LENGTH = 512  # of the rows of text


def layers_read(target: LlamaShape) -> tuple[int, int, int]:
    """Return the layers whose inputs the head reads: low, middle and high."""
    return 2, (target.layers + 1) // 2, target.layers - 1


def empty_head(target: LlamaShape, hidden: int) -> EagleHead:
    """Make a head that borrows its target's output."""
    s = target
    return EagleHead(
        HeadShape(s.width, s.heads, s.head_size, hidden, 3 * s.width, 0, s.eps, s.rope_base)
    )


class Lesson(NamedTuple):
    """The target's hidden states for rows of text; `judged` are the places that count."""

    tokens: Tensor  # [batch, n] the token after each place
    features: Tensor  # [batch, n, 3 * width] bfloat16, the states that the head fuses
    final: Tensor  # [batch, n + 1, width] bfloat16, the last hidden state, before the norm
    judged: Tensor  # [batch, n] bool


def lesson(target: Tiny, packer: Packer, rows: int, length: int = LENGTH) -> Lesson:
    """Compute a batch. The target's weights are not touched."""
    ids, mask = packer.rows(rows, length + 1)
    tokens = torch.from_numpy(ids[:, : length + 1])
    judged = torch.from_numpy(mask[:, 2 : length + 2] > 0)
    kept = layers_read(target.s)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cos, sin = target.get_buffer("cos")[: length + 1], target.get_buffer("sin")[: length + 1]
        x = target.token_embd(tokens)
        states = []
        for i, layer in enumerate(target.blk):
            if i in kept:
                states.append(x[:, :-1])
            x = layer(x, cos, sin)
    return Lesson(tokens[:, 1:], torch.cat(states, -1).bfloat16(), x.bfloat16(), judged)

"""A first copying circuit for a new model, so that it need not discover one.

Copying from the prompt needs two attention layers that only pay off together: one notes for each
token which token came before it, the next looks for the place where the current token occurred
earlier and copies what followed. Small models find this late, and a few thousand optimiser steps
leave no time to wait. So both heads are set by least squares before training starts; training then
refines them like any other weight.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specllama.models.recipe.model import Layer, Tiny
from specllama.training.head_seed import CODE, ridge, token_codes


def _previous_token_head(layer: Layer, h: Tensor, codes: Tensor) -> None:
    """Let query head 0 attend one token back and write that token's code into the first columns."""
    s = layer.s
    size = s.head_size
    constant = ridge(h, torch.ones(len(h), 1), 1e-3)[0]
    theta = s.rope_base ** -(torch.arange(0, size, 2) / size)
    weight = torch.where(theta > 0.35, 1.0, torch.where(theta > 0.01, 0.5, 0.0)).sqrt()
    sharp = 9.0
    key = torch.stack((weight, torch.zeros_like(weight)), 1).flatten() * sharp
    # Turned back by one position, so that the scores peak at a distance of one.
    query = torch.stack((weight * theta.cos(), -weight * theta.sin()), 1).flatten() * sharp
    layer.attn_q.weight[:size] = query[:, None] * constant
    layer.attn_k.weight[:size] = key[:, None] * constant
    width = codes.shape[1]
    layer.attn_v.weight[:width] = ridge(h, codes, 1e-3)
    layer.attn_output.weight[:width, :width] = torch.eye(width)


def seed_induction(model: Tiny, seed: int = 0, boost: float = 5.0) -> None:
    """Set a previous-token head in block 0 and matching heads in block 1 of a new model.

    `boost` is the logit that a certain copy gains. Embeddings leave the columns free that carry
    the code of the previous token, and share a constant that makes position-only scores possible.
    """
    s = model.s
    generator = torch.Generator().manual_seed(seed)
    first, second = model.blk[0], model.blk[1]
    group, size = s.heads // s.kv_heads, s.head_size
    wide = CODE * s.kv_heads
    hot = math.sqrt(5.0)
    ids = torch.randint(0, s.vocab, (64, 128), generator=generator)
    cos, sin = model.get_buffer("cos")[:128], model.get_buffer("sin")[:128]
    with torch.no_grad():
        embedded = model.token_embd.weight
        embedded[:, :wide] = 0
        embedded[:, wide] = 0.35 * math.sqrt(s.width)
        turn = torch.eye(s.width)
        if model.output is not None:
            # Outputs start as rotated embeddings: a copy can be said, but no token repeats itself.
            turn = torch.linalg.qr(torch.randn(s.width, s.width, generator=generator)).Q
            model.output.weight.copy_(0.02 * embedded @ turn)

        h0 = first.attn_norm(embedded)
        match = token_codes(h0, wide, generator)
        _previous_token_head(first, h0, match)

        h1 = second.attn_norm(first(model.token_embd(ids), cos, sin))[:, 8:].flatten(0, 1)
        current, previous = ids[:, 8:].flatten(), ids[:, 7:-1].flatten()
        query = ridge(h1, match[current]) * hot
        key = ridge(h1, match[previous]) * hot
        spoken = token_codes(h0, size * s.kv_heads, generator)
        value = ridge(h1, spoken[current])
        out = turn.T @ ridge(spoken, embedded - embedded.mean(0))
        rows = model.token_embd.weight if model.output is None else model.output.weight
        logits = (rows * model.output_norm.weight) @ out @ spoken.T
        out *= boost / logits.diagonal().mean()

        for kv in range(s.kv_heads):
            code = slice(kv * CODE, (kv + 1) * CODE)
            part = slice(kv * size, (kv + 1) * size)
            # The last pairs turn slowly enough to compare contents over hundreds of tokens.
            slow = slice((kv + 1) * size - CODE, (kv + 1) * size)
            second.attn_k.weight[part] *= 0.2
            second.attn_k.weight[slow] = key[code]
            second.attn_v.weight[part] = value[part]
            for head in range(kv * group, (kv + 1) * group):
                end = (head + 1) * size
                second.attn_q.weight[end - size : end] *= 0.2
                second.attn_q.weight[end - CODE : end] = query[code]
                second.attn_output.weight[:, end - size : end] = out[:, part] / group

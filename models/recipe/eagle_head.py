"""The EAGLE-3 head in PyTorch, and the target's states that it learns from."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specllama.models.recipe.model import Tiny, rope_tables, rotate
from specllama.models.recipe.scale import LlamaShape
from specllama.models.recipe.train import Packer

LENGTH = 512  # of the rows of text


def layers_read(target: LlamaShape) -> tuple[int, int, int]:
    """Return the layers whose inputs the head reads: low, middle and high."""
    return 2, (target.layers + 1) // 2, target.layers - 1


class EagleHead(nn.Module):  # type: ignore[misc]
    """The graph of llama.cpp's `eagle3`; parameters are named as in the file."""

    def __init__(self, target: LlamaShape, hidden: int) -> None:
        super().__init__()
        # the token comes in through keys and values alone: they are as wide as the stream
        s = self.s = replace(target, kv_heads=target.heads)
        self.hidden = hidden
        wide = 2 * s.width
        self.fc = nn.Linear(3 * s.width, s.width, bias=False)
        self.attn_norm = nn.RMSNorm(s.width, eps=s.eps)
        self.attn_norm_2 = nn.RMSNorm(s.width, eps=s.eps)
        self.attn_q = nn.Linear(wide, s.heads * s.head_size, bias=False)
        self.attn_k = nn.Linear(wide, s.kv_heads * s.head_size, bias=False)
        self.attn_v = nn.Linear(wide, s.kv_heads * s.head_size, bias=False)
        self.attn_output = nn.Linear(s.heads * s.head_size, s.width, bias=False)
        self.ffn_norm = nn.RMSNorm(s.width, eps=s.eps)
        self.ffn_gate = nn.Linear(s.width, hidden, bias=False)
        self.ffn_up = nn.Linear(s.width, hidden, bias=False)
        self.ffn_down = nn.Linear(hidden, s.width, bias=False)
        self.output_norm = nn.RMSNorm(s.width, eps=s.eps)
        with torch.no_grad():
            for matrix in (self.attn_q, self.attn_k, self.attn_v, self.ffn_gate, self.ffn_up):
                nn.init.normal_(matrix.weight, std=0.5 / matrix.weight.shape[1] ** 0.5)
            nn.init.zeros_(self.attn_output.weight)
            nn.init.zeros_(self.ffn_down.weight)
        cos, sin = rope_tables(s, s.context)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def split(self, x: Tensor) -> Tensor:
        """Reshape to [batch, heads, places, size]."""
        return x.unflatten(-1, (self.s.heads, self.s.head_size)).transpose(1, 2)

    def attend(self, token: Tensor, state: Tensor) -> Tensor:
        """Return the heads' output, [batch, n, heads * size], if every state is known.

        Args:
            token: [batch, n, width] embeddings after their norm.
            state: [batch, n, width] fused states after theirs.
        """
        n = token.shape[1]
        cos, sin = self.get_buffer("cos")[:n], self.get_buffer("sin")[:n]
        z = torch.cat((token, state), -1)
        q = rotate(self.split(self.attn_q(z)), cos, sin)
        k = rotate(self.split(self.attn_k(z)), cos, sin)
        out = F.scaled_dot_product_attention(q, k, self.split(self.attn_v(z)), is_causal=True)
        return out.transpose(1, 2).flatten(-2)

    def finish(self, state: Tensor, brought: Tensor) -> Tensor:
        """Return the layer's output: the residual stream after attention and feed-forward net."""
        h = state + self.attn_output(brought).float()
        x = self.ffn_norm(h)
        return h + self.ffn_down(F.silu(self.ffn_gate(x)) * self.ffn_up(x)).float()

    def unroll(
        self, embedded: Tensor, features: Tensor, places: Tensor, steps: int
    ) -> list[Tensor]:
        """Return the input of the output matrix, for every step and each of `places`.

        Args:
            embedded: [batch, n, width] embedding of the token after each place.
            features: [batch, n, 3 * width] the target's states.
            places: [batch, window] neighbouring places to unroll from, ascending.
        """
        s, n = self.s, embedded.shape[1]
        cos, sin = self.get_buffer("cos"), self.get_buffer("sin")
        row = torch.arange(len(places))[:, None]
        token = self.attn_norm(embedded)
        state = self.fc(features).float()
        z = torch.cat((token, self.attn_norm_2(state)), -1)
        # what is known: keys of fused states, for every place
        known = rotate(self.split(self.attn_k(z)), cos[:n], sin[:n]).transpose(-1, -2)
        known_v = self.split(self.attn_v(z))
        token, state, z = token[row, places], state[row, places], z[row, places]
        cos, sin = cos[places][:, None], sin[places][:, None]
        keys: list[Tensor] = []  # of guessed states, by step
        values: list[Tensor] = []
        rows: list[Tensor] = []
        for k in range(steps):
            if k:
                z = torch.cat((token, self.attn_norm_2(state)), -1)
                keys.append(rotate(self.split(self.attn_k(z)), cos, sin))
                values.append(self.split(self.attn_v(z)))
            q = rotate(self.split(self.attn_q(z)), cos, sin)
            hidden = torch.arange(n) > places[..., None] - k  # [batch, window, n]
            scores = q @ known + hidden[:, None] * -1e4
            # one key of each guessed step: step i stands k - i places back
            own = [
                (q * shift(key, k - i)).sum(-1, keepdim=True) for i, key in enumerate(keys, start=1)
            ]
            weights = torch.cat((scores, *own), -1).float() / s.head_size**0.5
            weights = weights.softmax(-1).to(known_v.dtype)
            out = weights[..., :n] @ known_v
            for i, value in enumerate(values, start=1):
                out = out + weights[..., n + i - 1, None] * shift(value, k - i)
            h = self.finish(state, out.transpose(1, 2).flatten(-2))
            rows.append(self.output_norm(h))
            state = shift(h, 1, dim=1)
        return rows


def shift(x: Tensor, by: int, dim: int = 2) -> Tensor:
    """Give each place the value `by` places before it; 0 before the start."""
    if by == 0:
        return x
    n = x.shape[dim]
    return torch.cat((torch.zeros_like(x.narrow(dim, 0, by)), x.narrow(dim, 0, n - by)), dim)


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

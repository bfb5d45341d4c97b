"""The EAGLE-3 head in PyTorch: llama.cpp's `eagle3` graph, unrolled as it will draft.

The head is one decoder layer. Its pair at a place is the embedding of the next token, and a state:
three hidden states of the target, fused by a matrix, where the text is known; beyond that, its own
output of the step before. Its output matrix has rows of the likeliest tokens only.

Training-time test (Li et al. 2025, EAGLE-3): the head is unrolled from every place of a window at
once. In step k the state at place j is the head's own output of step k - 1 at place j - 1, and
attention sees what it would see while drafting: fused states up to place j - k, then one key of
each step on the diagonal up to the place itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specllama.training.head_file import HeadShape

CHUNK = 1024  # rows of logits that are held at once


class EagleHead(nn.Module):  # type: ignore[misc]
    """The graph; parameters are named as in the file."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        s = self.s = shape
        inner = s.heads * s.head_size

        def matrix(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.fc = matrix(s.fused, s.width)
        # of the states' values, which differ by orders of magnitude: part of ``fc`` in the file
        self.register_buffer("scale", torch.ones(s.fused))
        self.attn_norm = nn.RMSNorm(s.width, eps=s.eps)
        self.attn_norm_2 = nn.RMSNorm(s.width, eps=s.eps)
        self.attn_q, self.attn_k, self.attn_v = (matrix(2 * s.width, inner) for _ in range(3))
        self.attn_output = matrix(inner, s.width)
        self.ffn_norm = nn.RMSNorm(s.width, eps=s.eps)
        self.ffn_gate, self.ffn_up = (matrix(s.width, s.hidden) for _ in range(2))
        self.ffn_down = matrix(s.hidden, s.width)
        self.output_norm = nn.RMSNorm(s.width, eps=s.eps)
        if s.rows:
            self.output = matrix(s.width, s.rows)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                # the layer starts as the identity: its two outputs are zero
                zero = name.startswith(("attn_output", "ffn_down"))
                nn.init.normal_(p, std=0.0 if zero else 0.5 / p.shape[1] ** 0.5)

    def file_weights(self) -> dict[str, Tensor]:
        """Return the weights of a file by name, ``scale`` inside of ``fc``."""
        found = {name: p.detach().float().cpu() for name, p in self.state_dict().items()}
        found["fc.weight"] = found["fc.weight"] * found.pop("scale")
        return found

    def set_scale(self, features: Tensor) -> None:
        """Set the scale by features [n, fused] as they are. Call it without gradients."""
        spread = features.square().mean(0).sqrt()
        self.get_buffer("scale").copy_(1 / spread.clamp(min=1e-6 * float(spread.max())))

    def split(self, x: Tensor) -> Tensor:
        """Return the heads apart: [batch, heads, places, size]."""
        return x.unflatten(-1, (self.s.heads, self.s.head_size)).transpose(1, 2)

    def pair(self, token: Tensor, state: Tensor) -> Tensor:
        """Return what queries, keys and values read; ``token`` is normed already."""
        return torch.cat((token, self.attn_norm_2(state)), -1)

    def attend(self, z: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values, and what attention brings at each place, if all states are known."""
        q, k = (rotate(self.split(m(z)), cos, sin) for m in (self.attn_q, self.attn_k))
        v = self.split(self.attn_v(z))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return k, v, out.transpose(1, 2).flatten(-2)

    def finish(self, state: Tensor, brought: Tensor) -> Tensor:
        """Return the layer's output: the residual stream after attention and feed-forward net."""
        h = state + self.attn_output(brought)
        x = self.ffn_norm(h)
        return h + self.ffn_down(F.silu(self.ffn_gate(x)) * self.ffn_up(x))

    def unroll(
        self, embedded: Tensor, features: Tensor, asked: Tensor, places: Tensor, steps: int
    ) -> Iterator[Tensor]:
        """Yield the layer's output of each step: of whole rows, then of a window of each.

        Args:
            embedded: [batch, n, width] embedding of the token after each place.
            features: [batch, n, fused] the target's states.
            asked: [batch, n] places at which the first step is wanted; it is zero elsewhere.
            places: [batch, window] neighbors in ascending order. Step k (from 0) is as in a
                draft from the window's place k - 1 on, if the place before the window is asked.
        """
        s, n = self.s, embedded.shape[1]
        cos, sin = (
            t.to(embedded.dtype).to(embedded.device)
            for t in rope_tables(s.head_size, s.rope_base, n)
        )
        token = self.attn_norm(embedded)
        state = self.fc(features * self.get_buffer("scale")).to(token.dtype)
        k, v, out = self.attend(self.pair(token, state), cos, sin)
        h = self.finish(state[asked], out[asked])
        whole = torch.zeros(*asked.shape, s.width, dtype=h.dtype, device=h.device)
        whole = whole.index_put((asked,), h)
        yield whole
        if steps == 1:
            return
        row = torch.arange(len(places), device=places.device)[:, None]
        token, cos, sin = token[row, places], cos[places][:, None], sin[places][:, None]
        state, seen = whole[row, places - 1], k.transpose(-1, -2)
        own: list[tuple[Tensor, Tensor]] = []  # keys and values of guessed states, by step
        for step in range(1, steps):
            z = self.pair(token, state)
            q, k = (rotate(self.split(m(z)), cos, sin) for m in (self.attn_q, self.attn_k))
            own.append((k, self.split(self.attn_v(z))))
            hidden = torch.arange(n, device=places.device) > places[..., None] - step
            scores = (q @ seen).masked_fill(hidden[:, None], -1e4)
            # one key of each guessed step: step i stands ``step - i`` places back
            mine = [(q * shift(key, step - i)).sum(-1, True) for i, (key, _) in enumerate(own, 1)]
            weights = (torch.cat((scores, *mine), -1) / s.head_size**0.5).softmax(-1).to(v.dtype)
            out = weights[..., :n] @ v
            for i, (_, value) in enumerate(own, 1):
                out = out + weights[..., n + i - 1, None] * shift(value, step - i)
            h = self.finish(state, out.transpose(1, 2).flatten(-2))
            yield h
            state = shift(h, 1, dim=1)


# -- rotation of queries and keys by their position, as llama.cpp's NORM order has it --


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


def shift(x: Tensor, by: int, dim: int = 2) -> Tensor:
    """Give each place the value ``by`` places before it; 0 before the start."""
    if by == 0:
        return x
    n = x.shape[dim]
    return torch.cat((torch.zeros_like(x.narrow(dim, 0, by)), x.narrow(dim, 0, n - by)), dim)


def law_loss(x: Tensor, matrix: Tensor, index: Tensor, p: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the cross-entropy with laws over some of all tokens.

    The sum over rows of Σ p · -log q, where q is over the output's rows alone: a likely token
    without a row teaches nothing, and what it takes from the others' mass is lost.

    Args:
        x: [n, width] what the output matrix reads. matrix: [rows, width].
        index, p: [n, likeliest] rows of the output, and probabilities.
        dtype: in which the products are computed.
    """
    found: Tensor = _LawLoss.apply(x, matrix, index, p, dtype)
    return found


class _LawLoss(torch.autograd.Function):  # type: ignore[misc]
    """The loss with its gradients, without all the logits at once."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matrix: Tensor, index: Tensor, p: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """See ``law_loss``."""
        learns, low = ctx.needs_input_grad[1], matrix.to(dtype)
        found = x.new_zeros(())
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_m = torch.zeros_like(matrix) if learns else None
        for at in range(0, len(x), CHUNK):
            part = slice(at, at + CHUNK)
            rows, laws = x[part].to(dtype), p[part]
            z = rows @ low.T
            q = z.softmax(-1)
            top, best = z.max(-1, keepdim=True)
            total = top.to(laws) - q.gather(1, best).to(laws).log()
            found += (laws * (total - z.gather(1, index[part]))).sum()
            if grad_x is None:
                continue
            q *= laws.sum(-1, keepdim=True).to(dtype)
            q.scatter_add_(1, index[part], -laws.to(dtype))
            grad_x[part] = q @ low
            if grad_m is not None:
                grad_m += q.T @ rows
        ctx.save_for_backward(grad_x, grad_m)
        return found

    @staticmethod
    def backward(ctx: Any, by: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients that were found on the way."""
        grad_x, grad_m = ctx.saved_tensors
        return by * grad_x, None if grad_m is None else by * grad_m, None, None, None

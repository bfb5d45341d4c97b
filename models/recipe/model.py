"""The network in PyTorch: llama.cpp's `llama` architecture, interleaved RoPE and all."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specllama.models.recipe.scale import LlamaShape
from specllama.training.eagle_head import rope_tables, rotate


def fake_q4_0(w: Tensor) -> Tensor:
    """Round `w` as Q4_0 would store it, with the gradient of `w` (straight-through)."""
    blocks = w.detach().reshape(-1, 32)
    extreme = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = extreme / -8
    inverse = torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)
    scale = scale.half().float()
    q = (blocks * inverse + 8.5).floor().clamp(0, 15) - 8
    return w + ((q * scale).reshape(w.shape) - w).detach()


class Linear(nn.Linear):  # type: ignore[misc]
    """A matrix without bias that can act as if it were quantized already."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.quantised = False

    def forward(self, x: Tensor) -> Tensor:
        """Apply the matrix."""
        return F.linear(x, fake_q4_0(self.weight) if self.quantised else self.weight)


class Layer(nn.Module):  # type: ignore[misc]
    """Attention with grouped heads and a SwiGLU feed-forward net."""

    def __init__(self, s: LlamaShape) -> None:
        super().__init__()
        self.s = s
        self.attn_norm = nn.RMSNorm(s.width, eps=s.eps)
        self.attn_q = Linear(s.width, s.heads * s.head_size)
        self.attn_k = Linear(s.width, s.kv_heads * s.head_size)
        self.attn_v = Linear(s.width, s.kv_heads * s.head_size)
        self.attn_output = Linear(s.heads * s.head_size, s.width)
        self.ffn_norm = nn.RMSNorm(s.width, eps=s.eps)
        self.ffn_gate = Linear(s.width, s.hidden)
        self.ffn_up = Linear(s.width, s.hidden)
        self.ffn_down = Linear(s.hidden, s.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Run one block of the residual stream."""
        s = self.s
        h = self.attn_norm(x)
        q = self.attn_q(h).unflatten(-1, (s.heads, s.head_size)).transpose(1, 2)
        k = self.attn_k(h).unflatten(-1, (s.kv_heads, s.head_size)).transpose(1, 2)
        v = self.attn_v(h).unflatten(-1, (s.kv_heads, s.head_size)).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = s.heads // s.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_output(out.transpose(1, 2).flatten(-2))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


class Tiny(nn.Module):  # type: ignore[misc]
    """The whole model; call it with token ids, get logits."""

    def __init__(self, s: LlamaShape) -> None:
        super().__init__()
        self.s = s
        self.token_embd = nn.Embedding(s.vocab, s.width)
        self.blk = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.output_norm = nn.RMSNorm(s.width, eps=s.eps)
        self.output = None if s.tied else nn.Linear(s.width, s.vocab, bias=False)
        cos, sin = (t.float() for t in rope_tables(s.head_size, s.rope_base, s.context))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                # Blocks start as the identity: their outputs are zero.
                zero = name.endswith(("attn_output.weight", "ffn_down.weight"))
                spread = 0.5 / p.shape[1] ** 0.5
                if name.startswith("token_embd"):
                    # As large as what the blocks add, so that tokens do not drown in the first one.
                    spread = 1.0
                nn.init.normal_(p, std=0.0 if zero else spread)
        if s.tied:
            nn.init.constant_(self.output_norm.weight, 0.03)

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the input of the output matrix, for every position."""
        length = ids.shape[1]
        cos, sin = self.get_buffer("cos")[:length], self.get_buffer("sin")[:length]
        x = self.token_embd(ids)
        for layer in self.blk:
            x = layer(x, cos, sin)
        return self.output_norm(x)

    def head(self, x: Tensor) -> Tensor:
        """Return the logits of hidden rows."""
        weight = self.token_embd.weight if self.output is None else self.output.weight
        return F.linear(x, weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits for every position."""
        return self.head(self.hidden(ids))

    def quantise_aware(self, on: bool = True) -> None:
        """Train against the rounding error of Q4_0 from now on."""
        for m in self.modules():
            if isinstance(m, Linear):
                m.quantised = on

    def parameter_count(self) -> int:
        """Count the weights."""
        return sum(p.numel() for p in self.parameters())

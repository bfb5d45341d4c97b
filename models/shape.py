"""The numbers that define a model of the `llama` architecture, and its parameter count."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a `llama` model."""

    width: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int = 64
    vocab: int = 4096
    context: int = 2048
    rope_base: float = 10_000.0
    eps: float = 1e-5
    tied: bool = False

    @property
    def parameters(self) -> int:
        """The number of weights."""
        attention = 2 * self.width * self.head_size * (self.heads + self.kv_heads)
        layer = attention + 3 * self.width * self.hidden + 2 * self.width
        return self.layers * layer + self.width + self.vocab * self.width * (1 if self.tied else 2)

"""Random EAGLE-3 head files, and the same head in NumPy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from ggufs import _Writer, bpe_tokens

from specllama.models.gguf import GgufHeader, read_header
from specllama.models.layer_inputs import read_draft_ids
from specllama.models.tensors import read_tensor

Rows = npt.NDArray[np.float32]


def write_eagle3(
    path: Path,
    *,
    width: int = 64,
    target_width: int = 64,
    layers: Sequence[int] = (0, 1, 3),
    heads: int = 2,
    heads_kv: int = 1,
    hidden: int = 96,
    context: int = 512,
    draft_ids: Sequence[int] | None = None,
    own_embedding: bool = False,
    own_output: bool = False,
    norm_before_residual: bool = False,
    tokens: Sequence[str] | None = None,
    seed: int = 5,
    keys: Mapping[str, Any] | None = None,
    leave_out: Sequence[str] = (),
) -> Path:
    """A head with random weights in llama.cpp's ``eagle3`` format (F32).

    Args:
        draft_ids: the tokens that it can say; it then brings an output matrix of its own.
        tokens: the vocabulary; that of ``ggufs.write_llama`` unless given.
        keys: metadata to add, replace, or (None) remove.
        leave_out: tensors not to write.
    """
    rng = np.random.default_rng(seed)
    texts, types, merges = bpe_tokens()
    size = width // heads
    w = _Writer(path, "eagle3")
    sizes = {"width": width, "blocks": 1, "hidden": hidden, "heads": heads, "size": size}
    w.describe(path, **sizes, heads_kv=heads_kv, context=context)
    w.add_array("eagle3.target_layers", list(layers))
    w.add_uint32("eagle3.target_hidden_size", target_width)
    w.add_bool("eagle3.norm_before_residual", norm_before_residual)
    texts = list(tokens) if tokens is not None else texts
    types = (types + [1] * len(texts))[: len(texts)]
    w.speak(texts, types, merges)
    w.change(keys or {})

    def add(name: str, *shape: int) -> None:
        if name in leave_out:
            return
        if len(shape) == 1:
            values = rng.uniform(0.5, 1.5, shape)
        else:
            values = rng.normal(0.0, shape[-1] ** -0.5, shape)
        w.add_tensor(name, values.astype(np.float32))

    add("fc.weight", width, 3 * target_width)
    for norm in ("attn_norm", "attn_norm_2", "ffn_norm"):
        add(f"blk.0.{norm}.weight", width)
    add("blk.0.attn_q.weight", width, 2 * width)
    for kind in ("k", "v"):
        add(f"blk.0.attn_{kind}.weight", heads_kv * size, 2 * width)
    add("blk.0.attn_output.weight", width, width)
    add("blk.0.ffn_gate.weight", hidden, width)
    add("blk.0.ffn_up.weight", hidden, width)
    add("blk.0.ffn_down.weight", width, hidden)
    add("output_norm.weight", width)
    if own_embedding:
        add("token_embd.weight", len(texts), width)
    if own_output or draft_ids is not None:
        add("output.weight", len(texts) if draft_ids is None else len(draft_ids), width)
    if draft_ids is not None and "d2t" not in leave_out:
        w.add_tensor("d2t", np.array(draft_ids, np.int64))
    w.finish()
    return path


class NumpyHead:
    """The head, written out: one decoder layer over pairs of a token and a state."""

    def __init__(self, path: Path, target: Path) -> None:
        self._head, other = read_header(path), read_header(target)
        head = self._head

        def borrowed(name: str) -> Rows:
            return read_tensor(head if name in head.by_name else other, name)

        self.w = {
            n.removeprefix("blk.0."): read_tensor(head, n) for n in head.by_name if n != "d2t"
        }
        self.embedding = borrowed("token_embd.weight")
        self.output = borrowed("output.weight")
        self.ids = read_draft_ids(head) if "d2t" in head.by_name else None
        self.vocab = head.vocab_size

    def fuse(self, features: Rows) -> Rows:
        """[n, width] of [n, 3 * target_width]"""
        fused: Rows = features @ self.w["fc.weight"].T
        return fused

    def run(self, tokens: Sequence[int], states: Rows) -> tuple[Rows, Rows]:
        """Logits [n, vocab] and own states [n, width] of pairs at positions 0..n-1."""
        w, h = self.w, self._head
        embedded = self._norm(self.embedding[list(tokens)], w["attn_norm.weight"])
        state = self._norm(states, w["attn_norm_2.weight"])
        z = np.concatenate((embedded, state), axis=1)
        q = _rotate(_split(z @ w["attn_q.weight"].T, h.head_count), h)
        k = _rotate(_split(z @ w["attn_k.weight"].T, h.head_count_kv), h)
        v = _split(z @ w["attn_v.weight"].T, h.head_count_kv)
        group = h.head_count // h.head_count_kv
        k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(h.key_length)
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = (weights @ v).transpose(1, 0, 2).reshape(len(tokens), -1)
        before = state if h.flag("eagle3.norm_before_residual") else states
        x = before + mixed @ w["attn_output.weight"].T
        y = self._norm(x, w["ffn_norm.weight"])
        gate = y @ w["ffn_gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["ffn_up.weight"].T)) @ w["ffn_down.weight"].T
        said = self._norm(x, w["output_norm.weight"]) @ self.output.T
        if self.ids is None:
            return said.astype(np.float32), x.astype(np.float32)
        logits = np.full((len(tokens), self.vocab), -np.inf, np.float32)
        logits[:, self.ids] = said
        return logits, x.astype(np.float32)

    def _norm(self, x: Rows, weight: Rows) -> Rows:
        eps = self._head.number("eagle3.attention.layer_norm_rms_epsilon") or 0.0
        normed: Rows = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + eps)
        return normed * weight


def _split(x: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """[heads, n, size] of [n, heads * size]"""
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)


def _rotate(x: npt.NDArray[Any], header: GgufHeader) -> npt.NDArray[Any]:
    """Neighbouring pairs turn by their position times a falling frequency."""
    size = x.shape[-1]
    base = header.number("eagle3.rope.freq_base") or 10000.0
    angles = np.arange(x.shape[1])[:, None] * base ** -(np.arange(0, size, 2) / size)
    a, b = x[..., 0::2], x[..., 1::2]
    turned = np.empty_like(x)
    turned[..., 0::2] = a * np.cos(angles) - b * np.sin(angles)
    turned[..., 1::2] = a * np.sin(angles) + b * np.cos(angles)
    return turned

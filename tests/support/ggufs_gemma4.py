"""Random Gemma 4 models and their assistants, and both in NumPy.

The pair's tokens mostly follow from the token before them, so the assistant is right now and then.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from ggufs import CHATML, _Writer, bpe_tokens

from specllama.models.gguf import GgufHeader, read_header
from specllama.models.tensors import read_tensor

Rows = npt.NDArray[np.float32]

PATTERN = (True, False, True, False)  # which layers see a window only
WINDOW = 24
WIDTH, ASSISTANT_WIDTH = 64, 32
HEADS = 4
SIZES = {True: 64, False: 128}  # of an attention head, by whether its layer sees a window
HEADS_KV = {True: 2, False: 1}


def _begin(path: Path, architecture: str, pattern: Sequence[bool], width: int) -> _Writer:
    texts, types, merges = bpe_tokens()
    w = _Writer(path, architecture)
    w.describe(
        path, width=width, blocks=len(pattern), hidden=2 * width, heads=HEADS,
        heads_kv=[HEADS_KV[windowed] for windowed in pattern], size=SIZES[False], eps=1e-6,
        base=100000.0,
    )  # fmt: skip
    w.add_uint32(f"{architecture}.attention.key_length_swa", SIZES[True])
    w.add_uint32(f"{architecture}.attention.value_length_swa", SIZES[True])
    w.add_uint32(f"{architecture}.rope.dimension_count_swa", SIZES[True])
    w.add_float32(f"{architecture}.rope.freq_base_swa", 10000.0)
    w.add_sliding_window(WINDOW)
    w.add_array(f"{architecture}.attention.sliding_window_pattern", list(pattern))
    w.add_uint32(f"{architecture}.embedding_length_per_layer_input", 0)
    w.speak(texts, types, merges, CHATML)
    return w


class _Tensors:
    """Adds random tensors to a file."""

    def __init__(self, writer: _Writer, seed: int, leave_out: Sequence[str]) -> None:
        self._writer, self._leave_out = writer, leave_out
        self.rng = np.random.default_rng(seed)

    def add(self, name: str, *shape: int, values: Rows | None = None) -> None:
        if name in self._leave_out:
            return
        if values is None:
            if len(shape) == 1:
                small = 0.5 if "post" in name else 1.0  # what layers add to the token itself
                values = small * self.rng.uniform(0.5, 1.5, shape)
            else:
                values = self.rng.normal(0.0, shape[-1] ** -0.5, shape)
        self._writer.add_tensor(name, values.astype(np.float32))

    def layer(self, i: int, width: int, windowed: bool) -> None:
        """What layers of both have."""
        size = SIZES[windowed]
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            self.add(f"blk.{i}.{name}.weight", width)
        self.add(f"blk.{i}.attn_q.weight", HEADS * size, width)
        self.add(f"blk.{i}.attn_q_norm.weight", size)
        self.add(f"blk.{i}.attn_output.weight", width, HEADS * size)
        self.add(f"blk.{i}.layer_output_scale.weight", 1)
        for name in ("gate", "up"):
            self.add(f"blk.{i}.ffn_{name}.weight", 2 * width, width)
        self.add(f"blk.{i}.ffn_down.weight", width, 2 * width)


def _tables(n_vocab: int) -> tuple[Rows, Rows]:
    """Embeddings [n_vocab, WIDTH], and for each token what a token before it looks like."""
    rng = np.random.default_rng(17)
    table = rng.normal(0.0, 1.0, (n_vocab, WIDTH)).astype(np.float32)
    return table, table[rng.permutation(n_vocab), :ASSISTANT_WIDTH]


def write_gemma4(
    path: Path,
    *,
    pattern: Sequence[bool] = PATTERN,
    shared: int = 0,
    seed: int = 1,
    keys: Mapping[str, Any] | None = None,
) -> Path:
    """A random target of about 0.5 MB.

    Args:
        shared: how many of the last layers use the keys and values of earlier ones.
    """
    w = _begin(path, "gemma4", pattern, WIDTH)
    w.add_uint32("gemma4.attention.shared_kv_layers", shared)
    w.change(keys or {})
    t = _Tensors(w, seed, ())
    table, before = _tables(len(bpe_tokens()[0]))
    t.add("token_embd.weight", values=table)
    t.add("output.weight", values=np.concatenate((before, np.zeros_like(before)), axis=1) * 0.3)
    t.add("output_norm.weight", WIDTH)
    factors = np.where(np.arange(SIZES[False] // 2) < SIZES[False] // 4, 1.0, 1e30)
    t.add("rope_freqs.weight", values=factors)
    for i, windowed in enumerate(pattern):
        t.layer(i, WIDTH, windowed)
        if i < len(pattern) - shared:
            kv = HEADS_KV[windowed] * SIZES[windowed]
            t.add(f"blk.{i}.attn_k.weight", kv, WIDTH)
            t.add(f"blk.{i}.attn_k_norm.weight", SIZES[windowed])
            if windowed:  # full attention uses its keys as values
                t.add(f"blk.{i}.attn_v.weight", kv, WIDTH)
    w.finish()
    return path


def write_assistant(
    path: Path,
    *,
    pattern: Sequence[bool] = (True, True, False),
    seed: int = 2,
    keys: Mapping[str, Any] | None = None,
    leave_out: Sequence[str] = (),
    n_vocab: int | None = None,
) -> Path:
    """A random assistant of such a target.

    Args:
        keys: metadata to add, replace, or (None) remove.
        leave_out: tensors not to write.
    """
    w = _begin(path, "gemma4-assistant", pattern, ASSISTANT_WIDTH)
    w.add_uint32("gemma4-assistant.embedding_length_out", WIDTH)
    w.add_uint32("gemma4-assistant.nextn_predict_layers", len(pattern))
    w.change(keys or {})
    t = _Tensors(w, seed, leave_out)
    _, before = _tables(len(bpe_tokens()[0]))
    t.add("token_embd.weight", values=0.3 * before)
    t.add("output_norm.weight", ASSISTANT_WIDTH)
    t.add("rope_freqs.weight", values=np.ones(SIZES[False] // 2))
    joint = t.rng.normal(0.0, 0.02, (ASSISTANT_WIDTH, 2 * WIDTH))
    joint[:, :ASSISTANT_WIDTH] += np.eye(ASSISTANT_WIDTH)
    t.add("nextn.pre_projection.weight", values=joint)
    t.add("nextn.post_projection.weight", WIDTH, ASSISTANT_WIDTH)
    for i, windowed in enumerate(pattern):
        t.layer(i, ASSISTANT_WIDTH, windowed)
    w.finish()
    return path


class NumpyGemma4:
    """Target and assistant, written out."""

    def __init__(self, target: Path, assistant: Path) -> None:
        self.target, self.assistant = read_header(target), read_header(assistant)
        self._t = {name: read_tensor(self.target, name) for name in self.target.by_name}
        self._a = {name: read_tensor(self.assistant, name) for name in self.assistant.by_name}

    def read(self, tokens: Sequence[int]) -> tuple[Rows, Rows]:
        """Run the target: its logits [n, vocab] and states [n, WIDTH]; keeps keys and values."""
        w, header = self._t, self.target
        x = w["token_embd.weight"][list(tokens)] * np.sqrt(np.float32(WIDTH))
        at = np.arange(len(tokens))
        own = header.block_count - (header.integer(header.own("attention.shared_kv_layers")) or 0)
        pattern = _pattern(header)
        self._kv: list[tuple[Rows, Rows]] = []
        for i, windowed in enumerate(pattern):
            block, size = f"blk.{i}.", SIZES[windowed]
            y = _norm(x, w[block + "attn_norm.weight"])
            if i < own:
                k = _split(y @ w[block + "attn_k.weight"].T, size)
                v_name = block + "attn_v.weight"
                v = _split(y @ w[v_name].T, size) if v_name in w else k
                k = _rotate(_norm(k, w[block + "attn_k_norm.weight"]), at, windowed, w)
                self._kv.append((k, _norm(v, np.float32(1))))
            else:
                self._kv.append(self._kv[own - (2 if windowed else 1)])
            x = _layer(x, w, i, at, windowed, *self._kv[i])
        states = _norm(x, w["output_norm.weight"])
        return states @ w["output.weight"].T, states

    def guess(self, token: int, state: Rows, position: int) -> tuple[Rows, Rows]:
        """Logits [vocab] and own state [WIDTH] behind a token at ``position`` of what was read."""
        w = self._a
        embedded = self._t["token_embd.weight"][token] * np.sqrt(np.float32(WIDTH))
        x = np.concatenate((embedded, state))[None] @ w["nextn.pre_projection.weight"].T
        for i, windowed in enumerate(_pattern(self.assistant)):
            k, v = self._kv[-2 if windowed else -1]
            x = _layer(x, w, i, np.array([position]), windowed, k[:, :position], v[:, :position])
        x = _norm(x, w["output_norm.weight"])
        return (x @ w["token_embd.weight"].T)[0], (x @ w["nextn.post_projection.weight"].T)[0]


def _pattern(header: GgufHeader) -> list[bool]:
    return [bool(x) for x in header.array(header.own("attention.sliding_window_pattern"))]


def _layer(x: Any, w: Mapping[str, Rows], i: int, at: Any, windowed: bool, k: Any, v: Any) -> Any:
    block, size = f"blk.{i}.", SIZES[windowed]
    y = _norm(x, w[block + "attn_norm.weight"])
    q = _norm(_split(y @ w[block + "attn_q.weight"].T, size), w[block + "attn_q_norm.weight"])
    q = _rotate(q, at, windowed, w)
    group = len(q) // len(k)
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    scores = q @ k.transpose(0, 2, 1)
    away = at[:, None] - np.arange(k.shape[1])
    scores[:, (away < 0) | (windowed & (away >= WINDOW))] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = (weights @ v).transpose(1, 0, 2).reshape(len(x), -1)
    x = x + _norm(
        mixed @ w[block + "attn_output.weight"].T, w[block + "post_attention_norm.weight"]
    )
    y = _norm(x, w[block + "ffn_norm.weight"])
    gate = y @ w[block + "ffn_gate.weight"].T
    gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    y = (gate * (y @ w[block + "ffn_up.weight"].T)) @ w[block + "ffn_down.weight"].T
    x = x + _norm(y, w[block + "post_ffw_norm.weight"])
    return (x * w[block + "layer_output_scale.weight"]).astype(np.float32)


def _norm(x: Any, weight: Any) -> Any:
    scale = np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
    return (x / scale * weight).astype(np.float32)


def _split(x: Any, size: int) -> Any:
    """[heads, n, size] of [n, heads * size]"""
    return x.reshape(len(x), -1, size).transpose(1, 0, 2)


def _rotate(x: Any, at: Any, windowed: bool, w: Mapping[str, Rows]) -> Any:
    """The first half of the values turns against the second."""
    size = x.shape[-1]
    base = 10000.0 if windowed else 100000.0
    angles = at[:, None] * base ** -(np.arange(0, size, 2) / size)
    if not windowed:
        angles = angles / w["rope_freqs.weight"]
    a, b = x[..., : size // 2], x[..., size // 2 :]
    turned = (a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles))
    return np.concatenate(turned, axis=-1).astype(np.float32)

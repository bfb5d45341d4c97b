"""A model with a NextN block, made from a `llama` model: same text, own drafts, no training.

The result is of the `glm4moe` architecture, whose dense blocks compute what `llama` blocks do when
the rows of Q and K are put in NEOX order. Its NextN block is built, not trained: a linear map from
(embedding of a token, final state after the token before) to what enters the last block after that
token, fitted by least squares; then a copy of that last block, its feed-forward net cut into
a shared and two routed experts of equal weight; then the model's own norm and output matrix. So it
guesses what the model itself would have computed, had all blocks but the last been linear.

Weights of the trunk are copied byte for byte. Nothing in the file is random.

``python -m specllama.models.recipe.nextn OUT.gguf`` makes one from the bundled target.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q
from gguf.quants import quantize
from numpy.typing import NDArray

from specllama.models.gguf import read_header
from specllama.models.recipe.corpus import SLICES, chatml, heldout_prompts
from specllama.models.recipe.runner import Runner
from specllama.models.recipe.scale import LlamaShape, read_shape
from specllama.models.recipe.shape import TARGET_FILE
from specllama.models.tensors import read_tensor

Floats = NDArray[np.float32]
ARCHITECTURE = "glm4moe"
ROUTED = 2  # experts, always all of them
RIDGE = 1e-3  # of the features' mean square, against maps that fit only these texts
SIGMOID = 2  # expert gating


class Reader:
    """A `llama` model in numpy, for its states."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self.shape: LlamaShape = read_shape(header)
        self.w: dict[str, Floats] = {t.name: read_tensor(header, t.name) for t in header.tensors}

    def norm(self, x: Floats, weight: Floats | None = None) -> Floats:
        """Apply the RMS norm to rows."""
        scaled: Floats = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.shape.eps)
        return scaled if weight is None else scaled * weight

    def states(self, tokens: Sequence[int]) -> tuple[Floats, Floats]:
        """Return (input of the last block, input of the output matrix), [n, width] each."""
        x = self.w["token_embd.weight"][list(tokens)]
        entering = x
        for i in range(self.shape.layers):
            entering = x
            x = self.block(i, x)
        return entering, self.norm(x, self.w["output_norm.weight"])

    def block(self, i: int, x: Floats) -> Floats:
        """Run one block over a whole text, [n, width]."""
        s, n = self.shape, len(x)

        def matrix(name: str, rows: Floats) -> Floats:
            out: Floats = rows @ self.w[f"blk.{i}.{name}.weight"].T
            return out

        h = self.norm(x, self.w[f"blk.{i}.attn_norm.weight"])
        q = self._rotate(matrix("attn_q", h).reshape(n, s.heads, s.head_size))
        k = self._rotate(matrix("attn_k", h).reshape(n, s.kv_heads, s.head_size))
        v = matrix("attn_v", h).reshape(n, s.kv_heads, s.head_size)
        group = s.heads // s.kv_heads
        k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.float32(s.head_size**0.5)
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, v).reshape(n, -1).astype(np.float32)
        x = x + matrix("attn_output", mixed)
        h = self.norm(x, self.w[f"blk.{i}.ffn_norm.weight"])
        gate = matrix("ffn_gate", h)
        return x + matrix("ffn_down", gate / (1 + np.exp(-gate)) * matrix("ffn_up", h))

    def _rotate(self, x: Floats) -> Floats:
        """Apply RoPE to neighboring pairs; x [n, heads, head_size]."""
        s = self.shape
        speeds = s.rope_base ** -(np.arange(0, s.head_size, 2) / s.head_size)
        angles = np.arange(len(x))[:, None, None] * speeds
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        a, b = x[..., 0::2], x[..., 1::2]
        out = np.empty_like(x)
        out[..., 0::2], out[..., 1::2] = a * cos - b * sin, a * sin + b * cos
        return out


def fit(reader: Reader, texts: Iterable[Sequence[int]]) -> Floats:
    """Fit the joint matrix [width, 2 * width]: from embedding and state to the input of the last
    block."""
    size = 2 * reader.shape.width
    square, cross = np.zeros((size, size)), np.zeros((reader.shape.width, size))
    for tokens in texts:
        if len(tokens) < 2:
            continue
        entering, final = reader.states(tokens)
        embedded = reader.w["token_embd.weight"][list(tokens[1:])]
        pair = np.concatenate((reader.norm(embedded), reader.norm(final[:-1])), 1)
        wanted = entering[1:]
        # the block begins with a norm: what counts is the error relative to a row's size
        size_of_row = np.sqrt(np.mean(wanted * wanted, -1, keepdims=True))
        pair, wanted = pair / size_of_row, wanted / size_of_row
        square += pair.T @ pair
        cross += wanted.T @ pair
    ridge = RIDGE * np.trace(square) / size
    if ridge == 0:
        raise ValueError("no text of two tokens or more to fit the block to")
    return np.linalg.solve(square + ridge * np.eye(size), cross.T).T.astype(np.float32)


def build(src: Path, dst: Path, texts: Iterable[Sequence[int]]) -> None:
    """Write `dst`: `src` with a NextN block fitted to `texts`, token ids of the model.

    Raises:
        ValueError: not a `llama` model, or nothing to fit to.
    """
    reader = Reader(src)
    joint = fit(reader, texts)
    source = gguf.GGUFReader(src)
    s, last = reader.shape, reader.shape.layers - 1
    expert = _expert_width(s.hidden)
    part = dst.with_name(dst.name + ".part")
    w = gguf.GGUFWriter(part, ARCHITECTURE)
    for field in source.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        name = field.name.replace("llama.", ARCHITECTURE + ".", 1)
        if name == f"{ARCHITECTURE}.block_count":
            w.add_block_count(s.layers + 1)
        else:
            w.add_key_value(name, field.contents(), kind, sub_type=sub)
    w.add_nextn_predict_layers(1)
    w.add_leading_dense_block_count(s.layers)
    w.add_expert_count(ROUTED)
    w.add_expert_used_count(ROUTED)
    w.add_expert_shared_count(s.hidden // expert - ROUTED)
    w.add_expert_feed_forward_length(expert)
    w.add_expert_gating_func(gguf.ExpertGatingFuncType(SIGMOID))
    w.add_expert_weights_norm(True)
    w.add_expert_weights_scale(float(ROUTED))

    def add(name: str, data: NDArray[Any], kind: Q) -> None:
        w.add_tensor(name, np.ascontiguousarray(data), raw_dtype=None if kind == Q.F32 else kind)

    tensors = {t.name: (t.data, Q(t.tensor_type)) for t in source.tensors}
    for name, (data, kind) in tensors.items():
        add(_renamed(name), _rows(name, data, s), kind)
    for name in ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm"):
        data, kind = tensors[f"blk.{last}.{name}.weight"]
        add(_renamed(f"blk.{s.layers}.{name}.weight"), _rows(name, data, s), kind)
    block = f"blk.{s.layers}."
    cut = s.hidden - ROUTED * expert
    for name in ("ffn_gate", "ffn_up", "ffn_down"):
        matrix = reader.w[f"blk.{last}.{name}.weight"]
        units = matrix.T if name == "ffn_down" else matrix  # [hidden, width]
        shared, routed = units[:cut], units[cut:].reshape(ROUTED, expert, s.width)
        if name == "ffn_down":
            shared, routed = shared.T, routed.transpose(0, 2, 1)
        add(f"{block}{name}_shexp.weight", quantize(np.ascontiguousarray(shared), Q.Q8_0), Q.Q8_0)
        add(f"{block}{name}_exps.weight", quantize(np.ascontiguousarray(routed), Q.Q8_0), Q.Q8_0)
    add(f"{block}ffn_gate_inp.weight", np.zeros((ROUTED, s.width), np.float32), Q.F32)
    add(f"{block}exp_probs_b.bias", np.zeros(ROUTED, np.float32), Q.F32)
    add(f"{block}nextn.eh_proj.weight", quantize(joint, Q.Q8_0), Q.Q8_0)
    for name in ("enorm", "hnorm"):
        add(f"{block}nextn.{name}.weight", np.ones(s.width, np.float32), Q.F32)
    add(f"{block}nextn.shared_head_norm.weight", reader.w["output_norm.weight"], Q.F32)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    part.replace(dst)


def _expert_width(hidden: int) -> int:
    """Return the widest expert of whole Q8_0 blocks of which three or more make up the net."""
    widths = [e for e in range(32, hidden // (ROUTED + 1) + 1, 32) if hidden % e == 0]
    if not widths:
        raise ValueError(f"a feed-forward width of {hidden} cannot be cut into experts")
    return widths[-1]


def _renamed(name: str) -> str:
    """Rename the norm before the feed-forward net: here it is called after the attention."""
    return name.replace(".ffn_norm.", ".post_attention_norm.")


def _rows(name: str, data: NDArray[Any], s: LlamaShape) -> NDArray[Any]:
    """Reorder rows of Q and K from neighboring pairs (2i, 2i+1) to halves (i, i + size / 2)."""
    if "attn_q" not in name and "attn_k" not in name:
        return data
    heads = data.reshape(-1, s.head_size, data.shape[-1])
    return np.concatenate((heads[:, 0::2], heads[:, 1::2]), 1).reshape(data.shape)


def own_texts(model: Path, per_slice: int, limit: int, threads: int = 1) -> Iterator[list[int]]:
    """Yield prompts of the corpus with the model's own greedy answers of up to `limit` tokens."""
    with Runner(model, threads=threads) as runner:
        for slice_ in SLICES:
            for prompt, _, _ in heldout_prompts(slice_, per_slice, "nextn"):
                tokens = runner.tokenize(chatml(prompt, open_reply=True))[-runner.context // 2 :]
                yield tokens + runner.generate(tokens, limit)


def main() -> None:
    """Run the command line: fit to the model's own answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", type=Path, default=TARGET_FILE)
    parser.add_argument("--texts", type=int, default=40, help="per slice")
    a = parser.parse_args()
    build(a.source, a.out, own_texts(a.source, a.texts, 64))


if __name__ == "__main__":
    main()

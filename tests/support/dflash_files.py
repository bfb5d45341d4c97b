"""Random DFlash, DFlash2 and DSpark files, and the same drafters in NumPy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from eagle_files import Rows, _split
from ggufs import _Writer

from specllama.models.dflash_file import Kind, read_facts
from specllama.models.gguf import read_header
from specllama.models.layer_inputs import read_draft_ids
from specllama.models.tensors import read_tensor

RANK, TAPS, GROUP, CANDIDATES = 8, 3, 16, 4
MASK = 1


def write_dflash(
    path: Path,
    target: Path,
    *,
    kind: Kind = "dflash",
    width: int | None = None,
    layers: Sequence[int] = (0, 2),
    blocks: int = 2,
    heads: int = 4,
    heads_kv: int = 2,
    hidden: int = 96,
    block_size: int = 6,
    context: int = 512,
    draft_ids: Sequence[int] | None = None,
    own_embedding: bool = False,
    own_output: bool = False,
    shared_kv: bool = False,
    confidence: bool = True,
    tokens: Sequence[str] | None = None,
    scale: float = 0.5,
    seed: int = 5,
    keys: Mapping[str, Any] | None = None,
    leave_out: Sequence[str] = (),
) -> Path:
    """A drafter with random weights (F32) that speaks the tokens of ``target``.

    Args:
        kind: "dspark" has a Markov head, and ``confidence``; "dflash2" convolutions and a selector.
        draft_ids: the tokens that it can say; it then brings an output matrix of its own.
        shared_kv: values are made of the keys.
        tokens: another vocabulary than the target's.
        scale: standard deviation of its own output matrix: larger is more certain.
        keys: metadata to add, replace, or (None) remove.
        leave_out: tensors not to write.
    """
    rng = np.random.default_rng(seed)
    speaker = read_header(target)
    width = width or speaker.embedding_length
    size = width // heads
    vocab = len(tokens) if tokens is not None else speaker.vocab_size
    w = _Writer(path, "dflash")
    sizes = {"width": width, "blocks": blocks, "hidden": hidden, "heads": heads, "size": size}
    w.describe(path, **sizes, heads_kv=heads_kv, context=context)
    w.add_array("dflash.target_layers", list(layers))
    w.add_uint32("dflash.block_size", block_size)
    if kind == "dflash2":
        w.add_uint32("dflash.conv_kernel_size", TAPS)
        w.add_uint32("dflash.conv_group_size", GROUP)
        w.add_uint32("dflash.selector_rank", RANK)
        w.add_uint32("dflash.selector_top_k", CANDIDATES)
    for field in gguf.GGUFReader(target).fields.values():
        if not field.name.startswith("tokenizer.") or field.name == "tokenizer.chat_template":
            continue
        value = field.contents()
        if field.name == "tokenizer.ggml.tokens" and tokens is not None:
            value = list(tokens)
        elif field.name == "tokenizer.ggml.token_type":
            value = (list(value) + [1] * vocab)[:vocab]
        array = len(field.types) > 1
        w.add_key_value(field.name, value, field.types[0], field.types[-1] if array else None)
    w.add_mask_token_id(MASK)
    w.change(keys or {})

    def add(name: str, *shape: int, deviation: float | None = None) -> None:
        if name in leave_out:
            return
        if len(shape) == 1:
            values = rng.uniform(0.5, 1.5, shape)
        else:
            values = rng.normal(0.0, deviation or shape[-1] ** -0.5, shape)
        w.add_tensor(name, values.astype(np.float32))

    add("fc.weight", width, len(layers) * width)
    add("enc.output_norm.weight", width)
    add("output_norm.weight", width)
    for i in range(blocks):
        b = f"blk.{i}."
        add(b + "attn_norm.weight", width)
        add(b + "attn_q.weight", width, width)
        add(b + "attn_k.weight", heads_kv * size, width)
        if not shared_kv:
            add(b + "attn_v.weight", heads_kv * size, width)
        add(b + "attn_output.weight", width, width)
        add(b + "attn_q_norm.weight", size)
        add(b + "attn_k_norm.weight", size)
        add(b + "ffn_norm.weight", width)
        add(b + "ffn_gate.weight", hidden, width)
        add(b + "ffn_up.weight", hidden, width)
        add(b + "ffn_down.weight", width, hidden)
        for part in ("attn", "ffn") if kind == "dflash2" else ():
            add(b + part + "_conv_base", 2, TAPS, width)
            add(b + part + "_conv_proj.weight", 2 * TAPS * width // GROUP, width)
    if own_embedding:
        add("token_embd.weight", vocab, width, deviation=1.0)
    said = vocab if draft_ids is None else len(draft_ids)
    if own_output or draft_ids is not None:
        add("output.weight", said, width, deviation=scale)
    if draft_ids is not None and "d2t" not in leave_out:
        w.add_tensor("d2t", np.array(draft_ids, np.int64))
    if kind == "dspark":
        add("markov_w1.weight", vocab, RANK, deviation=1.0)
        add("markov_w2.weight", said, RANK)
        if confidence:
            add("conf_proj.weight", 1, width + RANK)
            add("conf_proj.bias", 1)
    if kind == "dflash2":
        add("selector_predecessor.weight", vocab, RANK, deviation=1.0)
        add("selector_successor.weight", vocab, RANK, deviation=1.0)
        add("selector_hidden.weight", RANK, width)
    w.finish()
    return path


@dataclass(frozen=True)
class Filled:
    """What a block says: logits [n, vocab] and final states [n, width] of all its places."""

    logits: Rows
    states: Rows


class NumpyDrafter:
    """A drafter, written out."""

    def __init__(self, path: Path, target: Path) -> None:
        self._head, other = read_header(path), read_header(target)
        head = self._head

        def borrowed(name: str, beside: str = "") -> Rows:
            own = next((n for n in (name, beside) if n in head.by_name), "")
            return read_tensor(head, own) if own else read_tensor(other, name)

        def tensor(name: str) -> Rows:
            if name.endswith("conv_base"):  # three-dimensional
                info = head.by_name[name]
                data = np.fromfile(
                    path, "<f4", info.n_elements, offset=head.data_offset + info.offset
                )
                return data.reshape(info.shape[::-1])
            return read_tensor(head, name)

        self.w = {name: tensor(name) for name in head.by_name if name != "d2t"}
        self.embedding = borrowed("token_embd.weight")
        self.output = borrowed("output.weight", "token_embd.weight")
        self.ids = read_draft_ids(head) if "d2t" in head.by_name else None
        self.mask = head.integer("tokenizer.ggml.mask_token_id") or 0
        self.causal = bool(head.flag("dflash.attention.causal"))
        facts = read_facts(head)
        self.kind, self.anchored = facts.kind, facts.anchored

    def block(self, features: Rows, token: int, n: int, at: int | None = None) -> Filled:
        """``token`` and masks, ``n`` places in all, behind ``features`` [known, layers * width].

        ``at``: position of the token; the known ones lie before it.
        """
        w, h = self.w, self._head
        at = len(features) if at is None else at
        known = self._norm(features @ w["fc.weight"].T, w["enc.output_norm.weight"])
        x = self.embedding[[token] + [self.mask] * (n - 1)]
        x = x * (h.number("dflash.embedding_scale") or 1.0)
        heads, heads_kv = h.head_count, h.head_count_kv
        for i in range(h.block_count):
            b = f"blk.{i}."
            y = self._norm(x, w[b + "attn_norm.weight"])
            shift = w.get(b + "attn_conv_proj.weight")
            turned = None if shift is None else y @ shift.T
            y = self._convolve(y, turned, w.get(b + "attn_conv_base"), 0)
            q = self._norm(_split(y @ w[b + "attn_q.weight"].T, heads), w[b + "attn_q_norm.weight"])
            q = self._rotate(q, at)
            (k, v), (k_own, v_own) = self._keys(b, known, at - len(known)), self._keys(b, y, at)
            k, v = (
                np.repeat(np.concatenate(pair, 1), heads // heads_kv, 0)
                for pair in ((k, k_own), (v, v_own))
            )
            scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
            if self.causal:
                scores[:, np.triu(np.ones((n, k.shape[1]), np.bool_), len(known) + 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            mixed = (weights @ v).transpose(1, 0, 2).reshape(n, -1) @ w[b + "attn_output.weight"].T
            x = x + self._convolve(mixed, turned, w.get(b + "attn_conv_base"), 1)
            y = self._norm(x, w[b + "ffn_norm.weight"])
            shift = w.get(b + "ffn_conv_proj.weight")
            turned = None if shift is None else y @ shift.T
            y = self._convolve(y, turned, w.get(b + "ffn_conv_base"), 0)
            gate = y @ w[b + "ffn_gate.weight"].T
            y = gate / (1 + np.exp(-gate)) * (y @ w[b + "ffn_up.weight"].T)
            x = x + self._convolve(
                y @ w[b + "ffn_down.weight"].T, turned, w.get(b + "ffn_conv_base"), 1
            )
        states = self._norm(x, w["output_norm.weight"])
        return Filled(self._scattered(states @ self.output.T, -np.inf), states)

    def capped(self, row: Rows) -> Rows:
        """DFlash: logits as the target would scale and cap them."""
        row = row * (self._head.number("dflash.logit_scale") or 1.0)
        cap = self._head.number("dflash.final_logit_softcapping")
        return np.where(np.isfinite(row), np.tanh(row / cap) * cap, row) if cap else row

    def follow(self, filled: Filled, place: int, before: int) -> Rows:
        """DSpark: logits [vocab] of a place behind a token."""
        bias = self.w["markov_w1.weight"][before] @ self.w["markov_w2.weight"].T
        row: Rows = filled.logits[place] + self._scattered(bias[None], 0.0)[0]
        return row

    def sure(self, filled: Filled, place: int, before: int) -> float:
        """DSpark: how likely a place is right."""
        seen = np.concatenate((filled.states[place], self.w["markov_w1.weight"][before]))
        z = (self.w["conf_proj.weight"] @ seen + self.w["conf_proj.bias"]).item()
        return float(1 / (1 + np.exp(-z)))

    def select(self, filled: Filled, place: int, before: int, best: npt.NDArray[Any]) -> Rows:
        """DFlash2: scores [vocab] of a place behind a token, -inf but for the ``best``."""
        logits, gate = (
            filled.logits[place],
            filled.states[place] @ self.w["selector_hidden.weight"].T,
        )
        pair = self.w["selector_successor.weight"][best] @ (
            self.w["selector_predecessor.weight"][before] * gate
        )
        row = np.full(len(logits), -np.inf, np.float32)
        row[best] = logits[best] + pair
        return row

    def _keys(self, block: str, x: Rows, first: int) -> tuple[Rows, Rows]:
        """Keys and values [heads, n, size] of a block for [n, width] from a position on."""
        made = _split(x @ self.w[block + "attn_k.weight"].T, self._head.head_count_kv)
        values = self.w.get(block + "attn_v.weight")
        if values is None:
            v = self._norm(made, 1.0)
        else:
            v = _split(x @ values.T, self._head.head_count_kv)
        return self._rotate(self._norm(made, self.w[block + "attn_k_norm.weight"]), first), v

    def _scattered(self, said: Rows, rest: float) -> Rows:
        if self.ids is None:
            return said.astype(np.float32)
        rows = np.full((len(said), self._head.vocab_size), rest, np.float32)
        rows[:, self.ids] = said
        return rows

    def _norm(self, x: Rows, weight: Rows | float) -> Rows:
        eps = self._head.number("dflash.attention.layer_norm_rms_epsilon") or 0.0
        normed: Rows = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + eps)
        return normed * weight

    def _rotate(self, x: npt.NDArray[Any], first: int) -> npt.NDArray[Any]:
        """The halves of [heads, n, size] turn by their position times a falling frequency."""
        half = x.shape[-1] // 2
        base = self._head.number("dflash.rope.freq_base") or 10000.0
        angles = (first + np.arange(x.shape[1]))[:, None] * base ** -(np.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate(
            (a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)), -1
        )

    @staticmethod
    def _convolve(x: Rows, turned: Rows | None, base: Rows | None, side: int) -> Rows:
        """DFlash2: every place mixed with those before it, by weights that it says itself."""
        if turned is None or base is None:
            return x
        own = turned.reshape(len(x), 2, TAPS, -1)[:, side].repeat(GROUP, -1) + base[side]
        mixed = np.zeros_like(x)
        for tap in range(min(TAPS, len(x))):
            mixed[tap:] += own[tap:, tap] * x[: len(x) - tap]
        return mixed

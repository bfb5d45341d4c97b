"""NextN blocks in NumPy: what llama.cpp should compute on the files of `ggufs_nextn`."""

from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np
from ggufs_nextn import (
    GROUPED,
    HEAD,
    HEADS,
    LAST_NORM,
    LATENT,
    PLAIN,
    QWEN,
    ROPE,
    STREAMS,
    USED,
    value_size,
)
from numpy.typing import NDArray

from specllama.models.gguf import read_header
from specllama.models.nextn_blocks import trunk_blocks

Floats = NDArray[np.float32]


def sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def silu(x: Floats) -> Floats:
    return x * sigmoid(x)


def shares(scores: Floats) -> Floats:
    """Softmax of the last axis."""
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    out: Floats = powers / powers.sum(-1, keepdims=True)
    return out


class NumpyNextn:
    """One NextN block over a whole sequence of pairs."""

    def __init__(self, path: Path, head: int = 0) -> None:
        self.header = header = read_header(path)
        self.arch = header.architecture
        self.block = trunk_blocks(header) + head
        self.w = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}
        layered = header.number(header.own("attention.layer_norm_rms_epsilon")) is None
        self.norm = self.centred if layered else self.rms

    def __getitem__(self, name: str) -> Floats:
        return self.w[f"blk.{self.block}.{name}"]

    def get(self, name: str) -> Floats | None:
        return self.w.get(f"blk.{self.block}.{name}")

    def number(self, key: str, default: float = 0.0) -> float:
        found = self.header.number(self.header.own(key))
        return default if found is None else found

    def windowed(self) -> bool:
        return bool(
            self.header.per_layer(self.header.own("attention.sliding_window_pattern"))[self.block]
        )

    # -- norms and rotation

    def rms(self, x: Floats, weight: Floats | None) -> Floats:
        eps = self.number("attention.layer_norm_rms_epsilon")
        out = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)
        return out if weight is None else out * weight

    def centred(self, x: Floats, weight: Floats | None) -> Floats:
        x = x - x.mean(-1, keepdims=True)
        out = x / np.sqrt(
            np.mean(x * x, -1, keepdims=True) + self.number("attention.layer_norm_epsilon")
        )
        return out if weight is None else out * weight

    def rotate(self, x: Floats, n: int, *, halves: bool) -> Floats:
        """RoPE of the first ``n`` values: pairs of halves, or neighbours; x [rows, heads, size]."""
        base = self.number("rope.freq_base")
        if self.arch in ("mimo2", "step35") and self.windowed():
            base = self.number("rope.freq_base_swa")
        angles = np.arange(len(x))[:, None, None] * base ** -(np.arange(0, n, 2) / n)
        cos, sin = np.cos(angles), np.sin(angles)
        out = x.copy()
        first, second = (
            (slice(0, n // 2), slice(n // 2, n)) if halves else (slice(0, n, 2), slice(1, n, 2))
        )
        a, b = x[..., first], x[..., second]
        out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
        return out

    # -- attention

    def attend(
        self, q: Floats, k: Floats, v: Floats, scale: float, sinks: Floats | None = None
    ) -> Floats:
        """q, k [rows, heads, size], v [rows, heads, value], of k and v one head or as many."""
        n = len(q)
        scores = (
            np.einsum("qhd,kgd->hqk", q, k) if k.shape[1] == 1 else np.einsum("qhd,khd->hqk", q, k)
        )
        far = np.arange(n)[:, None] - np.arange(n)[None]
        window = (
            self.number("attention.sliding_window")
            if self.windowed() or self.arch == "deepseek4"
            else n
        )
        scores = np.where((far >= 0) & (far < window), scores * scale, -np.inf)
        if sinks is not None:  # a key without a value
            scores = np.concatenate(
                (scores, np.broadcast_to(sinks[:, None, None], (len(sinks), n, 1))), -1
            )
        p = shares(scores)[..., :n]
        return (
            np.einsum("hqk,kgd->qhd", p, v) if v.shape[1] == 1 else np.einsum("hqk,khd->qhd", p, v)
        )

    def heads(self, x: Floats) -> Floats:
        n, value = len(x), value_size(self.arch)
        if self.arch == "mimo2":
            q, k, v = np.split(
                x @ self["attn_qkv.weight"].T, (HEADS * HEAD, HEADS * HEAD + HEAD), -1
            )
        else:
            q, k, v = (x @ self[f"attn_{name}.weight"].T for name in "qkv")
        q, k, v = q.reshape(n, HEADS, -1), k.reshape(n, 1, HEAD), v.reshape(n, 1, value)
        q, gate = q[..., :HEAD], q[..., HEAD:]
        if self.get("attn_q_norm.weight") is not None:
            q, k = self.rms(q, self["attn_q_norm.weight"]), self.rms(k, self["attn_k_norm.weight"])
        size = int(self.number("rope.dimension_count"))
        if self.arch == "step35" and not self.windowed():
            size //= 2
        if self.arch != "nemotron_h_moe":
            halves = self.arch != "cohere2moe"
            q, k = self.rotate(q, size, halves=halves), self.rotate(k, size, halves=halves)
        out = self.attend(q, k, v, HEAD**-0.5, self.get("attn_sinks.weight"))
        if gate.size:
            out = out * sigmoid(gate)
        if self.arch == "step35":
            out = out * sigmoid(x @ self["attn_gate.weight"].T)[..., None]
        return (
            out.reshape(n, -1)
            @ self["attn_output.weight"].T
            * self.number("attention.value_scale", 1.0)
        )

    def latent(self, x: Floats) -> Floats:
        """Keys and values made whole from what the cache holds."""
        n, rank = len(x), self["attn_kv_a_norm.weight"].size
        q = (
            self.rms(x @ self["attn_q_a.weight"].T, self["attn_q_a_norm.weight"])
            @ self["attn_q_b.weight"].T
        )
        q = q.reshape(n, HEADS, PLAIN + ROPE)
        q_plain, q_rope = q[..., :PLAIN], self.rotate(q[..., PLAIN:], ROPE, halves=False)
        both = x @ self["attn_kv_a_mqa.weight"].T
        held, k_rope = self.rms(both[:, :rank], self["attn_kv_a_norm.weight"]), both[:, None, rank:]
        k_rope = np.repeat(self.rotate(k_rope, ROPE, halves=False), HEADS, 1)
        k = np.einsum("nr,hrp->nhp", held, self["attn_k_b.weight"])
        v = np.einsum("nr,hvr->nhv", held, self["attn_v_b.weight"])
        whole = np.concatenate((q_plain, q_rope), -1), np.concatenate((k, k_rope), -1)
        out = self.attend(*whole, v, (PLAIN + ROPE) ** -0.5)
        if self.arch == "bailingmoe3":
            out = out * sigmoid(x @ self["attn_gate.weight"].T)[..., None]
        return out.reshape(n, -1) @ self["attn_output.weight"].T

    # -- feed-forward nets

    def net(self, x: Floats) -> Floats:
        def one(kind: str, expert: int | None = None) -> Floats:
            up, down = (self[f"ffn_{name}{kind}.weight"] for name in ("up", "down"))
            gate = self.get(f"ffn_gate{kind}.weight")
            if expert is not None:
                up, down, gate = up[expert], down[expert], None if gate is None else gate[expert]
            inner = np.maximum(x @ up.T, 0) ** 2 if gate is None else silu(x @ gate.T) * (x @ up.T)
            out: Floats = inner @ down.T
            return out

        if self.get("ffn_gate_inp.weight") is None:
            return one("")
        logits = x @ self["ffn_gate_inp.weight"].T
        if self.arch in QWEN:
            p = shares(logits)
        elif self.arch == "deepseek4":
            p = np.sqrt(np.log1p(np.exp(logits)))
        else:
            p = sigmoid(logits)
        bias = self.get("exp_probs_b.bias")
        chosen = np.argsort(-(p if bias is None else p + bias), -1)[:, :USED]
        weights = np.zeros_like(p)
        np.put_along_axis(weights, chosen, np.take_along_axis(p, chosen, -1), -1)
        weights /= weights.sum(-1, keepdims=True)
        weights *= 1.0 if self.arch in QWEN else self.number("expert_weights_scale")
        routed = sum(weights[:, e, None] * one("_exps", e) for e in range(weights.shape[1]))
        shared = one("_shexp")
        if self.get("ffn_gate_inp_shexp.weight") is not None:
            shared = shared * sigmoid(x @ self["ffn_gate_inp_shexp.weight"])[:, None]
        out: Floats = routed + shared
        return out / 2 if self.arch == "cohere2moe" else out

    # -- all of it

    def run(self, tokens: Sequence[int], states: Floats) -> tuple[Floats, Floats]:
        """Logits and own states behind each pair."""
        pair = np.concatenate(
            (
                self.norm(self.w["token_embd.weight"][list(tokens)], self["nextn.enorm.weight"]),
                self.norm(states, self["nextn.hnorm.weight"]),
            ),
            -1,
        )
        x = pair @ self["nextn.eh_proj.weight"].T
        h = self.norm(x, self["attn_norm.weight"])
        mixed = self.latent(h) if self.arch in LATENT else self.heads(h)
        if self.arch == "cohere2moe":  # side by side
            x = x + mixed + self.net(h)
        else:
            x = x + mixed
            name = "ffn_norm" if self.get("ffn_norm.weight") is not None else "post_attention_norm"
            x = x + self.net(self.norm(x, self[f"{name}.weight"]))
        last = self.centred if self.arch == "nemotron_h_moe" else self.norm
        normed = last(x, self[f"{LAST_NORM.get(self.arch, 'nextn.shared_head_norm')}.weight"])
        logits = normed @ self.w["output.weight"].T * self.number("logit_scale", 1.0)
        return logits, x if self.arch in ("mimo2", "step35") else normed


class NumpyStreams(NumpyNextn):
    """The block of `deepseek4`: four residual streams, mixed before and behind each net."""

    def _mixes(self, x: Floats, weight: Floats) -> Floats:
        return self.rms(x.reshape(len(x), -1), None) @ weight.T

    def _joined(self, x: Floats, mixes: Floats, scale: Floats, base: Floats) -> Floats:
        """One stream of all, [rows, width]."""
        pre = sigmoid(mixes * scale + base) + self.number("hyper_connection.epsilon")
        return np.einsum("nsw,ns->nw", x, pre)

    def _around(self, x: Floats, part: str, net: Callable[[Floats], Floats]) -> Floats:
        """The streams behind a net; x [rows, streams, width]."""
        n, s, eps = len(x), STREAMS, self.number("hyper_connection.epsilon")
        mixes = self._mixes(x, self[f"hc_{part}_fn.weight"])
        scale, base = self[f"hc_{part}_scale.weight"], self[f"hc_{part}_base.weight"]
        out = net(self._joined(x, mixes[:, :s], scale[0], base[:s]))
        behind = 2 * sigmoid(mixes[:, s : 2 * s] * scale[1] + base[s : 2 * s])
        mix = (
            shares((mixes[:, 2 * s :] * scale[2] + base[2 * s :]).reshape(n, s, s)) + eps
        )  # [from, to]
        for i in range(int(self.number("hyper_connection.sinkhorn_iterations"))):
            if i:
                mix = mix / (mix.sum(2, keepdims=True) + eps)
            mix = mix / (mix.sum(1, keepdims=True) + eps)
        return out[:, None] * behind[..., None] + np.einsum("nfw,nft->ntw", x, mix)

    def _rotate_end(self, x: Floats, *, back: bool = False) -> Floats:
        n = int(self.number("rope.dimension_count"))
        end = x[..., -n:]
        if back:  # the other way round: of (b, a) instead of (a, b)
            end = end.reshape(*end.shape[:-1], -1, 2)[..., ::-1].reshape(end.shape)
        end = self.rotate(end, n, halves=False)
        if back:
            end = end.reshape(*end.shape[:-1], -1, 2)[..., ::-1].reshape(end.shape)
        return np.concatenate((x[..., :-n], end), -1)

    def heads(self, x: Floats) -> Floats:
        n = len(x)
        q = (
            self.rms(x @ self["attn_q_a.weight"].T, self["attn_q_a_norm.weight"])
            @ self["attn_q_b.weight"].T
        )
        q = self._rotate_end(self.rms(q.reshape(n, HEADS, HEAD), None))
        kv = self.rms(x @ self["attn_kv.weight"].T, self["attn_kv_a_norm.weight"])
        kv = self._rotate_end(kv[:, None])
        out = self.attend(q, kv, kv, HEAD**-0.5, self["attn_sinks.weight"])
        out = self._rotate_end(out, back=True).reshape(n, GROUPED, -1)
        inner = self["attn_output_a.weight"].reshape(GROUPED, -1, out.shape[-1])
        return np.einsum("ngd,grd->ngr", out, inner).reshape(n, -1) @ self["attn_output_b.weight"].T

    def run(self, tokens: Sequence[int], states: Floats) -> tuple[Floats, Floats]:
        n = len(tokens)
        streams = self.rms(states.reshape(n, STREAMS, -1), self["nextn.hnorm.weight"])
        embedded = self.rms(self.w["token_embd.weight"][list(tokens)], self["nextn.enorm.weight"])
        pair = np.concatenate((np.repeat(embedded[:, None], STREAMS, 1), streams), -1)
        x = pair @ self["nextn.eh_proj.weight"].T
        x = self._around(x, "attn", lambda h: self.heads(self.rms(h, self["attn_norm.weight"])))
        x = self._around(x, "ffn", lambda h: self.net(self.rms(h, self["ffn_norm.weight"])))
        mixes = self._mixes(x, self.w["output_hc_fn.weight"])
        one = self._joined(
            x, mixes, self.w["output_hc_scale.weight"], self.w["output_hc_base.weight"]
        )
        logits = self.rms(one, self["nextn.shared_head_norm.weight"]) @ self.w["output.weight"].T
        return logits, x.reshape(n, -1)


def reference(path: Path, head: int = 0) -> NumpyNextn:
    deep = read_header(path).architecture == "deepseek4"
    return (NumpyStreams if deep else NumpyNextn)(path, head)

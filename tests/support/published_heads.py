"""Repositories of random draft heads, as they are published, and the same heads in NumPy.

The weights are those of the original layout: rotations turn the halves of a head's values against
each other. What is converted from them must compute the same.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def save_safetensors(path: Path, tensors: Mapping[str, Any], dtype: str = "F16") -> Path:
    """Write arrays; floats as ``dtype``, other arrays as 64-bit integers or booleans."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in tensors.items():
        kind = {"b": "BOOL", "i": "I64"}.get(values.dtype.kind, dtype)
        if kind == "BF16":
            body = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
        else:
            body = values.astype({"F16": "<f2", "F32": "<f4", "I64": "<i8", "BOOL": "?"}[kind])
            body = body.tobytes()
        header[name] = {
            "dtype": kind,
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(body)],
        }
        data += body
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def eagle3_config(layout: str, **changes: Any) -> dict[str, Any]:
    """A configuration; ``layout`` is "speculators" or "plain", keys of the layer go where it says.

    What is the same in every Llama configuration is left out, as the format does.
    """
    layer = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
    }
    own = {"draft_vocab_size": 100, "norm_before_residual": True}
    for key, value in changes.items():
        part = own if key in (*own, "norm_before_fc", "eagle_aux_hidden_state_layer_ids") else layer
        part[key] = value
    if layout == "speculators":
        kind = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
        return {**kind, **own, "transformer_layer_config": layer}
    return {"architectures": ["LlamaForCausalLMEagle3"], **own, **layer}


def eagle3_weights(
    config: Mapping[str, Any],
    *,
    target_width: int = 64,
    vocab: int = 332,
    draft_ids: Sequence[int] | None = None,
    own_embedding: bool = True,
    padding: int = 0,
    seed: int = 3,
) -> dict[str, Any]:
    """Random tensors under the names of the speculators format."""
    layer = config.get("transformer_layer_config", config)
    e, f, size = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    q, kv = layer["num_attention_heads"] * size, layer["num_key_value_heads"] * size
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> Floats:
        return rng.normal(0.0, shape[-1] ** -0.5, shape).astype(np.float32)

    def norm(n: int = e) -> Floats:
        return rng.uniform(0.5, 1.5, n).astype(np.float32)

    block = "layers.0."
    found: dict[str, Any] = {
        "fc.weight": matrix(e, 3 * target_width),
        block + "input_layernorm.weight": norm(),
        block + "hidden_norm.weight": norm(),
        block + "self_attn.q_proj.weight": matrix(q, 2 * e),
        block + "self_attn.k_proj.weight": matrix(kv, 2 * e),
        block + "self_attn.v_proj.weight": matrix(kv, 2 * e),
        block + "self_attn.o_proj.weight": matrix(e, q),
        block + "post_attention_layernorm.weight": norm(),
        block + "mlp.gate_proj.weight": matrix(f, e),
        block + "mlp.up_proj.weight": matrix(f, e),
        block + "mlp.down_proj.weight": matrix(e, f),
        "norm.weight": norm(),
    }
    if config.get("norm_before_fc"):
        found["input_norm.weight"] = norm(3 * target_width)
    if own_embedding:
        found["embed_tokens.weight"] = matrix(vocab + padding, e)
    rows = vocab + padding if draft_ids is None else len(draft_ids)
    found["lm_head.weight"] = 3 * matrix(rows, e)
    if draft_ids is not None:
        found["d2t"] = np.array(draft_ids, np.int64) - np.arange(rows)
        found["t2d"] = np.isin(np.arange(vocab), draft_ids)
    return found


def write_repository(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, Any], *, dtype: str = "F32"
) -> Path:
    """The folder; in the plain layout the layer is called ``midlayer``, in files of two parts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if "transformer_layer_config" in config:
        save_safetensors(folder / "model.safetensors", weights, dtype)
        return folder
    named = {name.replace("layers.0.", "midlayer."): value for name, value in weights.items()}
    for part in range(2):
        names = sorted(named)[part::2]
        file = folder / f"model-0000{part + 1}-of-00002.safetensors"
        save_safetensors(file, {name: named[name] for name in names}, dtype)
    return folder


class PublishedHead:
    """An EAGLE-3 head in its original layout, written out.

    Args:
        embedding: the target's, for heads that borrow it.
    """

    def __init__(
        self, config: Mapping[str, Any], weights: Mapping[str, Any], embedding: Floats, vocab: int
    ) -> None:
        self._config, self._layer = config, config.get("transformer_layer_config", config)
        self._w, self._vocab = weights, vocab
        self._embedding = weights.get("embed_tokens.weight", embedding)

    def fuse(self, features: Floats) -> Floats:
        """[n, width] of [n, 3 * target_width]"""
        if self._config.get("norm_before_fc"):
            features = self._norm(features, "input_norm")
        fused: Floats = features @ self._w["fc.weight"].T
        return fused

    def run(self, tokens: Sequence[int], states: Floats) -> tuple[Floats, Floats]:
        """Logits [n, vocab] and own states [n, width] of pairs at positions 0..n-1."""
        embedded = self._norm(self._embedding[list(tokens)], "layers.0.input_layernorm")
        state = self._norm(states, "layers.0.hidden_norm")
        z = np.concatenate((embedded, state), axis=1)
        q, k, v = (self._split(z @ self._of(f"{part}_proj").T) for part in "qkv")
        q, k = self._turn(q), self._turn(k)
        k, v = (np.repeat(x, len(q) // len(x), axis=0) for x in (k, v))
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = (weights @ v).transpose(1, 0, 2).reshape(len(tokens), -1)
        x = state if self._config["norm_before_residual"] else states
        x = x + mixed @ self._of("o_proj").T
        y = self._norm(x, "layers.0.post_attention_layernorm")
        gate, up, down = (self._w[f"layers.0.mlp.{p}_proj.weight"] for p in ("gate", "up", "down"))
        g = y @ gate.T
        x = x + (g / (1 + np.exp(-g)) * (y @ up.T)) @ down.T
        said = self._norm(x, "norm") @ self._w["lm_head.weight"].T
        logits = np.full((len(tokens), self._vocab), -np.inf, np.float32)
        rows = np.arange(min(said.shape[1], self._vocab))
        ids = rows + self._w["d2t"] if "d2t" in self._w else rows
        logits[:, ids] = said[:, : len(rows)]
        return logits, x.astype(np.float32)

    def _of(self, name: str) -> Floats:
        weight: Floats = self._w[f"layers.0.self_attn.{name}.weight"]
        return weight

    def _norm(self, x: Any, name: str) -> Floats:
        eps = self._layer["rms_norm_eps"]
        scale = np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + eps)
        normed: Floats = (x / scale).astype(np.float32) * self._w[name + ".weight"]
        return normed

    def _split(self, x: Floats) -> Floats:
        return x.reshape(len(x), -1, self._layer["head_dim"]).transpose(1, 0, 2)

    def _turn(self, x: Floats) -> Floats:
        """The first half of the values turns against the second."""
        size = x.shape[-1]
        speed = [self._slowed(1e4 ** (-2 * i / size), i, size) for i in range(size // 2)]
        angles = np.arange(x.shape[1])[:, None] * np.array(speed)
        a, b = x[..., : size // 2], x[..., size // 2 :]
        turned = (a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles))
        scaling = self._layer.get("rope_scaling") or {}
        larger = 0.1 * math.log(scaling["factor"]) + 1 if scaling.get("rope_type") == "yarn" else 1
        return larger * np.concatenate(turned, axis=-1).astype(np.float32)

    def _slowed(self, speed: float, i: int, size: int) -> float:
        scaling = self._layer.get("rope_scaling")
        if not scaling:
            return speed
        if scaling["rope_type"] == "yarn":

            def turning(times: float) -> float:
                """Which pair turns so often within the trained length."""
                trained = scaling["original_max_position_embeddings"]
                return size * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(1e4))

            low, high = max(math.floor(turning(32)), 0), min(math.ceil(turning(1)), size - 1)
            short = 1 - min(max((i - low) / max(high - low, 0.001), 0), 1)
            return speed * short + speed / scaling["factor"] * (1 - short)
        trained, tokens = scaling["original_max_position_embeddings"], 2 * math.pi / speed
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if tokens < trained / high:
            return speed
        if tokens > trained / low:
            return float(speed / scaling["factor"])
        smooth = (trained / tokens - low) / (high - low)
        return float((1 - smooth) * speed / scaling["factor"] + smooth * speed)

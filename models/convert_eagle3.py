"""Published EAGLE-3 heads as files of llama.cpp's ``eagle3`` format.

Read are repositories of the ``speculators`` format, whose layer is described by
``transformer_layer_config``, and those that EAGLE's authors, SpecForge and others publish, where it
stands at the top. Both name the same tensors: one decoder layer (``layers.0`` or ``midlayer``), the
fusion ``fc``, the output matrix over a vocabulary of its own and ``d2t``, by how much the id of a
draft token is to be raised. Two things change: rows of the query and key matrices go from halves to
neighbouring pairs, as llama.cpp turns them here, and ``d2t`` becomes the ids themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specllama.errors import CannotLoad, PairIncompatible, SpecllamaError
from specllama.models.checkpoint import read_folder
from specllama.models.eagle3_file import LAYERS_READ, read_facts
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.gguf_writer import Tensor, Value, stored, write_gguf
from specllama.models.layer_inputs import check_target
from specllama.models.nextn import trunk_blocks

Floats = npt.NDArray[np.float32]

# what a configuration leaves out where it equals what Llama's says by itself
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
}
_LAYER = "layers.0."
_NAMES = {
    "fc": "fc",
    "input_norm": "enc.output_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    _LAYER + "input_layernorm": "blk.0.attn_norm",
    _LAYER + "hidden_norm": "blk.0.attn_norm_2",
    _LAYER + "self_attn.q_proj": "blk.0.attn_q",
    _LAYER + "self_attn.k_proj": "blk.0.attn_k",
    _LAYER + "self_attn.v_proj": "blk.0.attn_v",
    _LAYER + "self_attn.o_proj": "blk.0.attn_output",
    _LAYER + "post_attention_layernorm": "blk.0.ffn_norm",
    _LAYER + "mlp.gate_proj": "blk.0.ffn_gate",
    _LAYER + "mlp.up_proj": "blk.0.ffn_up",
    _LAYER + "mlp.down_proj": "blk.0.ffn_down",
}
_MAY_LACK = ("output.weight", "token_embd.weight", "enc.output_norm.weight")
# of training, or the other way round
_UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")


class Published:
    """A repository, its layer described in one place.

    Raises:
        ModelUnavailable, CannotLoad: see ``read_folder``; or what llama.cpp's graph lacks.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.name = folder.resolve().name
        layer = config.get("transformer_layer_config", config)
        if not isinstance(layer, dict):
            raise self.bad("transformer_layer_config is no configuration")
        self._config = config
        self._layer = {**_LLAMA, **{k: v for k, v in layer.items() if v is not None}}
        if self._layer.get("model_type", "llama") != "llama":
            raise self.bad(f"its layer is that of {self._layer['model_type']} models, not of llama")
        if self.number("num_hidden_layers") != 1:
            raise self.bad(f"it has {self.number('num_hidden_layers')} layers; llama.cpp runs one")
        if self._layer["hidden_act"] != "silu":
            raise self.bad(f"its activation is {self._layer['hidden_act']!r}; llama.cpp has silu")
        self.width = self.number("hidden_size")
        self.hidden = self.number("intermediate_size")
        self.heads = self.number("num_attention_heads")
        self.heads_kv = self.number("num_key_value_heads", self.heads)
        self.size = self.number("head_dim", self.width // self.heads)
        if self.heads % self.heads_kv or self.size % 2:
            raise self.bad(f"{self.heads} heads of width {self.size}, {self.heads_kv} of keys")
        self.tensors, self.deltas = self._named(read_folder(folder))

    def bad(self, why: str) -> CannotLoad:
        return CannotLoad(f"{self.name} cannot be converted: {why}")

    def number(self, key: str, default: int | None = None) -> int:
        value = self._layer.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
            raise self.bad(f"{key} is {value!r}")
        return value

    def real(self, table: Mapping[str, Any], key: str, default: float | None = None) -> float:
        value = table.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise self.bad(f"{key} is {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        return self._config.get(key) is True

    @property
    def eps(self) -> float:
        return self.real(self._layer, "rms_norm_eps")

    def layers(self, target: GgufHeader) -> npt.NDArray[np.int32]:
        """The layers of the target whose inputs it reads; without a word the usual three."""
        inner = self._config.get("eagle_config")
        places = (self._config, inner if isinstance(inner, dict) else {})
        key = "eagle_aux_hidden_state_layer_ids"
        ids = next((place[key] for place in places if place.get(key)), None)
        if ids is None:
            n = trunk_blocks(target)
            ids = [2, n // 2, n - 3]
        whole = isinstance(ids, list) and all(type(i) is int and abs(i) < 1 << 16 for i in ids)
        if not whole or len(ids) != LAYERS_READ:
            raise self.bad(f"it reads the layers {ids}; llama.cpp's graph takes {LAYERS_READ}")
        return np.array(ids, np.int32)

    def _named(self, found: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        """The tensors under llama.cpp's names, and the deltas of the draft's ids."""
        deltas: Tensor | None = None
        tensors: dict[str, Tensor] = {}
        for name, tensor in found.items():
            short = name.removeprefix("model.").replace("midlayer.", _LAYER)
            if short.endswith(_UNUSED):
                continue
            if short == "d2t" and len(tensor.shape) == 1:
                deltas = tensor
            elif short.endswith(".weight") and (to := _NAMES.get(short.removesuffix(".weight"))):
                tensors[to + ".weight"] = tensor
            else:
                raise self.bad(f"llama.cpp's eagle3 graph has no place for its tensor {name}")
        return tensors, deltas

    def checked(self, target: GgufHeader) -> dict[str, Tensor]:
        """Its tensors, each of the shape that its configuration says.

        Raises:
            CannotLoad: one is missing, or of another shape.
            PairIncompatible: it fuses states of another width.
        """
        e, f, other = self.width, self.hidden, target.embedding_length
        q, kv = self.heads * self.size, self.heads_kv * self.size
        said = None if self.deltas is None else self.deltas.shape[0]
        shapes: dict[str, tuple[int | None, ...]] = {
            "fc.weight": (e, None),
            "enc.output_norm.weight": (LAYERS_READ * other,),
            "output_norm.weight": (e,),
            "output.weight": (said, e),
            "token_embd.weight": (None, e),
            "blk.0.attn_q.weight": (q, 2 * e),
            "blk.0.attn_k.weight": (kv, 2 * e),
            "blk.0.attn_v.weight": (kv, 2 * e),
            "blk.0.attn_output.weight": (e, q),
            "blk.0.ffn_gate.weight": (f, e),
            "blk.0.ffn_up.weight": (f, e),
            "blk.0.ffn_down.weight": (e, f),
        }
        shapes |= {
            f"blk.0.{norm}.weight": (e,) for norm in ("attn_norm", "attn_norm_2", "ffn_norm")
        }
        for name, shape in shapes.items():
            tensor = self.tensors.get(name)
            if tensor is None:
                if name in _MAY_LACK:
                    continue
                raise self.bad(f"it has no tensor for {name}")
            fits = len(shape) == len(tensor.shape)
            if not fits or any(
                a not in (None, b) for a, b in zip(shape, tensor.shape, strict=True)
            ):
                raise self.bad(f"its {name} has the shape {list(tensor.shape)}")
        fused = self.tensors["fc.weight"].shape[1]
        if fused != LAYERS_READ * other:
            raise PairIncompatible(
                f"{self.name} fuses {LAYERS_READ} hidden states of width {fused / LAYERS_READ:g}, "
                f"those of {target.path.name} are {other} wide",
                "use the target that it was trained for",
            )
        if self.flag("norm_before_fc") != ("enc.output_norm.weight" in self.tensors):
            raise self.bad("norm_before_fc and its tensors disagree")
        return self.tensors

    def rope(self) -> tuple[dict[str, Value], Floats | None]:
        """Keys for positions, and by how much each pair turns slower, if not all alike."""
        scaling = self._layer.get("rope_parameters") or self._layer.get("rope_scaling") or {}
        if not isinstance(scaling, dict):
            raise self.bad("rope_scaling is no table")
        base = self.real(scaling, "rope_theta", self.real(self._layer, "rope_theta", 10000.0))
        keys: dict[str, Value] = {"rope.dimension_count": self.size, "rope.freq_base": base}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            return keys, None
        if kind != "llama3":
            raise self.bad(f"its positions are scaled as {kind!r}; llama3 is known here")
        length = 2 * math.pi * base ** (np.arange(0, self.size, 2) / self.size)  # tokens a turn
        factor = self.real(scaling, "factor", 8.0)
        low = self.real(scaling, "low_freq_factor", 1.0)
        high = self.real(scaling, "high_freq_factor", 4.0)
        trained = self.real(scaling, "original_max_position_embeddings", 8192)
        if high <= low:
            raise self.bad(f"high_freq_factor is {high:g}, low_freq_factor {low:g}")
        # 0 for waves as long as the training, which turn slower by the whole factor; 1 for short
        short = np.clip((trained / length - low) / (high - low), 0, 1)
        return keys, (1 / ((1 - short) / factor + short)).astype(np.float32)


def convert_eagle3(
    folder: Path, config: Mapping[str, Any], destination: Path, target: GgufHeader, kind: str
) -> None:
    """Write a published EAGLE-3 head for ``target``, see ``convert``."""
    head = Published(folder, config)
    tensors = dict(head.checked(target))
    for part, heads in (("q", head.heads), ("k", head.heads_kv)):
        name = f"blk.0.attn_{part}.weight"
        tensors[name] = _pairs(np.asarray(tensors[name], np.float32), heads)
    vocab = target.vocab_size
    if "token_embd.weight" in tensors:
        tensors["token_embd.weight"] = _rows(head, tensors["token_embd.weight"], vocab)
    ids = _draft_ids(head, tensors, vocab)
    keys, factors = head.rope()
    metadata: dict[str, Value] = {
        "general.architecture": "eagle3",
        "general.name": f"EAGLE-3 head for {target.name}",
        "general.quantization_version": 2,
    }
    values: dict[str, Value] = {
        "block_count": 1,
        "context_length": target.context_length,
        "embedding_length": head.width,
        "feed_forward_length": head.hidden,
        "attention.head_count": head.heads,
        "attention.head_count_kv": head.heads_kv,
        "attention.key_length": head.size,
        "attention.value_length": head.size,
        "attention.layer_norm_rms_epsilon": head.eps,
        "vocab_size": vocab,
        "target_layers": head.layers(target),
        "target_hidden_size": target.embedding_length,
        "norm_before_residual": head.flag("norm_before_residual"),
        "norm_before_fc": head.flag("norm_before_fc"),
    }
    metadata |= {f"eagle3.{key}": value for key, value in (values | keys).items()}
    metadata |= stored(target, "tokenizer.")
    written: dict[str, tuple[Tensor, str]] = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) == 1:
            written[name] = (tensor, "F32")
        else:
            fills = tensor.shape[1] % 32 == 0
            written[name] = (tensor, kind.upper() if fills or kind != "q8_0" else "F16")
    if factors is not None:
        written["rope_freqs.weight"] = (factors, "F32")
    if ids is not None:
        written["d2t"] = (ids, "I64")
    write_gguf(destination, metadata, written)
    try:
        header = read_header(destination)
        check_target(read_facts(header), header, target)
    except SpecllamaError:
        destination.unlink()
        raise


def _pairs(matrix: Floats, heads: int) -> Floats:
    """Rows of [heads * size, in] so that values which turn together are neighbours."""
    halves = matrix.reshape(heads, 2, -1, matrix.shape[1])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def _rows(head: Published, tensor: Tensor, vocab: int) -> Tensor:
    """A row for each token; padding carries none."""
    rows = tensor.shape[0]
    if rows < vocab:
        raise PairIncompatible(f"{head.name} knows {rows:,} tokens, its target {vocab:,}")
    return tensor if rows == vocab else np.asarray(tensor, np.float32)[:vocab]


def _draft_ids(
    head: Published, tensors: dict[str, Tensor], vocab: int
) -> npt.NDArray[np.int64] | None:
    """The token of each row of the output matrix; None where row r is token r."""
    output = tensors.get("output.weight")
    if head.deltas is not None:
        if output is None:
            raise head.bad("a draft vocabulary without an output matrix")
        ids = np.asarray(head.deltas, np.int64)
        ids = ids + np.arange(len(ids))
        if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) != len(ids):
            raise PairIncompatible(f"d2t of {head.name} does not name {vocab:,} different tokens")
        return ids
    if output is None:
        return None
    if output.shape[0] < vocab:
        return np.arange(output.shape[0])
    tensors["output.weight"] = _rows(head, output, vocab)
    return None

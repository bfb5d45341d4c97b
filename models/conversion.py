"""Conversion of published draft heads into files that specllama loads, by the kind in the folder.

``Published`` is a repository of such a head: one layer or a few, and their configuration. In the
``speculators`` format ``transformer_layer_config`` describes the layers, elsewhere the
configuration itself. Tensors have the names of Hugging Face's models, ``layers.N.self_attn.q_proj``
and so on; ``d2t`` says by how much the id of a draft token is to be raised.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specllama.errors import CannotLoad, ModelUnavailable, PairIncompatible, SpecllamaError
from specllama.models.checkpoint import CONFIG, read_config, read_folder
from specllama.models.companions import HEADS, find
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.gguf_writer import Tensor, Value, stored, type_for, write_gguf
from specllama.models.loadable import MAX_LAYERS
from specllama.models.medusa_file import NAMES, convert_medusa
from specllama.models.quantization import check_destination

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Shape = tuple[int | None, ...]  # None: any

# of one layer: name here -> in llama.cpp's files
LAYER = {
    "input_layernorm.weight": "attn_norm.weight", "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight", "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight", "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}  # fmt: skip
# what a configuration leaves out where it equals what its model says by itself
_BY_ITSELF: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 11008, "max_position_embeddings": 2048},
    "qwen3": {"intermediate_size": 22016, "max_position_embeddings": 32768, "head_dim": 128},
}
_USUAL = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
_IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
# of training, or the other way round
_UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")


class Published:
    """A repository: its configuration, checked as it is read, and its tensors.

    Args:
        kinds: of models whose layers these may be; the first where it names none.

    Raises:
        CannotLoad: what llama.cpp's graph lacks. Other methods raise it, too.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], kinds: Sequence[str]) -> None:
        self.name = folder.resolve().name
        self._folder = folder
        layer = config.get("transformer_layer_config", config)
        if not isinstance(layer, dict):
            raise self.bad("transformer_layer_config is no configuration")
        kind = layer.get("model_type", kinds[0])
        if kind not in kinds:
            raise self.bad(f"its layer is that of {kind} models, not of {' or '.join(kinds)}")
        self.config = config
        said = {key: value for key, value in layer.items() if value is not None}
        self.layer = {**_USUAL, **_BY_ITSELF[kind], **said}
        if self.layer["hidden_act"] != "silu":
            raise self.bad(f"its activation is {self.layer['hidden_act']!r}; silu is known here")
        self.width = self.number("hidden_size")
        self.hidden = self.number("intermediate_size")
        self.blocks = self.number("num_hidden_layers")
        self.heads = self.number("num_attention_heads")
        self.heads_kv = self.number("num_key_value_heads", self.heads)
        self.size = self.number("head_dim", self.width // self.heads)
        if self.blocks > MAX_LAYERS:
            raise self.bad(f"it has {self.blocks:,} layers")
        if self.heads % self.heads_kv or self.size % 2:
            raise self.bad(f"{self.heads} heads of width {self.size}, {self.heads_kv} of keys")
        self.deltas: Tensor | None = None

    def bad(self, why: str) -> CannotLoad:
        return CannotLoad(f"{self.name} cannot be converted: {why}")

    def number(
        self, key: str, default: int | None = None, table: Mapping[str, Any] | None = None
    ) -> int:
        """Read a positive number, of the layer unless ``table`` is given."""
        value = (self.layer if table is None else table).get(key, default)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self.bad(f"{key} is {value!r}")
        return value

    def real(self, table: Mapping[str, Any], key: str, default: float | None = None) -> float:
        value = table.get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.bad(f"{key} is {value!r}")
        return float(value)

    def part(self, key: str) -> Mapping[str, Any]:
        """Return a table inside the configuration, empty if there is none."""
        table = self.config.get(key)
        return table if isinstance(table, dict) else {}

    def layers(self, ids: object, most: int) -> npt.NDArray[np.int32]:
        """Check a list of layers of the target."""
        whole = isinstance(ids, list) and all(type(i) is int and abs(i) < 1 << 16 for i in ids)
        if not whole or not 0 < len(ids) <= most:  # type: ignore[arg-type]
            raise self.bad(f"it reads the layers {ids}; llama.cpp's graph takes {most}")
        return np.array(ids, np.int32)

    def rope(self) -> tuple[dict[str, Value], Floats | None]:
        """Return keys for positions, and by how much each pair turns slower, if not all alike."""
        scaling = self.layer.get("rope_parameters") or self.layer.get("rope_scaling") or {}
        if not isinstance(scaling, dict):
            raise self.bad("rope_scaling is no table")
        base = self.real(scaling, "rope_theta", self.real(self.layer, "rope_theta", 10000.0))
        keys: dict[str, Value] = {"rope.dimension_count": self.size, "rope.freq_base": base}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        turned = scaling.get("partial_rotary_factor", self.layer.get("partial_rotary_factor", 1.0))
        if turned != 1.0:
            raise self.bad("only a part of each head turns with the position")
        if kind == "default":
            return keys, None
        if kind == "yarn":
            return keys | self._yarn(scaling), None
        if kind != "llama3":
            raise self.bad(f"its positions are scaled as {kind!r}; known are llama3 and yarn")
        length = 2 * math.pi * base ** (np.arange(0, self.size, 2) / self.size)  # tokens a turn
        factor = self.real(scaling, "factor", 8.0)
        low = self.real(scaling, "low_freq_factor", 1.0)
        high = self.real(scaling, "high_freq_factor", 4.0)
        trained = self.real(scaling, "original_max_position_embeddings", 8192)
        if high <= low:
            raise self.bad(f"high_freq_factor is {high:g}, low_freq_factor {low:g}")
        # 0 for turns as long as the training, which take longer by the whole factor; 1 for short
        short = np.clip((trained / length - low) / (high - low), 0, 1)
        return keys, (1 / ((1 - short) / factor + short)).astype(np.float32)

    def _yarn(self, scaling: Mapping[str, Any]) -> dict[str, Value]:
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            if scaling.get(key) is not None:
                raise self.bad(f"its {key} is {scaling[key]!r}, which specllama does not know")
        if scaling.get("truncate") is False:
            raise self.bad("it does not round where scaling of its positions begins")
        trained = "original_max_position_embeddings"
        length = self.layer.get("max_position_embeddings")
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": self.real(scaling, "factor"),
            "rope.scaling.original_context_length": self.number(trained, length, scaling),
            "rope.scaling.yarn_beta_fast": self.real(scaling, "beta_fast", 32.0),
            "rope.scaling.yarn_beta_slow": self.real(scaling, "beta_slow", 1.0),
        }

    def read(self, top: Mapping[str, str], in_layer: Mapping[str, str]) -> dict[str, Tensor]:
        """Read its tensors under llama.cpp's names, for its own in both tables; keep ``d2t`` apart.

        Raises:
            ModelUnavailable: there are none.
        """
        tensors: dict[str, Tensor] = {}
        for name, tensor in read_folder(self._folder).items():
            short = name.removeprefix("model.").replace("midlayer.", "layers.0.")
            if short.endswith(_UNUSED):
                continue
            if short == "d2t" and len(tensor.shape) == 1:
                self.deltas = tensor
                continue
            match = _IN_LAYER.fullmatch(short)
            ours = top.get(short) if match is None else in_layer.get(match[2])
            if ours is None or (match is not None and int(match[1]) >= self.blocks):
                raise self.bad(f"llama.cpp's graph has no place for its tensor {name}")
            tensors[ours if match is None else f"blk.{match[1]}.{ours}"] = tensor
        return tensors

    def require(
        self, tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape], may_lack: Sequence[str]
    ) -> None:
        """Make sure of the shape of each tensor, [out, in] for matrices."""
        for name, shape in shapes.items():
            tensor = tensors.get(name)
            if tensor is None and name in may_lack:
                continue
            if tensor is None:
                raise self.bad(f"it has no tensor for {name}")
            wrong = any(a not in (None, b) for a, b in zip(shape, tensor.shape, strict=False))
            if wrong or len(shape) != len(tensor.shape):
                raise self.bad(f"its {name} has the shape {list(tensor.shape)}")

    def attention(self, block: str, inputs: int) -> dict[str, Shape]:
        """Return the shapes of a layer whose queries, keys and values read N numbers."""
        e, f, q, kv = self.width, self.hidden, self.heads * self.size, self.heads_kv * self.size
        shapes: dict[str, Shape] = {
            "attn_norm": (e,), "attn_q": (q, inputs), "attn_k": (kv, inputs),
            "attn_v": (kv, inputs), "attn_output": (e, q), "ffn_norm": (e,), "ffn_gate": (f, e),
            "ffn_up": (f, e), "ffn_down": (e, f),
        }  # fmt: skip
        return {f"{block}{name}.weight": shape for name, shape in shapes.items()}

    def require_fusion(self, tensor: Tensor, n: int, target: GgufHeader) -> None:
        """Make sure that ``n`` hidden states of the target go in.

        Raises:
            PairIncompatible: states of another width do.
        """
        other = target.embedding_length
        if tensor.shape != (self.width, n * other):
            raise PairIncompatible(
                f"{self.name} fuses {n} hidden states of width {tensor.shape[-1] / n:g} to one of "
                f"{tensor.shape[0]}, those of {target.path.name} are {other} wide",
                "use the target that it was trained for",
            )

    def fit_vocabulary(self, tensors: dict[str, Tensor], vocab: int) -> Ids | None:
        """Cut padding off; the token of each row of the output, None where row r is token r.

        Raises:
            PairIncompatible: a vocabulary of another size.
        """
        if (table := tensors.get("token_embd.weight")) is not None:
            tensors["token_embd.weight"] = self.rows(table, vocab)
        output = tensors.get("output.weight")
        if self.deltas is not None:
            if output is None or output.shape[0] != self.deltas.shape[0]:
                raise self.bad("its draft vocabulary has no output matrix of as many rows")
            ids = np.asarray(self.deltas, np.int64)
            ids = ids + np.arange(len(ids))
            if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) != len(ids):
                raise PairIncompatible(f"d2t of {self.name} does not name tokens below {vocab:,}")
            return ids
        if output is None:
            return None
        if output.shape[0] < vocab:
            return np.arange(output.shape[0])
        tensors["output.weight"] = self.rows(output, vocab)
        return None

    def rows(self, tensor: Tensor, vocab: int) -> Tensor:
        """Return a row for each token; cut the padding, which carries none.

        Raises:
            PairIncompatible: too few.
        """
        rows = tensor.shape[0]
        if rows < vocab:
            raise PairIncompatible(f"{self.name} knows {rows:,} tokens, its target {vocab:,}")
        return tensor if rows == vocab else np.asarray(tensor, np.float32)[:vocab]

    def write(
        self,
        destination: Path,
        target: GgufHeader,
        kind: str,
        architecture: str,
        values: Mapping[str, Value],
        tensors: Mapping[str, Tensor],
        ids: Ids | None,
    ) -> None:
        """Write the file, with its target's tokenizer.

        Args:
            kind: type of the matrices, see ``convert``.
            values: keys of its architecture, besides those that every head has.
            ids: the token of each row of the output.

        Raises:
            SpecllamaError: it cannot be written, or what ``write_checked`` raises.
        """
        rope, factors = self.rope()
        own: dict[str, Value] = {
            "block_count": self.blocks, "context_length": target.context_length,
            "embedding_length": self.width, "feed_forward_length": self.hidden,
            "attention.head_count": self.heads, "attention.head_count_kv": self.heads_kv,
            "attention.key_length": self.size, "attention.value_length": self.size,
            "attention.layer_norm_rms_epsilon": self.real(self.layer, "rms_norm_eps"),
            "vocab_size": target.vocab_size,
        }  # fmt: skip
        name = f"{self.name} for {target.name}"
        keys: dict[str, Value] = {"general.name": name, **stored(target, "tokenizer.")}
        typed = {name: (tensor, type_for(tensor, kind.upper())) for name, tensor in tensors.items()}
        if factors is not None:
            typed["rope_freqs.weight"] = (factors, "F32")
        if ids is not None:
            typed["d2t"] = (ids, "I64")
        own |= rope | dict(values)
        write_checked(destination, target, architecture, own, keys, typed)


def write_checked(
    destination: Path,
    target: GgufHeader,
    architecture: str,
    own: Mapping[str, Value],
    keys: Mapping[str, Value],
    tensors: Mapping[str, tuple[Tensor, str]],
) -> None:
    """Write the file of a head.

    Args:
        own: keys of its architecture. keys: others, beside those that every file has.
        tensors: with their types.

    Raises:
        SpecllamaError: it cannot be written, or the check of its kind refuses it; then it is
            removed.
    """
    all_keys = {"general.architecture": architecture, "general.quantization_version": 2, **keys}
    for key, value in own.items():
        all_keys[key if key.startswith("tokenizer.") else f"{architecture}.{key}"] = value
    write_gguf(destination, all_keys, tensors)
    try:
        find(architecture).check(read_header(destination), target)
    except SpecllamaError:
        destination.unlink()
        raise


# ---------------------------------------------------------------------- the kind in a folder


def convert(source: Path, destination: Path, target: GgufHeader, kind: str) -> None:
    """Write the head of a published checkpoint as a file for ``target``.

    Args:
        source: a folder, or a file of Medusa heads.
        kind: type of the matrices: "q8_0", "f16" or "f32".

    Raises:
        UsageError: the destination exists or has no folder.
        ModelUnavailable: nothing there.
        CannotLoad: damaged, or of a kind that is not converted here.
        PairIncompatible: a head of another target.
        SpecllamaError: the file cannot be written.
    """
    check_destination(destination)
    files = (source, *(source / name for name in NAMES))
    medusa = next((file for file in files if file.is_file()), None)
    if medusa is not None:
        convert_medusa(medusa, destination, target, kind)
        return
    if not source.is_dir():
        raise ModelUnavailable(
            f"there is no {source}", "download the repository first, and give its folder"
        )
    if not (source / CONFIG).is_file():
        raise ModelUnavailable(f"{source} contains none of {', '.join((CONFIG, *NAMES))}")
    config = read_config(source)
    held = published_kind(config)
    write = _writers().get(held)
    if write is None:
        raise CannotLoad(
            f"{source} holds {held or 'no drafting head, or one of an unknown kind'}; converted "
            "here are EAGLE-3, DFlash, DSpark and Medusa-1 heads",
            "for others try llama.cpp's convert_hf_to_gguf.py",
        )
    write(source, config, destination, target, kind)


def _writers() -> dict[str, Callable[..., None]]:
    """Return the converter of each kind of checkpoint, by the kind's own name."""
    found = map(find, HEADS)
    return {name: head.convert for head in found if head.convert for name in head.published}


def published_kind(config: dict[str, Any]) -> str:
    """Return the drafter that a repository declares, "" if it declares none.

    Repositories of the ``speculators`` format have a word for it, older ones an architecture.
    """
    word = config.get("speculators_model_type")
    if isinstance(word, str):
        return word
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    for kind in (*_writers(), "medusa", "eagle"):
        if any(kind in str(name).lower() for name in names):
            return kind
    # some EAGLE-3 heads call themselves LlamaForCausalLM
    small = "draft_vocab_size" in config and config.get("num_hidden_layers") == 1
    return "eagle3" if small else ""

"""A trained EAGLE-3 head as a file of llama.cpp's own `eagle3` format, and its sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specllama.arrays import FINAL, IntArray, Rows
from specllama.errors import UnsupportedModel, UsageError
from specllama.models.conversion import write_checked
from specllama.models.eagle3_file import ARCHITECTURE, LAYERS_READ, check
from specllama.models.gguf import GgufHeader
from specllama.models.gguf_writer import Tensor, Value, stored
from specllama.models.layer_inputs import LAYER_INPUT_ARCHITECTURES
from specllama.models.nextn_blocks import trunk_blocks
from specllama.models.tensors import read_tensor

_OUTSIDE = ("fc", "output")  # of the layer
MOSTLY_Q8_0 = 7
_OWN = ("the target's", "its own")


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a head: as many heads of keys as of queries, since only they bring the token in.

    Attributes:
        rows: of an output matrix of its own; 0 where the target's is borrowed.
        fused: the width of the target's states side by side.
    """

    width: int
    heads: int
    head_size: int
    hidden: int
    fused: int
    rows: int = 0
    eps: float = 1e-5
    rope_base: float = 10_000.0


def last_norm(target: GgufHeader) -> str:
    """Name the norm before a target's output.

    Raises:
        UnsupportedModel: it has none.
    """
    for name in ("output_norm.weight", "token_embd_norm.weight"):  # lfm2 has the second one
        if name in target.by_name:
            return name
    raise UnsupportedModel(f"{target.path.name} has no norm before its output")


def layers_read(header: GgufHeader) -> tuple[int, ...]:
    """Return the layers of a target whose inputs a head reads; none where it reads the last state
    alone, since llama.cpp gives no others.

    Raises:
        UsageError: it has too few.
    """
    if header.architecture not in LAYER_INPUT_ARCHITECTURES:
        return ()
    if (n := trunk_blocks(header)) < 4:
        raise UsageError(f"{header.path.name} has {n} layers: too few for a head that reads three")
    return 2, n // 2, n - 3


def head_shape(header: GgufHeader, rows: int, layers: int) -> HeadShape:
    """Choose the sizes of a light head: its heads fill the width, its net is below the target's."""
    width, size = header.embedding_length, min(header.key_length, 128)
    hidden = min(header.feed_forward_length or 2 * width, 2 * width, 64 * max(1, round(width / 44)))
    return HeadShape(
        width=width, heads=max(1, width // size), head_size=size, hidden=hidden,
        fused=max(layers, 1) * width, rows=rows,
        eps=header.number(header.own("attention.layer_norm_rms_epsilon")) or 1e-5,
        rope_base=header.number(header.own("rope.freq_base")) or 10_000.0,
    )  # fmt: skip


def other_sizes(head: GgufHeader, target: GgufHeader, layers: Sequence[int]) -> str:
    """Describe how a head's sizes differ from those of one that is made here; "" if they do not.

    Raises:
        PairIncompatible, BadGguf, UnsupportedModel: it cannot draft for the target at all.
    """
    facts, s = check(head, target), head_shape(target, 0, len(layers))
    norms = [n for n in ("norm_before_residual", "norm_before_fc") if head.flag(head.own(n))]
    pairs = {
        "width": (head.embedding_length, s.width),
        "hidden": (head.feed_forward_length, s.hidden),
        "heads": (head.head_count, s.heads),
        "heads of keys": (head.head_count_kv, s.heads),
        "size of a head": (head.key_length, s.head_size),
        "base of positions": (head.number(head.own("rope.freq_base")) or 1e4, s.rope_base),
        "states read": (_states(facts.layers), _states(layers)),
        "embeddings": (_OWN[facts.own_embedding], _OWN[False]),
        "output": (_OWN[facts.own_output], _OWN[True]),
        "norms beside the layer's": (", ".join(norms) or "none", "none"),
    }
    return "; ".join(f"{name} {a} instead of {b}" for name, (a, b) in pairs.items() if a != b)


def _states(layers: Sequence[int]) -> str:
    """Name the states of the target that a head reads."""
    some = [str(layer) for layer in layers if layer != FINAL]
    return f"before layers {', '.join(some)}" if some else "the last one"


def read_weights(head: GgufHeader) -> dict[str, Rows]:
    """Read the weights of a head's file as ``write_head`` takes them.

    Raises:
        BadGguf, UnsupportedModel: see ``read_tensor``.
    """
    names = (name for name in head.by_name if name != "d2t")
    return {name.removeprefix("blk.0."): read_tensor(head, name) for name in names}


def write_head(
    path: Path,
    weights: Mapping[str, Rows],
    shape: HeadShape,
    target: GgufHeader,
    words: IntArray,
    layers: Sequence[int],
    about: Mapping[str, Value] | None = None,
) -> None:
    """Write a head, whole or not at all.

    Args:
        weights: as ``file_weights`` names them; matrices become Q8_0.
        words: the token of each row of the output, ascending.
        layers: of the target, whose inputs it reads; none for its last state.
        about: more metadata.

    Raises:
        SpecllamaError: it cannot be written.
    """
    own: dict[str, Value] = {
        "block_count": 1,
        "context_length": target.context_length,
        "embedding_length": shape.width,
        "feed_forward_length": shape.hidden,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.heads,
        "attention.key_length": shape.head_size,
        "attention.value_length": shape.head_size,
        "attention.layer_norm_rms_epsilon": shape.eps,
        "rope.dimension_count": shape.head_size,
        "rope.freq_base": shape.rope_base,
        "vocab_size": target.vocab_size,
        # behind the last layer: the last state, from the first third of the fusing matrix
        "target_layers": np.array(layers or [target.block_count] * LAYERS_READ, np.int32),
        "target_hidden_size": target.embedding_length,
        "norm_before_residual": False,
        "norm_before_fc": False,
    }
    keys: dict[str, Value] = {
        "general.name": f"EAGLE-3 head for {target.name}",
        "general.file_type": MOSTLY_Q8_0,
        **{key: value for key, value in stored(target, "tokenizer.").items() if "chat" not in key},
        **(about or {}),
    }
    tensors: dict[str, tuple[Tensor, str]] = {}
    for name, values in weights.items():
        if name == "fc.weight":
            wanted = LAYERS_READ * target.embedding_length
            values = np.pad(values, ((0, 0), (0, wanted - values.shape[1])))
        full = name if name.startswith(_OUTSIDE) else f"blk.0.{name}"
        tensors[full] = (values, "Q8_0" if values.ndim == 2 else "F32")
    tensors["d2t"] = (words.astype(np.int64), "I64")
    write_checked(path, target, ARCHITECTURE, own, keys, tensors)

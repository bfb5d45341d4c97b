"""A trained EAGLE-3 head as a file of llama.cpp's own `eagle3` format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specllama.arrays import IntArray, Rows
from specllama.models.conversion import write_checked
from specllama.models.eagle3_file import ARCHITECTURE, check
from specllama.models.gguf import GgufHeader
from specllama.models.gguf_writer import Tensor, Value, stored

if TYPE_CHECKING:
    from specllama.training.eagle_head import HeadShape

_OUTSIDE = ("fc", "output")  # of the layer
MOSTLY_Q8_0 = 7


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
        layers: of the target, whose inputs it reads.
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
        "target_layers": np.array(layers, np.int32),
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
        full = name if name.startswith(_OUTSIDE) else f"blk.0.{name}"
        tensors[full] = (values, "Q8_0" if values.ndim == 2 else "F32")
    tensors["d2t"] = (words.astype(np.int64), "I64")
    write_checked(path, target, ARCHITECTURE, own, keys, tensors, check)

"""Published Medusa-1 heads as a file that specllama loads.

Such checkpoints are a folder with ``medusa_lm_head.safetensors`` (or ``.pt``) whose names are
``HEAD.LAYER.linear.weight``, ``HEAD.LAYER.linear.bias`` for the residual blocks and
``HEAD.LAYERS.weight`` for the head's output matrix; some tools put ``medusa_head.`` or ``heads.``
before the head's number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specllama.errors import CannotLoad, PairIncompatible
from specllama.models.checkpoint import read_tensors
from specllama.models.gguf import GgufHeader
from specllama.models.gguf_writer import Tensor
from specllama.models.medusa_file import MAX_BLOCKS, MAX_HEADS, vocabulary_digest, write_heads

NAMES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "medusa_lm_head.bin")
MAX_PADDING = 128  # how many rows an output matrix may have more or fewer than the vocabulary

_KEY = re.compile(
    r"(?:.*\.)?(?P<head>\d+)\.(?P<layer>\d+)\.(?P<linear>linear\.)?(?P<part>weight|bias)"
)


@dataclass(frozen=True, slots=True)
class MedusaCheckpoint:
    """Arrays under the names of a head file."""

    arrays: Mapping[str, Tensor]
    heads: int
    blocks: int
    width: int
    rows: int


def read_checkpoint(path: Path) -> MedusaCheckpoint:
    """Read a published Medusa-1 checkpoint.

    Raises:
        ModelUnavailable: no such file.
        CannotLoad: not such a checkpoint, damaged, or a pickle that cannot be read safely here.
    """
    blocks: dict[tuple[int, int, str], Tensor] = {}
    outputs: dict[tuple[int, int], Tensor] = {}
    for key, tensor in read_tensors(path).items():
        match = _KEY.fullmatch(key)
        if match is None:
            continue
        at = int(match["head"]), int(match["layer"])
        if match["linear"]:
            blocks[*at, match["part"]] = tensor
        elif match["part"] == "weight":
            outputs[at] = tensor
    return _arrange(path, blocks, outputs)


def _arrange(
    path: Path,
    blocks: Mapping[tuple[int, int, str], Tensor],
    outputs: Mapping[tuple[int, int], Tensor],
) -> MedusaCheckpoint:
    heads = len(outputs)
    depth = {layer for _, layer in outputs}
    numbers = {head for head, _ in outputs} | {head for head, _, _ in blocks}
    if not outputs or len(depth) != 1 or numbers != set(range(heads)):
        raise CannotLoad(
            f"{path.name} is not laid out as Medusa-1 heads: no output matrix per head "
            "(0.1.weight, 1.1.weight, …)"
        )
    n_blocks = depth.pop()
    if heads > MAX_HEADS or n_blocks > MAX_BLOCKS:
        raise CannotLoad(f"{path.name}: {heads} heads of {n_blocks} blocks are too many")
    rows, width = (*outputs[0, n_blocks].shape, 0, 0)[:2]
    arrays: dict[str, Tensor] = {}
    for h in range(heads):
        wanted: list[tuple[str, Tensor, tuple[int, ...]]] = [
            (f"head.{h}.output.weight", outputs[h, n_blocks], (rows, width))
        ]
        for b in range(n_blocks):
            shapes: dict[str, tuple[int, ...]] = {"weight": (width, width), "bias": (width,)}
            for part, shape in shapes.items():
                tensor = blocks.get((h, b, part))
                if tensor is None:
                    raise CannotLoad(f"{path.name}: head {h} lacks {h}.{b}.linear.{part}")
                wanted.append((f"head.{h}.block.{b}.{part}", tensor, shape))
        for name, tensor, shape in wanted:
            if tensor.shape != shape:
                raise CannotLoad(
                    f"{path.name}: {name} has the shape {list(tensor.shape)}, not {list(shape)}"
                )
            arrays[name] = tensor
    return MedusaCheckpoint(arrays, heads, n_blocks, width, rows)


def convert_medusa(source: Path, destination: Path, target: GgufHeader, kind: str) -> None:
    """Write a file of Medusa-1 heads as a head file for ``target``, see ``convert``.

    Args:
        kind: type of the matrices: "q8_0", "f16" or "f32".

    Raises:
        PairIncompatible: heads of another width or vocabulary.
        ModelUnavailable, CannotLoad, SpecllamaError: see ``read_checkpoint`` and ``write_heads``.
    """
    found = read_checkpoint(source)
    vocab = target.vocab_size
    if found.width != target.embedding_length:
        raise PairIncompatible(
            f"these heads read hidden states of width {found.width}, "
            f"those of {target.path.name} are {target.embedding_length} wide"
        )
    if abs(found.rows - vocab) > MAX_PADDING:
        raise PairIncompatible(
            f"these heads guess among {found.rows} tokens, {target.path.name} has {vocab}"
        )
    arrays = dict(found.arrays)
    if found.rows > vocab:  # padding rows carry no token
        for name in [name for name in arrays if name.endswith("output.weight")]:
            arrays[name] = np.asarray(arrays[name], np.float32)[:vocab]
    elif found.rows < vocab:
        arrays["ids"] = np.arange(found.rows, dtype=np.int32)
    write_heads(
        destination,
        arrays,
        name=f"Medusa heads for {target.name}",
        heads=found.heads,
        blocks=found.blocks,
        width=found.width,
        vocab=vocab,
        vocabulary=vocabulary_digest(target),
        kind=kind.upper(),
    )

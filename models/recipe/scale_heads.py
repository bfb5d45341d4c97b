"""Medusa heads for a scaled target: the same guesses at the cost of the larger width.

The hidden state of a scaled target is the original one with zeros behind it, so every matrix gets
zeros to its right and below, every bias zeros behind: SiLU(0) = 0 keeps the new places at zero.

``python -m specllama.models.recipe.scale_heads HEADS.gguf SCALED_TARGET.gguf OUT.gguf``
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specllama.models.gguf import GgufHeader, read_header
from specllama.models.medusa_file import read_facts, read_output_ids, write_heads
from specllama.models.tensors import read_tensor


def _padded(values: NDArray[np.float32], shape: tuple[int, ...]) -> NDArray[np.float32]:
    out = np.zeros(shape, np.float32)
    out[tuple(slice(n) for n in values.shape)] = values
    return out


def scale_heads(src: Path, target: GgufHeader, dst: Path) -> None:
    """Write `dst`: the heads of `src` for `target`, a scaled version of their own target.

    Raises:
        ValueError: the target is narrower, or has other tokens.
    """
    header = read_header(src)
    facts = read_facts(header)
    width = target.embedding_length
    if width < facts.width or target.vocab_size != facts.vocab:
        raise ValueError(f"{target.path.name} is not a scaled version of the target of {src.name}")
    arrays: dict[str, NDArray[np.float32] | NDArray[np.int32]] = {}
    ids = read_output_ids(header, facts)
    if ids is not None:
        arrays["ids"] = ids
    for name in header.by_name:
        if name == "ids":
            continue
        values = read_tensor(header, name)
        high = facts.rows if name.endswith("output.weight") else width
        arrays[name] = _padded(values, (high, width) if values.ndim == 2 else (width,))
    write_heads(
        dst,
        arrays,
        name=f"{header.name} scaled to width {width}",
        heads=facts.heads,
        blocks=facts.blocks,
        width=width,
        vocab=facts.vocab,
        vocabulary=facts.vocabulary,
        metadata={"specllama.scaled_from": header.name},
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("heads", type=Path)
    parser.add_argument("target", type=Path, help="the scaled target")
    parser.add_argument("out", type=Path)
    a = parser.parse_args()
    scale_heads(a.heads, read_header(a.target), a.out)


if __name__ == "__main__":
    main()

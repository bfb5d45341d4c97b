"""Write a copy of a model with noise on its weights, as if it had been tuned: its law changes.

    python tests/lab/noisy_model.py MODEL OUT [--share 0.05] [--seed 1] [--of blk.]

Gaussian noise of a share of each matrix's root mean square is added to the matrices whose names
begin with ``--of``, which are then quantized again to their own types, as llama.cpp does it. What
is left out is copied. The copy says in its name what was done.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path

import numpy as np

from specllama.arrays import Rows
from specllama.backend.devices import ggml
from specllama.backend.embedding import decode
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.gguf_format import TensorInfo
from specllama.models.gguf_writer import TYPE_IDS, Blocks, Tensor, Value, stored, write_gguf
from specllama.models.loadable import elementwise
from specllama.models.tensors import read_bytes
from specllama.models.words import rows_of


def encode(rows: Rows, kind: str) -> bytes:
    """Quantize rows as llama.cpp's own quantizer does, without an importance matrix."""
    quantize = ggml(
        "ggml_quantize_chunk",
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    )
    rows = np.ascontiguousarray(rows, np.float32)
    into = np.empty(rows.nbytes, np.uint8)
    n = quantize(TYPE_IDS[kind], rows.ctypes.data, into.ctypes.data, 0, *rows.shape, None)
    return into[:n].tobytes()


def noisy(header: GgufHeader, info: TensorInfo, share: float, seed: int) -> Blocks:
    """A matrix with noise, made when it is written."""
    shape = info.shape[::-1]

    def make() -> bytes:
        rows = np.empty((shape[0], info.n_elements // shape[0]), np.float32)
        decode(read_bytes(header, info.name), info.type, rows)
        dice = np.random.default_rng([seed, *info.name.encode()])
        size = np.float32(share * np.sqrt(np.mean(np.square(rows), dtype=np.float64)))
        made = encode(rows + size * dice.standard_normal(rows.shape, np.float32), info.type)
        assert len(made) == info.n_bytes
        return made

    return Blocks(shape, make)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--share", type=float, default=0.05, help="of a matrix's RMS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--of", default="blk.", help="how the names of its matrices begin")
    a = parser.parse_args()
    header = read_header(a.model)
    values: dict[str, Value] = dict(stored(header, ""))
    values["general.name"] = f"{header.name} with noise {a.share:g}, seed {a.seed}"
    tensors: dict[str, tuple[Tensor | Blocks, str]] = {}
    changed = 0
    for info in header.tensors:
        changes = info.is_matrix and info.name.startswith(a.of) and not elementwise(info.name)
        made = noisy(header, info, a.share, a.seed) if changes else rows_of(header, info)
        tensors[info.name], changed = (made, info.type), changed + changes
    write_gguf(a.out, values, tensors)
    print(f"{a.out}: {changed} of {len(header.tensors)} tensors with noise of {a.share:.0%}")


if __name__ == "__main__":
    main()

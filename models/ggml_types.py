"""Names and block sizes of GGML tensor types and GGUF file types.

Source: the tables of ggml (``ggml.h``, ``ggml-common.h``) and llama.cpp (``llama.h``) as vendored
in the pinned llama-cpp-python. Light to import.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec


class TensorType(NamedTuple):
    """A type that stores ``block`` elements in ``size`` bytes."""

    name: str
    block: int
    size: int


class _Tables(msgspec.Struct):
    """``ggml_types.json``.

    Attributes:
        files: general.file_type, under the names that people use in file names.
        cells: bytes per element of the KV cache types that llama.cpp offers; "auto": an f16 or bf16
            cell.
    """

    tensors: dict[int, TensorType]
    files: dict[int, str]
    cells: dict[str, float]


_TABLES = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes(), type=_Tables)
TENSOR_TYPES, FILE_TYPES, KV_BYTES = _TABLES.tensors, _TABLES.files, _TABLES.cells


def tensor_bytes(type_id: int, elements: int) -> int:
    """Return the bytes of ``elements`` values (a whole number of blocks) of a known tensor type."""
    kind = TENSOR_TYPES[type_id]
    return elements // kind.block * kind.size

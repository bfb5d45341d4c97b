"""Tokens of a draft model that knows only some of its words (``trimmed``), read as embeddings."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Any

import numpy as np

from specllama.arrays import IntArray, Rows
from specllama.backend.devices import ggml
from specllama.models.gguf import GgufHeader
from specllama.models.gguf_writer import TYPE_IDS
from specllama.models.tensors import Bytes
from specllama.models.trimmed import SCALED, read_embedding
from specllama.models.words import read_says


class _Traits(ctypes.Structure):
    """``ggml_type_traits``."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


@cache
def _to_float(kind: str) -> Any:
    traits = ggml("ggml_get_type_traits", ctypes.POINTER(_Traits), ctypes.c_int)
    return traits(TYPE_IDS[kind]).contents.to_float


def decode(packed: Bytes, kind: str, into: Rows) -> None:
    """Write rows of a matrix as numbers, as llama.cpp reads them.

    Args:
        kind: the type of ``packed``, which is of one piece, like ``into``.

    Raises:
        CannotLoad: this build of llama.cpp does not decode it.
    """
    if kind == "F32":
        into[:] = packed.view("<f4").reshape(into.shape)
    else:
        _to_float(kind)(packed.ctypes.data, into.ctypes.data, into.size)


class Embedding:
    """The tokens of a draft model that has rows of some only.

    Attributes:
        says: the token of each row, ascending.
        n_vocab: how many it reads.

    Raises:
        BadGguf: the file contradicts itself.
        CannotLoad: this build of llama.cpp does not decode the matrix.
    """

    def __init__(self, header: GgufHeader) -> None:
        self.n_vocab = header.vocab_size
        self.says = read_says(header, self.n_vocab, header.rows)
        table, kind = read_embedding(header)
        self._table = np.asarray(table)
        self.width = header.embedding_length
        # as the graph does it for tokens
        self._scale = math.sqrt(self.width) if header.architecture in SCALED else 0.0
        self._kind = kind
        _to_float(kind)

    def write(self, tokens: IntArray, into: Rows) -> None:
        """Write the vectors of tokens [n] to the first rows of ``into``, as llama.cpp reads
        them."""
        decode(np.ascontiguousarray(self._table[tokens]), self._kind, into[: len(tokens)])
        if self._scale:
            into[: len(tokens)] *= np.float32(self._scale)

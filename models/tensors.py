"""Tensors of a GGUF file as float32 arrays, for computing outside llama.cpp.

Only plain floats and the block types that head files use; block layouts as in ggml's
``ggml-common.h``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from specllama.errors import BadGguf, UnsupportedModel
from specllama.models.gguf import GgufHeader
from specllama.models.gguf_format import TensorInfo

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def read_tensor(header: GgufHeader, name: str) -> Floats:
    """Read a tensor of an unsplit file: [n], or [out, in] for a matrix.

    Raises:
        BadGguf: there is no such tensor, the file is cut short, or it holds NaN or infinity.
        UnsupportedModel: a type that is not decoded here.
    """
    data = read_bytes(header, name)
    info = header.by_name[name]
    decode = _DECODERS.get(info.type)
    if decode is None:
        known = ", ".join(_DECODERS)
        raise UnsupportedModel(
            f"{header.path.name}: {name} is stored as {info.type}; read here are {known}"
        )
    matrix = len(info.shape) > 1
    values = decode(data.reshape(info.shape[1] if matrix else 1, -1))
    if not np.isfinite(values).all():
        raise BadGguf(f"{header.path.name}: {name} holds numbers that are not finite")
    return values if matrix else values[0]


class TensorRows:
    """A matrix read some rows at a time, as float32; the file stays where it is.

    Raises:
        BadGguf: there is no such matrix, or the file is cut short.
        UnsupportedModel: a type that is not decoded here, or one of several parts.
    """

    def __init__(self, header: GgufHeader, name: str) -> None:
        info = header.by_name.get(name)
        decode = None if info is None else _DECODERS.get(info.type)
        if info is None or len(info.shape) != 2:
            raise BadGguf(f"{header.path.name} has no matrix {name!r}")
        if decode is None or len(header.parts) > 1:
            raise UnsupportedModel(
                f"{header.path.name}: {name} is split, or stored as {info.type}, which is not read"
            )
        at = header.data_offset + info.offset
        if header.file_bytes < at + info.n_bytes:
            raise BadGguf(f"{header.path.name}: {name} is cut short")
        stored = np.memmap(header.path, np.uint8, "r", at, (info.n_bytes,))
        self._table = stored.reshape(info.shape[1], -1)
        self._decode = decode

    def __getitem__(self, rows: npt.NDArray[np.int32]) -> Floats:
        return self._decode(np.ascontiguousarray(self._table[rows]))


def read_ids(header: GgufHeader, name: str) -> npt.NDArray[np.int32]:
    """Read a one-dimensional I32 tensor.

    Raises:
        BadGguf: there is no such tensor, or it is not one.
    """
    data = read_bytes(header, name)
    if header.by_name[name].type != "I32":
        raise BadGguf(f"{header.path.name}: {name} does not hold 32-bit integers")
    return data.view("<i4").astype(np.int32)


def read_bytes(header: GgufHeader, name: str) -> Bytes:
    """Read a tensor as it is stored.

    Raises:
        BadGguf: there is no such tensor, or the file is cut short.
        UnsupportedModel: the file is one of several parts.
    """
    info: TensorInfo | None = header.by_name.get(name)
    if info is None:
        raise BadGguf(f"{header.path.name} has no tensor {name!r}")
    if len(header.parts) > 1:
        raise UnsupportedModel(f"{header.path.name} is split; tensors are read from one file only")
    with header.path.open("rb") as file:
        file.seek(header.data_offset + info.offset)
        data = np.frombuffer(file.read(info.n_bytes), np.uint8)
    if len(data) != info.n_bytes or len(info.shape) > 2:
        raise BadGguf(f"{header.path.name}: {name} is cut short or of an odd shape")
    return data


def _blocks(table: Bytes, size: int) -> Bytes:
    return table.reshape(len(table), -1, size)


def _scaled(blocks: Bytes, values: Floats) -> Floats:
    """Multiply the values of blocks by the float16 scale that each begins with."""
    scale = blocks[..., :2].copy().view("<f2").astype(np.float32)
    out: Floats = (values * scale).reshape(len(blocks), -1)
    return out


def _q8_0(table: Bytes) -> Floats:
    """Decode blocks of a float16 scale, then 32 signed bytes."""
    blocks = _blocks(table, 34)
    return _scaled(blocks, blocks[..., 2:].view(np.int8).astype(np.float32))


def _q4_0(table: Bytes) -> Floats:
    """Decode blocks of a float16 scale, then 16 bytes: low nibbles are the first half of the
    block."""
    blocks = _blocks(table, 18)
    quants = blocks[..., 2:]
    both = np.concatenate((quants & 15, quants >> 4), axis=-1).astype(np.float32) - 8.0
    return _scaled(blocks, both)


def _q6_k(table: Bytes) -> Floats:
    """Decode blocks of 256 values: 128 bytes of low nibbles, 64 of high bit pairs, 16 scales, a
    float16 scale."""
    blocks = _blocks(table, 210)
    n, m = blocks.shape[:2]
    low = blocks[..., :128].reshape(n, m, 2, 2, 32)  # [half, group, 32]
    high = blocks[..., 128:192].reshape(n, m, 2, 1, 32)
    nibbles = np.concatenate((low & 15, low >> 4), axis=3)  # [half, 4, 32]
    pairs = np.concatenate([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=3)
    quants = (nibbles | (pairs << 4)).astype(np.int16) - 32
    scales = blocks[..., 192:208].view(np.int8).astype(np.float32).reshape(n, m, 16, 1)
    whole = blocks[..., 208:].copy().view("<f2").astype(np.float32).reshape(n, m, 1, 1)
    out: Floats = (whole * scales * quants.reshape(n, m, 16, 16)).reshape(n, -1)
    return out


_DECODERS: dict[str, Callable[[Bytes], Floats]] = {
    "F32": lambda table: table.view("<f4").astype(np.float32, copy=False),
    "F16": lambda table: table.view("<f2").astype(np.float32),
    "BF16": lambda table: (table.view("<u2").astype(np.uint32) << 16).view(np.float32),
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q6_K": _q6_k,
}


def pack_q8_0(matrix: Floats) -> Bytes:
    """Pack rows of a multiple of 32 values as Q8_0 blocks, rounded as ggml's reference does."""
    blocks = matrix.astype(np.float32).reshape(len(matrix), -1, 32)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale == 0, np.float32(0), 1 / scale)
    scaled = blocks * inverse
    quants = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    head = scale.astype("<f2").view(np.uint8)
    out: Bytes = np.concatenate((head, quants.view(np.uint8)), axis=-1).reshape(len(matrix), -1)
    return out

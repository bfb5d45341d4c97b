"""A writer of small GGUF files: as much as a head file needs (version 3, little endian)."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specllama.errors import SpecllamaError
from specllama.models.ggml_types import TENSOR_TYPES, tensor_bytes
from specllama.models.gguf import GgufHeader
from specllama.models.gguf_format import SCALARS, raw_array
from specllama.models.tensors import pack_q8_0

ALIGNMENT = 32
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
TYPE_IDS = {kind.name: number for number, kind in TENSOR_TYPES.items()}
_PACKED_HERE = ("F32", "F16", "Q8_0", "I32", "I64")


class Tensor(Protocol):
    """An array, or something that becomes one when it is written."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __array__(self, dtype: Any = None, /, *, copy: bool | None = None) -> Any: ...


@dataclass(frozen=True, slots=True)
class Blocks:
    """A tensor of any type whose bytes are packed already; made, or read, when it is written."""

    shape: tuple[int, ...]
    make: Callable[[], bytes | npt.NDArray[np.uint8]]


Value = bool | int | float | str | bytes | npt.NDArray[np.float32] | npt.NDArray[np.int32]
"""bool, u32, f32, string, an array of f32 or i32; bytes are a value as a file stores it."""


def write_gguf(
    path: Path,
    metadata: Mapping[str, Value],
    tensors: Mapping[str, tuple[Tensor | Blocks, str]],
    written: Callable[[float], object] | None = None,
    tail: Blocks | None = None,
) -> None:
    """Write a file, whole or not at all; one tensor at a time is held in memory.

    Args:
        tensors: values and type ("F32", "F16", "Q8_0", "I32", "I64") by name; matrices are
            [out, in]. Blocks may be of any type.
        written: called with the share of the tensors that are.
        tail: of no meaning to GGUF, after the tensors.

    Raises:
        SpecllamaError: the file cannot be written.
        ValueError: a type that is not written here, or rows that do not fill whole blocks.
    """
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    head += [_text(key) + _value(value) for key, value in metadata.items()]
    offset = 0
    for name, (tensor, kind) in tensors.items():
        shape = tuple(reversed(tensor.shape))
        known = isinstance(tensor, Blocks) or kind in _PACKED_HERE
        if not known or (kind == "Q8_0" and shape[0] % 32):
            raise ValueError(f"{name} of shape {shape} cannot be written as {kind}")
        head.append(_text(name) + struct.pack("<I", len(shape)))
        head.append(struct.pack(f"<{len(shape)}Q", *shape))
        head.append(struct.pack("<IQ", TYPE_IDS[kind], offset))
        size = tensor_bytes(TYPE_IDS[kind], math.prod(shape))
        offset += size + -size % ALIGNMENT
    start = b"".join(head)
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(start + bytes(-len(start) % ALIGNMENT))
            for n, (tensor, kind) in enumerate(tensors.values(), 1):
                body = _pack(tensor, kind)
                file.write(body)
                file.write(bytes(-len(body) % ALIGNMENT))
                if written is not None:
                    written(n / len(tensors))
            if tail is not None:
                file.write(_pack(tail, ""))
        part.replace(path)
    except OSError as error:
        raise SpecllamaError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)


def type_for(tensor: Tensor, kind: str) -> str:
    """Return the asked type for a matrix whose rows fill its blocks, else one that fits."""
    if len(tensor.shape) != 2:
        return "F32"
    return kind if kind != "Q8_0" or tensor.shape[1] % 32 == 0 else "F16"


def _pack(tensor: Tensor | Blocks, kind: str) -> bytes | memoryview:
    if isinstance(tensor, Blocks):
        made = tensor.make()
        return made if isinstance(made, bytes) else made.data.cast("B")
    if kind == "Q8_0":
        return pack_q8_0(np.asarray(tensor, np.float32)).tobytes()
    dtypes = {"F32": "<f4", "F16": "<f2", "I32": "<i4", "I64": "<i8"}
    return np.ascontiguousarray(tensor, dtypes[kind]).tobytes()


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    whole = np.issubdtype(value.dtype, np.integer)
    data = np.ascontiguousarray(value, "<i4" if whole else "<f4").ravel()
    return struct.pack("<IIQ", _ARRAY, _I32 if whole else _F32, len(data)) + data.tobytes()


def stored(header: GgufHeader, prefix: str) -> dict[str, bytes]:
    """Read the values of another file's keys that begin with ``prefix``, as it stores them.

    Raises:
        BadGguf: the file changed since its header was read.
    """
    ids = {name: number for number, (name, _) in SCALARS.items()} | {"str": _STRING}
    found: dict[str, bytes] = {}
    for key, kind in header.kinds.items():
        if not key.startswith(prefix):
            continue
        if key in header.arrays:
            array = header.arrays[key]
            head = struct.pack("<IIQ", _ARRAY, ids[array.kind], array.count)
            found[key] = head + raw_array(header.path, array)
        elif kind == "str":
            found[key] = _value(header.text(key) or "")
        else:
            found[key] = struct.pack("<I", ids[kind]) + SCALARS[ids[kind]][1].pack(
                header.metadata[key]
            )
    return found

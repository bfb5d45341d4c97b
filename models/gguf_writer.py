"""Writing small GGUF files: what a head file needs and no more (version 3, little endian)."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specllama.errors import SpecllamaError
from specllama.models.ggml_types import tensor_bytes
from specllama.models.tensors import pack_q8_0

ALIGNMENT = 32
_U32, _F32, _STRING, _ARRAY = 4, 6, 8, 9
_TYPE_IDS = {"F32": 0, "F16": 1, "Q8_0": 8, "I32": 26}


class Tensor(Protocol):
    """An array, or something that becomes one when it is written."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __array__(self, dtype: Any = None, /, *, copy: bool | None = None) -> Any: ...


Value = int | float | str | npt.NDArray[np.float32]
"""u32, f32, string, or an array of f32."""


def write_gguf(
    path: Path, metadata: Mapping[str, Value], tensors: Mapping[str, tuple[Tensor, str]]
) -> None:
    """Write a file, whole or not at all; one tensor at a time is held in memory.

    Args:
        tensors: values and type ("F32", "F16", "Q8_0", "I32") by name; matrices are [out, in].

    Raises:
        SpecllamaError: the file cannot be written.
        ValueError: a type that is not written here, or rows that do not fill whole blocks.
    """
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    head += [_text(key) + _value(value) for key, value in metadata.items()]
    offset = 0
    for name, (tensor, kind) in tensors.items():
        shape = tuple(reversed(tensor.shape))
        if kind not in _TYPE_IDS or (kind == "Q8_0" and shape[0] % 32):
            raise ValueError(f"{name} of shape {shape} cannot be written as {kind}")
        head.append(_text(name) + struct.pack("<I", len(shape)))
        head.append(struct.pack(f"<{len(shape)}Q", *shape))
        head.append(struct.pack("<IQ", _TYPE_IDS[kind], offset))
        size = tensor_bytes(_TYPE_IDS[kind], math.prod(shape))
        offset += size + -size % ALIGNMENT
    start = b"".join(head)
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(start + bytes(-len(start) % ALIGNMENT))
            for tensor, kind in tensors.values():
                body = _pack(tensor, kind)
                file.write(body + bytes(-len(body) % ALIGNMENT))
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise SpecllamaError(f"cannot write {path}: {error.strerror or error}") from None
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _pack(tensor: Tensor, kind: str) -> bytes:
    if kind == "Q8_0":
        return pack_q8_0(np.asarray(tensor, np.float32)).tobytes()
    dtypes = {"F32": "<f4", "F16": "<f2", "I32": "<i4"}
    return np.ascontiguousarray(tensor, dtypes[kind]).tobytes()


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    data = np.ascontiguousarray(value, "<f4").ravel()
    return struct.pack("<IIQ", _ARRAY, _F32, len(data)) + data.tobytes()

"""Writing small GGUF files: what a head file needs and no more (version 3, little endian)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specllama.errors import SpecllamaError
from specllama.models.tensors import pack_q8_0

ALIGNMENT = 32
_U32, _F32, _STRING, _ARRAY = 4, 6, 8, 9
_TYPE_IDS = {"F32": 0, "F16": 1, "Q8_0": 8, "I32": 26}

Value = int | float | str | npt.NDArray[np.float32]
"""u32, f32, string, or an array of f32."""


def write_gguf(
    path: Path, metadata: Mapping[str, Value], tensors: Mapping[str, tuple[npt.NDArray[Any], str]]
) -> None:
    """Write a file, whole or not at all.

    Args:
        tensors: array and type ("F32", "F16", "Q8_0", "I32") by name; matrices are [out, in].

    Raises:
        SpecllamaError: the file cannot be written.
        ValueError: a type that is not written here, or rows that do not fill whole blocks.
    """
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    head += [_text(key) + _value(value) for key, value in metadata.items()]
    bodies: list[bytes] = []
    offset = 0
    for name, (array, kind) in tensors.items():
        body = _pack(array, kind)
        head.append(_text(name) + struct.pack("<I", array.ndim))
        head.append(struct.pack(f"<{array.ndim}Q", *reversed(array.shape)))
        head.append(struct.pack("<IQ", _TYPE_IDS[kind], offset))
        bodies.append(body + bytes(-len(body) % ALIGNMENT))
        offset += len(bodies[-1])
    start = b"".join(head)
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(start + bytes(-len(start) % ALIGNMENT))
            for body in bodies:
                file.write(body)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise SpecllamaError(f"cannot write {path}: {error.strerror or error}") from None


def _pack(array: npt.NDArray[Any], kind: str) -> bytes:
    if kind == "Q8_0":
        return pack_q8_0(np.asarray(array, np.float32)).tobytes()
    dtypes = {"F32": "<f4", "F16": "<f2", "I32": "<i4"}
    if kind not in dtypes:
        raise ValueError(f"{kind} is not written here")
    return np.ascontiguousarray(array, dtypes[kind]).tobytes()


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

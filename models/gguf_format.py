"""The GGUF container: a bounded parser that trusts nothing in the file.

Every count, length, offset and size is checked against hard limits and against the size of the
file before it is used, with the same rules as llama.cpp's ``gguf.cpp`` (its order, its alignment
rule, its demand that tensors follow each other without gaps). Large arrays are skipped, not
decoded.

``gguf.py`` knows what the fields mean, ``loadable.py`` what llama.cpp accepts.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from specllama.errors import BadGguf, CannotLoad, ModelUnavailable, UnsupportedModel
from specllama.models.ggml_types import TENSOR_TYPES, tensor_bytes
from specllama.models.strings import leap

Scalar = int | float | bool | str

# far above any real model, far below what could do harm
MAX_HEADER_BYTES = 256 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_KEY_BYTES = 1 << 16
MAX_STRING_BYTES = 16 << 20
MAX_STRINGS = 1 << 22
MAX_TENSOR_NAME = 63
MAX_DIMS = 4
KEEP_ARRAY_BYTES = 1 << 16

_CHUNK = 4 << 20
_STRING, _ARRAY = 8, 9
SCALARS: dict[int, tuple[str, struct.Struct]] = {
    0: ("u8", struct.Struct("<B")), 1: ("i8", struct.Struct("<b")),
    2: ("u16", struct.Struct("<H")), 3: ("i16", struct.Struct("<h")),
    4: ("u32", struct.Struct("<I")), 5: ("i32", struct.Struct("<i")),
    6: ("f32", struct.Struct("<f")), 7: ("bool", struct.Struct("<?")),
    10: ("u64", struct.Struct("<Q")), 11: ("i64", struct.Struct("<q")),
    12: ("f64", struct.Struct("<d")),
}  # fmt: skip
_FORMATS = {name: packer.format[-1:] for name, packer in SCALARS.values()}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")  # name-00001-of-00003.gguf
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # tensors, as llama.cpp names them
_EXPERTS = re.compile(EXPERTS)

DOWNLOAD_AGAIN = "download it again, or check it with: specllama hub verify FILE"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's entry: ``shape`` is in GGUF order (fastest dimension first), ``offset`` from the
    data start."""

    name: str
    shape: tuple[int, ...]
    type: str
    type_id: int
    offset: int
    n_bytes: int

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_expert(self) -> bool:
        """True if it holds experts, of which a token uses a few."""
        return _EXPERTS.search(self.name) is not None

    @property
    def is_matrix(self) -> bool:
        """True if it is multiplied with activations: more than one row and more than one column."""
        return sum(extent > 1 for extent in self.shape) >= 2


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array's place in the file: ``kind`` is "str" or a scalar type name ("i32", "f32" …)."""

    kind: str
    count: int
    offset: int
    n_bytes: int
    raw: bytes | None = None


@dataclass(frozen=True)
class Container:
    """One parsed file.

    Attributes:
        metadata: scalars and strings by key; ``kinds`` holds their GGUF types ("u32", "str" …).
        arrays: where each array is.
        tensors: their offsets count from the data start.
    """

    path: Path
    version: int
    alignment: int
    data_offset: int
    file_bytes: int
    metadata: dict[str, Scalar] = field(repr=False)
    kinds: dict[str, str] = field(repr=False)
    arrays: dict[str, GgufArray] = field(repr=False)
    tensors: tuple[TensorInfo, ...] = field(repr=False)


class _Reader:
    """A growing window over the first bytes of a file; it reads the parts of a header in turn."""

    def __init__(self, file: IO[bytes], size: int, path: Path) -> None:
        self._file = file
        self.path = path
        self.size = size
        self.buffer = bytearray()
        self.position = 0

    def bad(self, why: str, hint: str | None = None) -> BadGguf:
        """Return the error for a file that contradicts itself; ``why`` goes on after its name."""
        return BadGguf(self.path.name + why, hint)

    def ensure(self, end: int, what: str) -> None:
        """Make sure that the bytes up to ``end`` are in memory."""
        if end <= len(self.buffer):
            return
        if end > self.size:
            raise self.bad(f" ends inside {what}: truncated, or a length is wrong", DOWNLOAD_AGAIN)
        if end > MAX_HEADER_BYTES:
            raise self.bad(f" has a header larger than {MAX_HEADER_BYTES >> 20} MiB")
        want = min(max(end - len(self.buffer), _CHUNK, len(self.buffer)), MAX_HEADER_BYTES)
        self.buffer += self._file.read(want)
        if end > len(self.buffer):
            raise self.bad(" shrank while it was read", DOWNLOAD_AGAIN)

    def take(self, n: int, what: str) -> bytes:
        self.ensure(self.position + n, what)
        start = self.position
        self.position += n
        return bytes(self.buffer[start : self.position])

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack(self.take(8, what))[0])

    def string(self, what: str, limit: int) -> bytes:
        n = self.u64(what)
        if n > limit:
            raise self.bad(f": {what} claims {n} bytes (at most {limit})")
        return self.take(n, what)

    def name(self, what: str, limit: int, known: Collection[str]) -> str:
        """Read a name that nothing else has."""
        try:
            name = self.string(f"the name of {what}", limit).decode("utf-8")
        except UnicodeDecodeError:
            raise self.bad(f": the name of {what} is not UTF-8") from None
        if name in known:
            raise self.bad(f": the {what.split()[0]} {name!r} appears twice")
        return name

    def skip_strings(self, count: int, what: str) -> None:
        """Skip ``count`` strings, length by length; nothing is decoded or kept."""
        unpack = _U64.unpack_from
        buffer, position, left = self.buffer, self.position, count
        while left:
            n, ahead = leap(buffer, position, left)
            left, position = left - n, position + ahead
            available = len(buffer) - 8
            while left and position <= available:
                position += unpack(buffer, position)[0] + 8
                left -= 1
            if left or position > len(buffer):
                self.ensure(position + (8 if left else 0), what)
        self.position = position


def no_file(path: Path, hint: str | None = None) -> ModelUnavailable:
    """Return the error for a path without a file: a link that is dead is named, and its target."""
    for link in (*reversed(path.parents), path):
        with contextlib.suppress(OSError):
            if link.is_symlink() and not link.exists():
                return ModelUnavailable(f"{link} is a link to {os.readlink(link)}, which is gone")
    return ModelUnavailable(f"no such file: {path}", hint)


def is_later_part(name: str) -> bool:
    """True if a file is part 2 or later of a split model."""
    part = SPLIT.search(name)
    return part is not None and int(part[1]) != 1


def part_names(name: str) -> list[str]:
    """Return all file names of a (split) model, given one of them."""
    part = SPLIT.search(name)
    if part is None:
        return [name]
    count, prefix = int(part[2]), name[: part.start()]
    return [f"{prefix}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]


def parse(path: Path) -> Container:
    """Read the header of one GGUF file.

    Raises:
        ModelUnavailable: there is no such file, or it may not be read.
        BadGguf: it is not GGUF, damaged, truncated, or contradicts itself.
        UnsupportedModel: a GGUF of a version or byte order that llama.cpp does not read.
    """
    try:
        if path.is_dir():
            raise CannotLoad(
                f"{path} is a folder, not a model file", f"list it with: specllama hub ls {path}"
            )
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):  # opening a pipe would wait forever
            raise CannotLoad(f"{path} is a pipe or a device, not a model file")
        with path.open("rb") as file:
            return _parse(_Reader(file, about.st_size, path))
    except FileNotFoundError:
        raise no_file(path) from None
    except PermissionError:
        raise ModelUnavailable(f"{path} may not be read", "check its permissions") from None
    except OSError as error:
        raise ModelUnavailable(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a NUL byte in the path
        raise ModelUnavailable(f"not a file name: {str(path)!r} ({error})") from None


def _parse(reader: _Reader) -> Container:
    version, n_tensors, n_keys = _preamble(reader)
    metadata, kinds, _ = keys = _keys(reader, n_keys)
    alignment = metadata.get("general.alignment", 32)
    if kinds.get("general.alignment", "u32") != "u32" or not isinstance(alignment, int):
        raise reader.bad(": general.alignment must be a 32-bit number")
    if alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise reader.bad(f": alignment {alignment} is not a power of two")
    tensors = tuple(_tensors(reader, n_tensors))
    data_offset = reader.position
    if tensors:
        data_offset = -(-data_offset // alignment) * alignment
        _check_layout(reader, tensors, alignment, data_offset)
    return Container(reader.path, version, alignment, data_offset, reader.size, *keys, tensors)


def _preamble(reader: _Reader) -> tuple[int, int, int]:
    if reader.size == 0:
        raise reader.bad(" is empty", DOWNLOAD_AGAIN)
    head = reader.take(min(reader.size, 512), "the magic number")
    if head[:4] != b"GGUF":
        raise _not_gguf(reader, head)
    if reader.size < 24:
        raise reader.bad(" ends inside its first 24 bytes: truncated", DOWNLOAD_AGAIN)
    reader.position, name = 4, reader.path.name
    version = reader.u32("the version")
    if version & 0xFFFF == 0 and version:
        raise UnsupportedModel(
            f"{name} is a big-endian GGUF", "convert it with gguf-convert-endian"
        )
    if version not in (2, 3):
        raise UnsupportedModel(
            f"{name} is GGUF version {version}; versions 2 and 3 can be read",
            "convert the original model again with a current llama.cpp",
        )
    n_tensors = reader.u64("the tensor count")
    n_keys = reader.u64("the key count")
    for n, what, most, least_bytes in (
        (n_tensors, "tensors", MAX_TENSORS, 24),
        (n_keys, "keys", MAX_KEYS, 13),
    ):
        if n > most or n * least_bytes > reader.size:
            raise reader.bad(f" claims {n} {what}: its header is damaged", DOWNLOAD_AGAIN)
    return version, n_tensors, n_keys


def _not_gguf(reader: _Reader, head: bytes) -> CannotLoad:
    text = head.lstrip().lower()
    convert = "convert it with llama.cpp's convert_hf_to_gguf.py"
    if head.startswith(b"version https://git-lfs"):
        return reader.bad(
            " is a Git LFS pointer, not the model itself",
            "fetch the real file with: git lfs pull, or: specllama hub pull",
        )
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        why = " is a web page, not a model (an error page was saved under its name)"
        return reader.bad(why, DOWNLOAD_AGAIN)
    if text.startswith(b"{"):
        return reader.bad(" is JSON text, not a model", DOWNLOAD_AGAIN)
    if head[:4] in (b"ggml", b"lmgg", b"fmgg", b"tjgg", b"ggjt", b"ggla"):
        return UnsupportedModel(
            f"{reader.path.name} is a GGML file from before GGUF (2023)",
            "look for a GGUF of the same model: specllama hub search",
        )
    if head[:2] == b"PK":
        why = f"{reader.path.name} is a PyTorch or ZIP archive, not a GGUF"
        return UnsupportedModel(why, convert)
    if len(head) > 9 and head[8:9] == b"{" and not any(head[5:8]):
        return UnsupportedModel(f"{reader.path.name} is a safetensors file, not a GGUF", convert)
    if not any(head):
        return reader.bad(" starts with zeros: an unfinished download", DOWNLOAD_AGAIN)
    shown = "".join(chr(b) if 32 <= b < 127 else "·" for b in head[:4])
    return reader.bad(f" is not a GGUF file (it starts with “{shown}”)")


def _keys(
    reader: _Reader, n_keys: int
) -> tuple[dict[str, Scalar], dict[str, str], dict[str, GgufArray]]:
    metadata: dict[str, Scalar] = {}
    kinds: dict[str, str] = {}
    arrays: dict[str, GgufArray] = {}
    for i in range(n_keys):
        key = reader.name(f"key {i}", MAX_KEY_BYTES, kinds)
        if not key:
            raise reader.bad(f": key {i} has an empty name")
        what = f"key {key!r}"
        type_id = reader.u32(what)
        if type_id == _ARRAY:
            arrays[key] = _array(reader, f"the array {key!r}")
            kinds[key] = f"[{arrays[key].kind}]"
        elif type_id == _STRING:
            # only shown and compared: broken bytes must not make the model unusable
            metadata[key] = reader.string(what, MAX_STRING_BYTES).decode("utf-8", "replace")
            kinds[key] = "str"
        elif type_id in SCALARS:
            kinds[key], packer = SCALARS[type_id]
            metadata[key] = packer.unpack(reader.take(packer.size, what))[0]
        else:
            raise reader.bad(f": the key {key!r} has the unknown type {type_id}")
    return metadata, kinds, arrays


def _array(reader: _Reader, what: str) -> GgufArray:
    type_id, count = reader.u32(what), reader.u64(what)
    offset = reader.position

    def too_many(things: str) -> BadGguf:
        claim = f": {what} claims {count:,} {things} in a file of {reader.size:,} bytes"
        return reader.bad(claim, DOWNLOAD_AGAIN)

    if type_id == _STRING:
        if count > MAX_STRINGS or count * 8 > reader.size:
            raise too_many("strings")
        reader.skip_strings(count, what)
        kind = "str"
    elif type_id in SCALARS:
        kind, packer = SCALARS[type_id]
        if count * packer.size > reader.size:
            raise too_many("values")
        reader.ensure(offset + count * packer.size, what)
        reader.position = offset + count * packer.size
    elif type_id == _ARRAY:
        raise reader.bad(f": {what} is an array of arrays, which llama.cpp does not read")
    else:
        raise reader.bad(f": {what} has the unknown element type {type_id}")
    n_bytes = reader.position - offset
    raw = bytes(reader.buffer[offset : reader.position]) if n_bytes <= KEEP_ARRAY_BYTES else None
    return GgufArray(kind, count, offset, n_bytes, raw)


def _tensors(reader: _Reader, n_tensors: int) -> Iterator[TensorInfo]:
    seen: set[str] = set()
    for i in range(n_tensors):
        name = reader.name(f"tensor {i}", MAX_TENSOR_NAME, seen)
        seen.add(name)
        what = f"tensor {name!r}"
        n_dims = reader.u32(what)
        if n_dims > MAX_DIMS:
            raise reader.bad(f": {what} has {n_dims} dimensions (at most {MAX_DIMS})")
        shape = struct.unpack(f"<{n_dims}Q", reader.take(8 * n_dims, what))
        type_id = reader.u32(what)
        offset = reader.u64(what)
        if type_id not in TENSOR_TYPES:
            raise UnsupportedModel(
                f"{reader.path.name}: {what} has the type {type_id}, which this llama.cpp does not"
                " know",
                "the file may be damaged, or newer than this version of specllama",
            )
        kind = TENSOR_TYPES[type_id]
        elements = math.prod(shape)
        if elements >= 2**63 or any(extent >= 2**63 for extent in shape):
            raise reader.bad(f": {what} has the impossible shape {shape}")
        row = shape[0] if shape else 1
        if row % kind.block:
            needs = f"not a multiple of {kind.block} as {kind.name} needs"
            raise reader.bad(f": {what} has {row} values a row, {needs}")
        yield TensorInfo(name, shape, kind.name, type_id, offset, tensor_bytes(type_id, elements))


def _check_layout(
    reader: _Reader, tensors: tuple[TensorInfo, ...], alignment: int, data_offset: int
) -> None:
    expected = 0
    for tensor in tensors:
        if tensor.offset != expected:
            where = f"lies at {tensor.offset}, expected {expected}"
            raise reader.bad(f": tensor {tensor.name!r} {where}")
        end = data_offset + tensor.offset + tensor.n_bytes
        if end > reader.size:
            why = f" is truncated: {tensor.name!r} ends at byte {end:,} of {reader.size:,}"
            raise reader.bad(why, DOWNLOAD_AGAIN)
        expected += -(-tensor.n_bytes // alignment) * alignment


def raw_array(path: Path, array: GgufArray) -> bytes:
    """Return an array as it is stored, read again from the file when it was too large to keep.

    Raises:
        BadGguf: the file changed since its header was read.
    """
    raw = array.raw
    if raw is None:
        try:
            with path.open("rb") as file:
                file.seek(array.offset)
                raw = file.read(array.n_bytes)
        except OSError as error:
            raise ModelUnavailable(f"{path} cannot be read: {error.strerror or error}") from None
    if len(raw) != array.n_bytes:
        raise BadGguf(f"{path.name} changed while it was read")
    return raw


def decode_array(path: Path, array: GgufArray) -> list[int] | list[float] | list[bytes]:
    """Return the values of an array, read again from the file when it was too large to keep.

    Raises:
        BadGguf: the file changed since its header was read.
    """
    raw = raw_array(path, array)
    if array.kind != "str":
        return list(struct.unpack(f"<{array.count}{_FORMATS[array.kind]}", raw))
    out: list[bytes] = []
    append, unpack, position, end = out.append, _U64.unpack_from, 0, len(raw)
    try:
        for _ in range(array.count):
            start = position + 8
            position = start + unpack(raw, position)[0]
            append(raw[start:position])
    except struct.error:
        position = end + 1
    if position != end:
        raise BadGguf(f"{path.name} changed while it was read")
    return out

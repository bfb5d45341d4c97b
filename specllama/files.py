"""Files that specllama wrote for itself, and those that a user names.

A crash cuts a file, a disk flips bits, another version writes other fields. Every reader of a file
of ours catches ``DAMAGE``, the one list of what decoding foreign bytes can raise. Piped input and
named files are read up to a bound: some inputs never end.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from specllama.errors import UsageError
from specllama.text import encodable

MOST_BYTES = 16 * 2**20  # more than any context or grammar holds

# UnicodeDecodeError is a ValueError; msgspec's own errors are not
DAMAGE = (
    msgspec.MsgspecError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
)


def read_json(path: Path, kind: Any = Any) -> Any:
    """Read a JSON file as a ``kind``; return None if there is no file.

    Raises:
        OSError: it cannot be read.
        one of ``DAMAGE``: it holds something else.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(data, type=kind)


def write_new(path: Path, text: str) -> None:
    """Write a new file, whole or not at all.

    Raises:
        OSError: it is there already, or it cannot be written.
    """
    with path.open("x", encoding="utf-8") as file:
        try:
            file.write(encodable(text))
            file.flush()
        except OSError:
            path.unlink()
            raise


def read_bounded(stream: BinaryIO, what: str, most: int = MOST_BYTES) -> bytes:
    """Read a text to its end, without the mark of UTF-8 that editors put in front.

    Raises:
        UsageError: it holds more than ``most`` bytes.
    """
    data = stream.read(most + 1)
    if len(data) > most:
        raise UsageError(
            f"{what} is longer than {most // 2**20} MiB",
            "check that it is the right file, or give a shorter one",
        )
    return data.removeprefix(BOM_UTF8)


def read_file(path: Path, what: str, most: int = MOST_BYTES) -> bytes:
    """Read a whole file, which may be a device or a pipe.

    Raises:
        UsageError: it cannot be read, or is longer than ``most`` bytes.
    """
    try:
        with path.open("rb") as file:
            return read_bounded(file, f"{what} {path}", most)
    except OSError as error:
        raise UsageError(f"cannot read {what} {path}: {error.strerror or error}") from None

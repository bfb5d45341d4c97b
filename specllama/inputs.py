"""Piped input and named files are read up to a bound: some inputs never end."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from specllama.errors import UsageError

MOST_BYTES = 16 * 2**20  # more than any context or grammar holds


def read_bounded(stream: BinaryIO, what: str, most: int = MOST_BYTES) -> bytes:
    """All that a stream holds.

    Raises:
        UsageError: it holds more than ``most`` bytes.
    """
    data = stream.read(most + 1)
    if len(data) > most:
        raise UsageError(
            f"{what} is longer than {most // 2**20} MiB",
            "check that it is the right file, or give a shorter one",
        )
    return data


def read_file(path: Path, what: str, most: int = MOST_BYTES) -> bytes:
    """A whole file, which may be a device or a pipe.

    Raises:
        UsageError: it cannot be read, or is longer than ``most`` bytes.
    """
    try:
        with path.open("rb") as file:
            return read_bounded(file, f"{what} {path}", most)
    except OSError as error:
        raise UsageError(f"cannot read {what} {path}: {error.strerror or error}") from None

"""The texts of the files and folders that a user names, to draft or to learn from.

The newest files come first until the bound is reached. What is hidden, larger than a file of text
is, or no UTF-8 is left out and counted.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from specllama.errors import UsageError

MOST_FILE = 2**20  # bytes of one file: larger ones are data
MOST_BYTES = 8 * 2**20  # of all
_APART = ("node_modules", "__pycache__")  # folders of what others wrote, or of no text


def read_texts(names: Sequence[str]) -> tuple[list[str], str]:
    """Return the texts of some files and folders, oldest first, and in words the files left out.

    Raises:
        UsageError: a name is neither a file nor a folder.
    """
    texts, without = read_named(names, "cannot draft from")
    return [text for _, text in texts], without


def read_named(names: Sequence[str], cannot: str) -> tuple[list[tuple[Path, str]], str]:
    """Return what ``read_texts`` does, each text with its file. Errors begin with ``cannot``."""
    files: dict[Path, os.stat_result] = {}
    for name in names:
        path = Path(os.path.expanduser(name))
        if not path.exists():
            raise UsageError(f"{cannot} {name}: there is no such file or folder")
        for file in _files(path):
            with suppress(OSError):
                files[file] = file.stat()
    texts: list[tuple[Path, str]] = []
    without: Counter[str] = Counter()
    left = MOST_BYTES
    for file in sorted(files, key=lambda one: (-files[one].st_mtime, str(one))):
        size = files[file].st_size
        if size > MOST_FILE:
            without["larger than 1 MiB"] += 1
        elif size > left:
            without["beyond 8 MiB of newer ones"] += 1
        elif (text := _text(file)) is None:
            without["no text"] += 1
        elif text:
            texts.append((file, text))
            left -= size
    said = ", ".join(f"{n} {why}" for why, n in without.items())
    return texts[::-1], said


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for folder, below, names in os.walk(path):
        below[:] = sorted(one for one in below if not one.startswith(".") and one not in _APART)
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _text(file: Path) -> str | None:
    try:
        data = file.read_bytes() if file.is_file() else b"\0"
        return None if b"\0" in data else data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None

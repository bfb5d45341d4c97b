"""Past token sequences to copy drafts from: one file per tokenizer, opt-in, never shared.

    <data>/corpus/<tokenizer>.tokens

A file is a run of records ``length, checksum, tokens`` (little-endian 32-bit integers), appended
with one write each: a kill leaves at most one torn record; readers skip it and whatever follows
it. A file that outgrows its bound is rewritten with its newest records. Nothing is
written unless a caller asks for it; everything can be listed, sized and deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specllama.errors import StoreError
from specllama.paths import data_dir, private_folder, replace_file

SUFFIX = ".tokens"
MAX_BYTES = 4 * 2**20  # a million tokens per tokenizer
MIN_TOKENS = 16  # shorter texts are not worth keeping

_Words = npt.NDArray[np.uint32]


def corpus_dir() -> Path:
    return data_dir() / "corpus"


def tokenizer_key(tokens: bytes) -> str:
    """The name of a vocabulary: models that mean the same text by the same ids share it.

    Args:
        tokens: all of them, each behind four bytes of its length.
    """
    return hashlib.sha256(tokens).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """What is kept for one tokenizer."""

    tokenizer: str
    texts: int
    tokens: int
    file_bytes: int
    modified_s: float

    @property
    def damaged(self) -> bool:
        """The file holds something after the last text that can be read."""
        return 8 * self.texts + 4 * self.tokens != self.file_bytes

    def to_dict(self) -> dict[str, str | int | float]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class Corpus:
    """The corpus in one folder.

    Args:
        folder: where the files are; default ``corpus_dir()``.
        max_bytes: bound on one tokenizer's file.
    """

    def __init__(self, folder: Path | None = None, *, max_bytes: int = MAX_BYTES) -> None:
        self.path = folder or corpus_dir()
        self._max_bytes = max_bytes

    def add(self, tokenizer: str, tokens: Sequence[int]) -> bool:
        """Append one text; False if it is too short to be useful or repeats the last one.

        Raises:
            StoreError: the file cannot be written.
        """
        if len(tokens) < MIN_TOKENS:
            return False
        path = self._file(tokenizer)
        record = _pack(tokens)
        try:
            private_folder(self.path)
            kept = _read(path)
            if kept and np.array_equal(kept[-1], np.asarray(tokens, np.uint32)):
                return False
            whole = sum(8 + 4 * len(text) for text in kept)
            size = path.stat().st_size if path.exists() else 0
            if size == whole and size + len(record) <= self._max_bytes:
                _append(path, record)
            else:  # full, or torn at the end
                self._rewrite(path, [*kept, np.asarray(tokens, np.uint32)])
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror or error}") from None
        return True

    def texts(self, tokenizer: str, *, most: int | None = None) -> list[list[int]]:
        """The newest kept texts, at most ``most`` tokens together, oldest first."""
        found: list[list[int]] = []
        left = most
        for text in reversed(_read(self._file(tokenizer))):
            if left is not None and len(text) > left:
                break
            found.append([int(t) for t in text])
            left = None if left is None else left - len(text)
        return found[::-1]

    def files(self) -> list[CorpusFile]:
        """What is kept, newest first."""
        found = []
        for path in self._paths():
            with contextlib.suppress(OSError):
                about = path.stat()
                texts = _read(path)
                found.append(
                    CorpusFile(
                        tokenizer=path.name.removesuffix(SUFFIX),
                        texts=len(texts),
                        tokens=sum(len(text) for text in texts),
                        file_bytes=about.st_size,
                        modified_s=about.st_mtime,
                    )
                )
        return sorted(found, key=lambda f: -f.modified_s)

    def size(self) -> int:
        """Bytes on disk."""
        return sum(f.file_bytes for f in self.files())

    def delete(self, tokenizer: str | None = None) -> int:
        """Delete one tokenizer's texts, or all; returns the bytes freed.

        Raises:
            StoreError: a file cannot be deleted.
        """
        freed = 0
        for path in self._paths() if tokenizer is None else [self._file(tokenizer)]:
            try:
                size = path.stat().st_size
                path.unlink()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StoreError(f"cannot delete {path}: {error.strerror or error}") from None
            freed += size
        return freed

    def _file(self, tokenizer: str) -> Path:
        if not tokenizer.isalnum():
            raise StoreError(f"not a tokenizer's name: {tokenizer!r}")
        return self.path / f"{tokenizer}{SUFFIX}"

    def _paths(self) -> Iterator[Path]:
        return iter(sorted(self.path.glob(f"*{SUFFIX}"))) if self.path.is_dir() else iter(())

    def _rewrite(self, path: Path, texts: Sequence[_Words]) -> None:
        """Replace the file by the newest texts that fill three quarters of the bound."""
        records: list[bytes] = []
        size = 0
        for text in reversed(texts):
            record = _pack(text)
            if records and size + len(record) > self._max_bytes * 3 // 4:
                break
            records.append(record)
            size += len(record)
        replace_file(path, b"".join(reversed(records)))


def _pack(tokens: Sequence[int] | _Words) -> bytes:
    body = np.asarray(tokens, "<u4").tobytes()
    return np.array([len(tokens), zlib.crc32(body)], "<u4").tobytes() + body


def _append(path: Path, record: bytes) -> None:
    # conversations are private: only their owner may read them
    handle = os.open(
        path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600
    )
    try:
        os.write(handle, record)
    finally:
        os.close(handle)


def _read(path: Path) -> list[_Words]:
    """The whole records from the start of a file."""
    try:
        words = np.frombuffer((data := path.read_bytes())[: len(data) // 4 * 4], "<u4")
    except OSError:
        return []
    texts: list[_Words] = []
    at = 0
    while at + 2 <= len(words):
        n, checksum = int(words[at]), int(words[at + 1])
        body = words[at + 2 : at + 2 + n]
        if len(body) < n or n == 0 or zlib.crc32(body.tobytes()) != checksum:
            break
        texts.append(body)
        at += 2 + n
    return texts

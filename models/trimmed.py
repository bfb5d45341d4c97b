"""A draft model that knows fewer words: a copy of a file with some rows of its output only.

    specllama quantize DRAFT OUT --draft-tokens 32768

llama.cpp wants as many rows of the output as tokens, so to it the copy is a model without a
tokenizer, whose tokens are these rows. A text may hold any token, so it is read as embeddings:

    specllama.says          the model's token of each row, ascending
    specllama.tokenizer.*   the model's tokenizer; ``gguf`` gives these keys their own names back
    specllama.embedding     the type of the whole embedding matrix, which lies after the tensors

The rows that both files have are computed alike, bit for bit. Copies that are made by themselves:

    <cache>/drafts/<model>/NAME.gguf    <model> names the contents of the whole model's file
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from specllama import paths
from specllama.arrays import IntArray
from specllama.errors import BadGguf, UnsupportedModel
from specllama.models.contents import SHORT
from specllama.models.ggml_types import tensor_bytes
from specllama.models.gguf import OURS, GgufHeader, read_header
from specllama.models.gguf_writer import ALIGNMENT, TYPE_IDS, Value, stored, write_gguf
from specllama.models.loadable import check_loadable
from specllama.models.pairing import unused
from specllama.models.tensors import Bytes
from specllama.models.words import NORMAL, SAYS, cut, is_table, likeliest, rows_of

EMBEDDING = "specllama.embedding"
TABLE = "token_embd.weight"
# whose graphs scale tokens' embeddings by the root of their width, and leave others as they are
SCALED = frozenset({"gemma3", "gemma4"})
_SPECIAL = (3, 4)  # types of control tokens and of those that a user defined
_BYTE = 6
# Of a vocabulary that lists characters behind all words: as many words are kept for each of them
_WORDS_A_CHARACTER = 8


def check_source(header: GgufHeader) -> None:
    """Check that such a copy can be made of a model.

    Raises:
        BadGguf, UnsupportedModel: it cannot, and why.
    """
    check_loadable(header, "draft")
    name, size = header.path.name, header.vocab_size
    if header.rows:
        raise UnsupportedModel(f"{name} knows only {header.rows:,} tokens already")
    if len(header.parts) > 1:
        raise UnsupportedModel(f"{name} is split; only one file is made smaller")
    tables = [t for t in header.tensors if size in t.shape and not t.name.startswith("blk.")]
    other = [t.name for t in tables if not is_table(t, size)]
    if other:
        raise UnsupportedModel(
            f"{name} cannot do without tokens: {other[0]} depends on them in every layer"
        )


def places(header: GgufHeader) -> IntArray:
    """Return the tokens' places for ``words.ranked``.

    Special tokens stay. SentencePiece lists characters, the most frequent ones first, behind all
    words: they take their turns among these.
    """
    types, texts = np.array(header.token_types()), header.token_bytes
    found = np.arange(len(texts), dtype=np.int32)
    if header.tokenizer_model == "llama":
        single = np.array([len(text.decode("utf-8", "replace")) == 1 for text in texts])
        single &= types == NORMAL
        found[single] = _WORDS_A_CHARACTER * np.arange(single.sum())
    found[np.isin(types, _SPECIAL)] = -1
    found[types == _BYTE] = len(texts)
    found[[*unused(header, range(len(texts)))]] = 2 * len(texts)
    return found


def choose(header: GgufHeader, n: int, counts: Mapping[int, int]) -> IntArray:
    """Choose the tokens that a copy knows, ascending; see ``words.likeliest``."""
    return likeliest(header, n, counts, places(header))


def write(
    header: GgufHeader,
    destination: Path,
    says: IntArray,
    written: Callable[[float], object] | None = None,
) -> GgufHeader:
    """Write the copy that guesses these tokens only; its header.

    Args:
        written: see ``write_gguf``.

    Raises:
        BadGguf, UnsupportedModel: see ``check_source``.
        SpecllamaError: it cannot be written.
    """
    check_source(header)
    values: dict[str, Value] = {
        OURS + key if key.startswith("tokenizer.") else key: value
        for key, value in stored(header, "").items()
    }
    values |= {
        header.own("vocab_size"): len(says),
        "tokenizer.ggml.model": "no_vocab",
        SAYS: says,
        EMBEDDING: header.by_name[TABLE].type,
    }
    tensors = cut(header, header.tensors, says)
    write_gguf(destination, values, tensors, written, rows_of(header, header.by_name[TABLE]))
    return read_header(destination)


def read_embedding(header: GgufHeader) -> tuple[Bytes, str]:
    """Map the whole embedding matrix of a copy: [tokens, bytes of a row], and its type.

    Raises:
        BadGguf: it is not there.
    """
    kind, last = header.text(EMBEDDING) or "", header.tensors[-1]
    n, width = header.vocab_size, header.embedding_length
    if kind not in TYPE_IDS:
        raise BadGguf(f"{header.path.name}: {EMBEDDING} is {kind!r}, not a type")
    row = tensor_bytes(TYPE_IDS[kind], width)
    at = header.data_offset + last.offset + last.n_bytes
    at += -at % ALIGNMENT
    if header.file_bytes < at + n * row:
        raise BadGguf(f"{header.path.name}: the embedding is cut short", "make the file again")
    return np.memmap(header.path, np.uint8, "r", at, (n, row)), kind


def work(header: GgufHeader, n: int) -> float:
    """Return the bytes that a step of a copy of ``n`` tokens reads, as a share of the model's."""
    out = header.by_name.get("output.weight") or header.by_name[TABLE]
    return 1 - out.n_bytes * (1 - n / header.vocab_size) / header.step_bytes


# -- those that were made in the cache -------------------------------------------------------------


def folder() -> Path:
    return paths.cache_dir() / "drafts"


def place(header: GgufHeader) -> Path:
    """Return the path of a copy in the cache, of a model whose contents are known."""
    return folder() / header.contents[:SHORT] / header.path.name


def copies() -> list[tuple[Path, int]]:
    """List the copies in the cache and their bytes, newest first."""
    found = [(file, file.stat()) for file in folder().glob("*/*")]
    found.sort(key=lambda one: -one[1].st_mtime)
    return [(file, about.st_size) for file, about in found]


def keep_within(most: int, stays: Path) -> None:
    """Delete the oldest copies, so that ``most`` bytes stay."""
    total = 0
    for file, n_bytes in copies():
        total += n_bytes
        if total > most and file != stays:
            shutil.rmtree(file.parent, ignore_errors=True)

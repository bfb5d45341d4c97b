"""Some of a vocabulary's tokens: which are the likeliest, and rows of logits over these alone.

A step of a small model spends a quarter of its time and more on its output: a row for each token
that it might guess. Heads (``nextn_file``) and draft models (``trimmed``) that have rows of the
likeliest only are cheaper; a token without a row is never guessed. That changes guesses, never what
is emitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from specllama.arrays import IntArray, Rows
from specllama.errors import BadGguf, UsageError
from specllama.models.gguf import GgufHeader
from specllama.models.gguf_format import TensorInfo
from specllama.models.gguf_writer import Blocks, Tensor

SAYS = "specllama.says"  # the token of each row of a file's output, ascending
Cut = dict[str, tuple[Tensor | Blocks, str]]
NORMAL = 1  # type of a token
_TABLES = ("token_embd", "output", "embed_tokens", "shared_head_head")  # a row for each token


class Spread:
    """Rows of logits of some tokens, spread over all of them.

    Args:
        says: the token of each of the rows' places [n], ascending.
        n_vocab: all tokens.
    """

    def __init__(self, says: IntArray, n_vocab: int) -> None:
        self.says, self.n_vocab = says, n_vocab
        self._wide: Rows = np.empty((0, n_vocab), np.float32)

    def __call__(self, rows: Rows) -> Rows:
        """Return logits [n, n_vocab]: -inf for those that are never guessed; good until the next
        call."""
        if len(self._wide) < len(rows):
            self._wide = np.full((len(rows), self.n_vocab), -np.inf, np.float32)
        wide = self._wide[: len(rows)]
        wide[:, self.says] = rows
        return wide


def read_numbers(header: GgufHeader, key: str) -> IntArray:
    """Read a list of whole numbers.

    Raises:
        BadGguf: it is none.
    """
    array = header.arrays.get(key)
    if array is None or array.kind != "i32":
        raise BadGguf(f"{header.path.name}: {key} is not a list of numbers")
    return np.array(header.array(key), np.int32)


def read_says(header: GgufHeader, n_vocab: int, n_rows: int) -> IntArray:
    """Read which tokens a file has rows of.

    Raises:
        BadGguf: it does not say that, or contradicts itself.
    """
    says = read_numbers(header, SAYS)
    sound = 0 < len(says) == n_rows and says.min() >= 0 and says.max() < n_vocab
    if not sound or not (np.diff(says) > 0).all():
        raise BadGguf(
            f"{header.path.name}: {SAYS} and its output do not belong together",
            "make the file again",
        )
    return says


def ranked(places: IntArray, counts: Mapping[int, int]) -> IntArray:
    """Rank all tokens, those to keep first: those at negative places, then the most frequent ones.

    Args:
        places: of each token in a vocabulary's own order, which is about that of how frequent they
            were when it was made; it decides between tokens of one count.
        counts: how often tokens occur in some texts.
    """
    often = np.zeros(len(places), np.int64)
    often[[*counts.keys()]] = [*counts.values()]
    order: IntArray = np.lexsort((places, -often, places >= 0)).astype(np.int32)
    return order


def likeliest(header: GgufHeader, n: int, counts: Mapping[int, int], places: IntArray) -> IntArray:
    """Choose the ``n`` tokens to keep, ascending; see ``ranked``.

    Raises:
        UsageError: so few are not enough, or so many are all.
    """
    stay, size = int((places < 0).sum()), header.vocab_size
    if not stay < n < size:
        raise UsageError(
            f"{header.path.name} has {size:,} tokens, of which {stay:,} have to stay",
            f"give --draft-tokens a number between these: {min(32768, size // 2)}",
        )
    return np.sort(ranked(places, counts)[:n])


def is_table(info: TensorInfo, n_vocab: int) -> bool:
    """True if a tensor has a row for each token."""
    name = info.name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    return name in _TABLES and info.shape[-1] == n_vocab


def rows_of(header: GgufHeader, info: TensorInfo, says: IntArray | None = None) -> Blocks:
    """Return a tensor as it is stored; the rows of these tokens, of a table."""
    at, shape = header.data_offset + info.offset, info.shape[::-1]

    def read() -> bytes:
        data = np.memmap(header.path, np.uint8, "r", at, (info.n_bytes,))
        return (data if says is None else data.reshape(shape[0], -1)[says]).tobytes()

    return Blocks(shape if says is None else (len(says), *shape[1:]), read)


def cut(header: GgufHeader, tensors: Iterable[TensorInfo], says: IntArray) -> Cut:
    """Return tensors as they are stored, of tables the rows of these tokens; with their types."""
    size = header.vocab_size
    return {
        info.name: (rows_of(header, info, says if is_table(info, size) else None), info.type)
        for info in tensors
    }

"""NextN blocks in a file of their own: checks that they run and fit a target; some tokens only.

llama.cpp's converter writes such files with ``--mtp`` (``mtp-….gguf``): the architecture, metadata
and tokenizer of the target, and of its tensors the NextN blocks, the embeddings and the output.

Most of a step of theirs is the output, so a file may hold the likeliest tokens only:

    specllama quantize TARGET mtp-HEAD.gguf --draft-tokens 32768

It then has some rows of the target's embeddings and of its output. To llama.cpp it is a head
without a tokenizer, whose tokens are these rows; two arrays translate:

    specllama.says     the target's token of each row, ascending
    specllama.reads    the row that is read for each token of the target: its own, or that of the
                       longest beginning of its text that has one

A token without a row is never guessed. That changes guesses, never what is emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specllama.arrays import IntArray
from specllama.errors import BadGguf, PairIncompatible, UnsupportedModel
from specllama.models.companions import Head, other_tokens, require_same_target
from specllama.models.gguf import GgufHeader
from specllama.models.gguf_format import TensorInfo
from specllama.models.gguf_writer import Value, stored, write_gguf
from specllama.models.loadable import check_loadable
from specllama.models.memory import TREE_ROWS, ModelMemory, estimate_model
from specllama.models.nextn_blocks import lacks_trunk, trunk_blocks, why_not
from specllama.models.words import NORMAL, SAYS, cut, is_table, read_numbers, read_says

READS = "specllama.reads"
_STATE = ("embedding_length", "hyper_connection.count")  # how wide states are, how many streams


@dataclass(frozen=True, slots=True)
class HeadWords:
    """The tokens of a head that knows only some of its target's.

    Attributes:
        says: the target's token of each row [n], ascending.
        reads: the row for each token of the target.
    """

    says: IntArray
    reads: IntArray


def read_words(head: GgufHeader) -> HeadWords | None:
    """Read the tokens that a head knows; None if it knows all of its target's.

    Raises:
        BadGguf: the arrays contradict themselves.
    """
    if SAYS not in head.kinds and READS not in head.kinds:
        return None
    reads = read_numbers(head, READS)
    says = read_says(head, len(reads), head.vocab_size)
    own = np.arange(len(says))
    sound = reads.min() >= 0 and reads.max() < len(says)
    if not sound or not np.array_equal(reads[says], own):
        raise BadGguf(
            f"{head.path.name}: {SAYS} and {READS} do not belong together", "make the file again"
        )
    return HeadWords(says, reads)


def places(target: GgufHeader) -> IntArray:
    """Return the tokens' places for ``ranked``; a head has to know those that are no words, and
    those of one character, as which all others can be read."""
    found = np.arange(target.vocab_size, dtype=np.int32)
    found[[kind != NORMAL for kind in target.token_types()]] = -1
    texts = target.token_bytes
    found[[i for i, text in enumerate(texts) if len(text.decode("utf-8", "replace")) == 1]] = -1
    return found


def write_head(target: GgufHeader, destination: Path, says: IntArray) -> None:
    """Write the NextN layers of ``target`` as a head that guesses these tokens only.

    Raises:
        BadGguf, UnsupportedModel: there are none that llama.cpp runs, or the file is split.
        SpecllamaError: it cannot be written.
    """
    check_source(target)
    arch, n = target.architecture, len(says)
    values: dict[str, Value] = {**stored(target, "general."), **stored(target, f"{arch}.")}
    values |= {
        "general.name": f"{target.name}, NextN layers, {n} tokens",
        f"{arch}.vocab_size": n,
        "tokenizer.ggml.model": "no_vocab",
        SAYS: says,
        READS: _reads(target.token_bytes, says),
    }
    write_gguf(destination, values, cut(target, _kept(target), says))


def check_source(target: GgufHeader) -> None:
    """Check that such a head can be made of a target.

    Raises:
        BadGguf, UnsupportedModel: it cannot, and why.
    """
    check_loadable(target)
    if why := why_not(target):
        raise UnsupportedModel(f"{target.path.name}: {why}")
    if len(target.parts) > 1:
        raise UnsupportedModel(f"{target.path.name} is split; heads are made of one file only")
    size = target.vocab_size
    other = [t.name for t in _kept(target) if size in t.shape and not is_table(t, size)]
    if other:
        raise UnsupportedModel(f"{target.path.name}: {other[0]} depends on the vocabulary")


def _kept(target: GgufHeader) -> list[TensorInfo]:
    """List the tensors that a head needs: the NextN layers, and those outside every layer."""
    trunk = tuple(f"blk.{i}." for i in range(trunk_blocks(target)))
    return [tensor for tensor in target.tensors if not tensor.name.startswith(trunk)]


def _reads(texts: Sequence[bytes], says: IntArray) -> IntArray:
    """Return the array ``READS``."""
    row_of = {int(token): row for row, token in enumerate(says)}
    by_text = {texts[token]: row for token, row in row_of.items()}

    def row(token: int) -> int:
        text = texts[token]
        found = (by_text.get(text[:n]) for n in range(len(text), 0, -1))
        return row_of.get(token, next((r for r in found if r is not None), 0))

    return np.array([row(token) for token in range(len(texts))], np.int32)


# ---------------------------------------------------------------------- a target and its file


def check_target(head: GgufHeader, target: GgufHeader) -> HeadWords | None:
    """Refuse blocks that could not be run, or that belong to another target; the tokens of one
    that knows only some.

    Raises:
        BadGguf, UnsupportedModel: llama.cpp cannot load them.
        PairIncompatible: with the first difference found.
    """
    check_loadable(head, "head")
    name, of = head.path.name, target.path.name
    if why := why_not(head):
        raise PairIncompatible(f"{name} cannot draft: {why}")
    mine, its = head.architecture, target.architecture
    if mine == its:
        mine, its = (
            " by ".join(str(h.integer(h.own(key))) for key in _STATE if h.integer(h.own(key)))
            for h in (head, target)
        )
    words = read_words(head)
    if mine != its:
        why = f"it is for {mine}, {of} is {its}"
    elif words is None:
        why = other_tokens(head, target)
    elif (n := len(words.reads)) != target.vocab_size:
        why = f"it reads {n:,} tokens, {of} has {target.vocab_size:,}"
    hint = "use the file that was published with this target, or made from it"
    require_same_target(head, why, hint)
    return words


def _memory(head: GgufHeader, target: GgufHeader, n_ctx: int) -> ModelMemory:
    return estimate_model(head, n_ctx=n_ctx, n_outputs=TREE_ROWS)


HEAD = Head(
    check=check_target,
    open="specllama.backend.heads.llama_heads:open_nextn",
    memory=_memory,
    recognise=lambda header, kind: lacks_trunk(header),
)

"""NextN blocks in a file of their own: checks that they run, and that they fit a target.

llama.cpp's converter writes such files with ``--mtp`` (``mtp-….gguf``): the architecture, metadata
and tokenizer of the target, and of its tensors the NextN blocks, the embeddings and the output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specllama.errors import PairIncompatible
from specllama.models.head_tokens import other_tokens
from specllama.models.heads import Head
from specllama.models.loadable import check_loadable
from specllama.models.memory import TREE_ROWS, ModelMemory, estimate_model
from specllama.models.nextn import lacks_trunk, why_not
from specllama.models.nextn_words import HeadWords, read_words

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader

_STATE = ("embedding_length", "hyper_connection.count")  # how wide states are, how many streams


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
    if why:
        raise PairIncompatible(
            f"{name} was made for another target: {why}",
            "use the file that was published with this target, or made from it",
        )
    return words


def _memory(head: GgufHeader, target: GgufHeader, n_ctx: int) -> ModelMemory:
    return estimate_model(head, n_ctx=n_ctx, n_outputs=TREE_ROWS)


def _recognise(header: GgufHeader, kind: str) -> bool:
    return lacks_trunk(header)


HEAD = Head(
    check=check_target,
    open="specllama.backend.heads.nextn:open_nextn",
    memory=_memory,
    recognise=_recognise,
)

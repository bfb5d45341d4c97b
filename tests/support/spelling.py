"""Texts against what constrains a reply, token by token."""

from functools import lru_cache
from typing import Any

import numpy as np

from specllama.backend.base import Vocab
from specllama.backend.llama import LlamaModel
from specllama.errors import UsageError
from specllama.grammar.guide import Guide, Guides
from specllama.grammar.source import Kind, source_of

END = 256
BYTES = [bytes([b]) for b in range(256)]


@lru_cache(4)
def guides(vocab: Vocab) -> Guides:
    every = range(vocab.n_tokens)
    return Guides([vocab.piece(t) for t in every], [t for t in every if vocab.is_eog(t)])


@lru_cache(1)
def over_bytes() -> Guides:
    """A vocabulary of bytes, and ``END``."""
    return Guides([*BYTES, b""], [END])


def guide(kind: Kind, text: str, vocab: Vocab | None = None) -> Guide:
    made = over_bytes() if vocab is None else guides(vocab)
    return made.guide(source_of(kind, text))


def ends(guide: Any, end: int = END) -> bool:
    return bool(guide.allowed(np.array([end], np.int32))[0])


def takes(guide: Guide, text: str) -> bool:
    """Whether it takes the text to its end, byte by byte."""
    guide = guide.fork()
    try:
        for byte in text.encode():
            guide.accept(byte)
    except UsageError:
        return False
    return ends(guide)


def lets_through(model: LlamaModel, guide: Guide, *parts: str) -> bool:
    """Whether it takes the text to its end; every part is tokenized by itself."""
    vocab, guide = model.vocab, guide.fork()
    for part in parts:
        for token in vocab.tokenize(part, add_special=False, parse_special=False):
            if not guide.allowed(np.array([token], np.int32))[0]:
                return False
            guide.accept(token)
    return any(ends(guide, t) for t in range(vocab.n_tokens) if vocab.is_eog(t))

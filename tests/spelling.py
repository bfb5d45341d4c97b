"""Texts against a grammar in a vocabulary, token by token."""

from __future__ import annotations

import numpy as np

from specllama.backend.llama import LlamaModel
from specllama.backend.llama_grammar import LlamaGrammar


def lets_through(model: LlamaModel, grammar: LlamaGrammar, *parts: str) -> bool:
    """Whether the grammar takes the text to its end; every part is tokenized by itself."""
    vocab, grammar = model.vocab, grammar.fork()
    for part in parts:
        for token in vocab.tokenize(part, add_special=False, parse_special=False):
            if not grammar.allowed(np.array([token], np.int32))[0]:
                return False
            grammar.accept(token)
    ends = [t for t in range(vocab.n_tokens) if vocab.is_eog(t)]
    return bool(grammar.allowed(np.array(ends, np.int32)).any())

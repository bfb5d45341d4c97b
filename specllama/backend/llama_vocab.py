"""A model's vocabulary: text to tokens and back, with every id checked before llama.cpp sees it."""

from __future__ import annotations

import ctypes
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import llama_cpp as ll

from specllama.backend.base import Gap, SpecialToken, Verdict, partition
from specllama.errors import CannotLoad, EngineError

# Pre-tokenizers whose regular expression llama.cpp matches with hand-written code; the others go
# through std::regex, which recurses once per character and overflows the stack on long runs.
_SAFE_PRE = {
    "gpt-2", "llama-bpe", "llama3", "llama-v3", "qwen2", "qwen35", "gemma4", "command-r", "smollm",
    "olmo", "chatglm-bpe", "glm4",
}  # fmt: skip
_GUARD = "\x01"
# llama.cpp counts from the start of its list for every special token that it finds in a text
_CROWD = 1000
_LONG_RUN = re.compile(r"\S{1000}|\s{1000}")


class LlamaVocab:
    """Tokens and text. Every id is checked: llama.cpp aborts on one out of range."""

    def __init__(self, model: Any, pre: str, longest: int = 0) -> None:
        self._vocab = ll.llama_model_get_vocab(model)
        self.n_tokens = int(ll.llama_vocab_n_tokens(self._vocab))
        kind = ll.llama_vocab_type(self._vocab)
        self._spm = kind == ll.LLAMA_VOCAB_TYPE_SPM
        byte_pairs = kind == ll.LLAMA_VOCAB_TYPE_BPE
        # the others make one token of any unknown word, or of many spaces
        self.longest = longest if self._spm or byte_pairs else 0
        self._safe_pre = pre in _SAFE_PRE or not byte_pairs
        self.special, self.piece = cache(self._special), cache(self._piece)
        self.is_eog = cache(self._is_eog)

    @property
    def handle(self) -> Any:
        """llama.cpp's vocabulary.

        Raises:
            EngineError: the model was closed.
        """
        if self._vocab is None:
            raise EngineError("the model is closed")
        return self._vocab

    def close(self) -> None:
        """Refuse every call from now on: the model is about to be freed."""
        self._vocab = None

    @property
    def bos_text(self) -> str:
        return self._special_text(int(ll.llama_vocab_bos(self.handle)))

    @property
    def eos_text(self) -> str:
        return self._special_text(int(ll.llama_vocab_eos(self.handle)))

    @property
    def adds_bos(self) -> bool:
        return bool(ll.llama_vocab_get_add_bos(self.handle))

    def _special_text(self, token: int) -> str:
        if not 0 <= token < self.n_tokens:
            return ""
        return self.piece(token, special=True).decode("utf-8", "replace")

    @cached_property
    def specials(self) -> Sequence[SpecialToken]:
        """Every special token, longest text first. Looked up once; some 0.1 s."""
        found = [s for t in range(self.n_tokens) if (s := self.special(t)) is not None]
        return sorted(found, key=lambda s: len(s.text.encode()), reverse=True)

    def _special(self, token: int) -> SpecialToken | None:
        attributes = int(ll.llama_vocab_get_attr(self.handle, token))
        control = attributes & (ll.LLAMA_TOKEN_ATTR_CONTROL | ll.LLAMA_TOKEN_ATTR_UNKNOWN)
        if not control and not attributes & ll.LLAMA_TOKEN_ATTR_USER_DEFINED:
            return None
        text = ll.llama_vocab_get_text(self.handle, token).decode("utf-8", "replace")
        if not text:
            return None
        return SpecialToken(
            token,
            text,
            bool(control),
            bool(attributes & ll.LLAMA_TOKEN_ATTR_LSTRIP),
            bool(attributes & ll.LLAMA_TOKEN_ATTR_RSTRIP),
        )

    def tokenize(
        self, text: str, *, add_special: bool, parse_special: bool, after_text: bool = False
    ) -> list[int]:
        """Return the token ids of a text.

        Raises:
            EngineError: the vocabulary cannot express the text.
        """
        if after_text and self._spm:
            # a fresh text would start with a space; nothing merges with a control character
            guard = self._tokenize(_GUARD, False, False)
            ids = self._tokenize(_GUARD + text, False, False)
            if ids[: len(guard)] == guard:
                return ids[len(guard) :]
        if (self._safe_pre or not _LONG_RUN.search(text)) and not self._is_crowded(text):
            return self._tokenize(text, add_special, parse_special)
        ids = self._tokenize("", add_special, False)
        begin = int(self.adds_bos and add_special)

        def judge(special: SpecialToken, start: int, end: int) -> Verdict:
            return "token" if parse_special or not special.control else "text"

        out = ids[:begin]
        for piece in partition(text, self.specials, judge):
            if isinstance(piece, int):
                out.append(piece)
            elif self._safe_pre:
                out += self._tokenize(piece, False, False)
            else:
                for part in _split_long_runs(piece):
                    out += self._tokenize(part, False, False)
        return out + ids[begin:]

    def _is_crowded(self, text: str) -> bool:
        """True if a text has more special tokens than llama.cpp handles quickly."""
        if len(text) < _CROWD:
            return False
        return sum(text.count(special.text) for special in self.specials) >= _CROWD

    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode("utf-8", "replace")
        capacity = len(data) + 8
        while True:
            buffer = (ll.llama_token * capacity)()
            n = ll.llama_tokenize(
                self.handle, data, len(data), buffer, capacity, add_special, parse_special
            )
            if n >= 0:
                break
            if n == -(2**31) or -n <= capacity:
                raise EngineError("the text could not be tokenized (too long)")
            capacity = -n
        ids = list(buffer[:n])
        if n and not 0 <= min(ids) <= max(ids) < self.n_tokens:
            raise EngineError("the model's vocabulary cannot express this text")
        return ids

    def _piece(self, token: int, *, special: bool = False) -> bytes:
        if not 0 <= token < self.n_tokens:
            raise EngineError(f"token {token} is outside the vocabulary of {self.n_tokens}")
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = ll.llama_token_to_piece(self.handle, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def _is_eog(self, token: int) -> bool:
        gap = self.gap  # a text that fills one holds no mark of another
        marked = gap is not None and token in (gap.before, gap.after, gap.gap)
        return marked or bool(ll.llama_vocab_is_eog(self.handle, token))

    @property
    def gap(self) -> Gap | None:
        marks = (getattr(ll, f"llama_vocab_fim_{name}") for name in ("pre", "suf", "mid", "sep"))
        before, after, gap, file = (int(mark(self.handle)) for mark in marks)
        if min(before, after, gap) < 0:
            return None
        return Gap(before, after, gap, None if file < 0 else file)


def _split_long_runs(text: str) -> list[str]:
    """Cut runs of 1000 or more non-spaces (or spaces), which would overflow std::regex."""
    parts: list[str] = []
    start = 0
    for match in _LONG_RUN.finditer(text):
        parts.append(text[start : match.end()])
        start = match.end()
    if start < len(text) or not parts:
        parts.append(text[start:])
    return parts


def count_tokens(path: Path, pre: str, texts: Iterable[str]) -> Counter[int]:
    """Count the tokens of a model in some texts; only its vocabulary is loaded.

    Raises:
        CannotLoad: llama.cpp refuses the file.
    """
    from specllama.backend.llama_log import last_words, start

    start()
    params = ll.llama_model_default_params()
    params.vocab_only = True
    model = ll.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise CannotLoad(f"cannot load {path.name}: {last_words() or 'llama.cpp gave no reason'}")
    try:
        vocab, found = LlamaVocab(model, pre), Counter[int]()
        for text in texts:
            found.update(vocab.tokenize(text, add_special=False, parse_special=False))
    finally:
        ll.llama_model_free(model)
    return found

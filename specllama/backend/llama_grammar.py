"""llama.cpp's grammar sampler as a constraint on the next token."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import tempfile
import threading
from collections.abc import Iterator

import llama_cpp as ll
import numpy as np
import numpy.typing as npt

from specllama.arrays import IntArray
from specllama.backend.llama_log import last_words, recent, start
from specllama.backend.llama_vocab import LlamaVocab
from specllama.errors import EngineError, UsageError

# llama.cpp parses by recursion: from some 10000 levels on the stack overflows
_MAX_NESTING = 1000
_ENDS = {'"': '"', "[": "]", "#": "\n"}
_MAX_BYTES = 1 << 18  # of a grammar: parsing stops all conversations


def _nesting(gbnf: str) -> int:
    """Depth of parentheses outside literals, character classes and comments."""
    depth = deepest = 0
    end = ""  # of the literal, the class or the comment
    escaped = False
    for c in gbnf:
        if escaped:
            escaped = False
        elif end:
            escaped = c == "\\" and end != "\n"
            end = "" if c == end else end
        elif c in _ENDS:
            end = _ENDS[c]
        elif c == "(":
            depth += 1
            deepest = max(deepest, depth)
        elif c == ")":
            depth -= 1
    return deepest


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else line[:199] + "…"


_stderr_lock = threading.Lock()


@contextlib.contextmanager
def _captured_stderr() -> Iterator[list[str]]:
    """What native code prints to file descriptor 2, returned at the end, not on the terminal.

    llama.cpp's grammar parser prints its reason there and nowhere else. Only for calls of a few
    milliseconds: other threads' output is caught as well.
    """
    printed: list[str] = []
    with _stderr_lock, tempfile.TemporaryFile() as file:
        try:
            terminal = os.dup(2)
        except OSError:  # no stderr: nothing to keep clean
            yield printed
            return
        os.dup2(file.fileno(), 2)
        try:
            yield printed
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
            file.seek(0)
            printed.append(file.read().decode("utf-8", "replace"))


_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class LlamaGrammar:
    """llama.cpp's grammar sampler as a ``Constraint``: GBNF over tokens, forkable.

    Raises:
        UsageError: the grammar does not parse.
    """

    def __init__(self, vocab: LlamaVocab, gbnf: str, root: str = "root") -> None:
        start()
        recent.clear()
        self._vocab = vocab
        self._sampler = None
        hint = "GBNF is described in llama.cpp's grammars/README.md"
        if not gbnf.strip():
            raise UsageError("the grammar is empty", hint)
        if "\0" in gbnf:
            raise UsageError("the grammar contains a NUL character", hint)
        if len(gbnf) > _MAX_BYTES:
            raise UsageError(f"the grammar has more than {_MAX_BYTES >> 10} Ki characters", hint)
        if _nesting(gbnf) > _MAX_NESTING:
            raise UsageError(f"the grammar nests more than {_MAX_NESTING} parentheses", hint)
        with _captured_stderr() as printed:
            self._sampler = ll.llama_sampler_init_grammar(
                vocab.handle, gbnf.encode("utf-8", "replace"), root.encode()
            )
        if not self._sampler:
            said = re.search(r"error parsing grammar: (.*)", "".join(printed))
            reason = _shorten(said.group(1) if said else last_words()) or "no root rule"
            if reason.endswith(" at"):
                reason += " the end"
            raise UsageError(f"the grammar does not parse: {reason}", hint)

    @classmethod
    def from_json_schema(cls, vocab: LlamaVocab, schema: str) -> LlamaGrammar:
        """A grammar for JSON text that satisfies a JSON schema.

        Raises:
            UsageError: it is no schema, or it asks for what a grammar cannot enforce.
        """
        from specllama.grammar.convert import schema_to_gbnf

        return cls(vocab, schema_to_gbnf(schema))

    def allowed(self, ids: IntArray) -> npt.NDArray[np.bool_]:
        # llama.cpp throws across the C boundary on an id out of range, and reads a freed vocabulary
        self._vocab.handle  # noqa: B018
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab.n_tokens:
            raise EngineError(f"a token is outside the vocabulary of {self._vocab.n_tokens}")
        data = np.zeros(len(ids), _TOKEN_DATA)
        data["id"] = ids
        array = ll.llama_token_data_array(
            data=data.ctypes.data_as(ll.llama_token_data_p),
            size=len(ids),
            selected=-1,
            sorted=False,
        )
        ll.llama_sampler_apply(self._sampler, ctypes.byref(array))
        keep: npt.NDArray[np.bool_] = np.isfinite(data["logit"])
        return keep

    def accept(self, token: int) -> None:
        # llama.cpp throws across the C boundary on a token the grammar forbids
        if not self.allowed(np.array([token], np.int32))[0]:
            raise EngineError(f"token {token} does not fit the grammar here")
        ll.llama_sampler_accept(self._sampler, token)

    def fork(self) -> LlamaGrammar:
        other = LlamaGrammar.__new__(LlamaGrammar)
        other._vocab = self._vocab
        other._sampler = ll.llama_sampler_clone(self._sampler)
        return other

    def __del__(self) -> None:
        sampler = getattr(self, "_sampler", None)
        if sampler:
            ll.llama_sampler_free(sampler)
            self._sampler = None

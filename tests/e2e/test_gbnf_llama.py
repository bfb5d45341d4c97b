"""GBNF grammars as llama.cpp reads them: the same tokens are allowed, at every step of a text."""

from __future__ import annotations

import codecs
import ctypes
import random

import llama_cpp as ll
import numpy as np
import numpy.typing as npt
import pytest
from spelling import guide

from specllama.backend.llama_vocab import LlamaVocab
from specllama.engine.engine import Engine

pytestmark = pytest.mark.e2e

_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
SUMS = r"""
root  ::= (sum "=" [0-9]+ "\n")+
sum   ::= term ([-+*/] term)*
term  ::= name | [0-9]+ | "(" sum ")" ws
name  ::= [a-z] [a-z0-9_]* ws
ws    ::= [ \t\n]*
"""
PROGRAM = r"""
root      ::= statement*
statement ::= (word " " word ws "=" ws value ";" ws | "if" ws "(" value ")" ws body
            | "/" "/" [^\n]* "\n" | "return" ws value ";" ws)
body      ::= "{" ws statement* "}" ws
value     ::= word ws ("(" (value ("," ws value)*)? ")" ws)? | [0-9]+ ws | value2
value2    ::= "\"" [^"]* "\"" ws
word      ::= [a-zA-Z_] [a-zA-Z_0-9]*
ws        ::= ([ \t\n]+)?
"""
LISTED = r"""
root ::= item+
# anything but line breaks
item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"
"""
SCRIPTS = r"""
root ::= (kana | kanji | "ー" | [äöüß] | emoji){1,40} [^a-z]{2,} .
kana ::= [ぁ-ゟ] | [ァ-ヿ]
kanji ::= [一-龠]
emoji ::= [\U0001F300-\U0001F9FF] | "é"
"""
GAME = r"""
root ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move ::= (pawn | [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8] | "O-O" "-O"?) [+#]?
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
"""
ENGLISH = (
    'root ::= (word (", " | " "))* word [.!?]\nword ::= [A-Za-z\']+ | "the" | "a" | "an" | "model"'
)
GRAMMARS = (JSON, SUMS, PROGRAM, LISTED, SCRIPTS, GAME, ENGLISH)
NAMES = ("json", "sums", "program", "list", "scripts", "game", "english")
STEPS = 40


class Sampler:
    """llama.cpp's own sampler for a grammar."""

    def __init__(self, vocab: LlamaVocab, gbnf: str) -> None:
        self._n = vocab.n_tokens
        self._sampler = ll.llama_sampler_init_grammar(vocab.handle, gbnf.encode(), b"root")
        assert self._sampler

    def mask(self) -> npt.NDArray[np.bool_]:
        data = np.zeros(self._n, _DATA)
        data["id"] = np.arange(self._n)
        array = ll.llama_token_data_array(
            data=data.ctypes.data_as(ll.llama_token_data_p), size=self._n, selected=-1, sorted=False
        )
        ll.llama_sampler_apply(self._sampler, ctypes.byref(array))
        allowed: npt.NDArray[np.bool_] = np.isfinite(data["logit"])
        return allowed

    def accept(self, token: int) -> None:
        ll.llama_sampler_accept(self._sampler, token)

    def __del__(self) -> None:
        ll.llama_sampler_free(self._sampler)


def never_text(data: bytes) -> bool:
    """Whether no text begins so."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return True
    return False


def within_a_character(data: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    decoder.decode(data)
    return bool(decoder.getstate()[0])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gbnf", GRAMMARS, ids=NAMES)
def test_the_same_tokens_are_allowed(tiny: Engine, gbnf: str, seed: int) -> None:
    vocab, rng = tiny.vocab, random.Random(seed)
    assert isinstance(vocab, LlamaVocab)
    ours, theirs = guide("grammar", gbnf, vocab), Sampler(vocab, gbnf)
    every = np.arange(vocab.n_tokens, dtype=np.int32)
    # llama.cpp looks at the names of control tokens as if they were text
    plain = np.array([bool(vocab.piece(t)) or vocab.is_eog(t) for t in every.tolist()])
    written = b""
    for _ in range(STEPS):
        mine, its = ours.allowed(every) & plain, theirs.mask() & plain
        for token in np.flatnonzero(mine != its).tolist():
            text = written + vocab.piece(token)
            # it takes bytes that are never text for characters, and refuses the first bytes of
            # characters that a class does not name where one that it names begins so, too
            assert never_text(text) if its[token] else within_a_character(text), text
        fits = [t for t in np.flatnonzero(mine).tolist() if not vocab.is_eog(t)]
        if not fits:
            break
        longest = max(fits, key=lambda t: len(vocab.piece(t)))
        token = rng.choice([*rng.choices(fits, k=3), longest])
        ours.accept(token)
        theirs.accept(token)
        written += vocab.piece(token)

"""JSON schemas that refer to themselves: what the grammar lets through is what the schema says."""

import codecs
import ctypes
import json
import random
from typing import Any

import llama_cpp as ll
import numpy as np
import numpy.typing as npt
import pytest
from spelling import guide, lets_through

from specllama.backend.llama import LlamaModel
from specllama.backend.llama_vocab import LlamaVocab
from specllama.engine.engine import Engine
from specllama.settings.params import GenerateParams, SamplingParams

TREE = {
    "type": "object",
    "properties": {
        "name": {"enum": ["a", "b"]},
        "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    },
    "required": ["name", "children"],
    "additionalProperties": False,
}
CHAIN = {
    "$ref": "#/$defs/link",
    "$defs": {
        "link": {
            "type": "object",
            "properties": {
                "n": {"enum": [0, 1]},
                "next": {"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]},
            },
            "required": ["n", "next"],
            "additionalProperties": False,
        }
    },
}
# a sum holds products, a product holds sums; the names need escapes
SUMS = {
    "$ref": "#/$defs/a~1sum",
    "$defs": {
        "a/sum": {
            "anyOf": [
                {"enum": [1, 2]},
                {
                    "type": "object",
                    "properties": {"add": {"type": "array", "items": {"$ref": "#/$defs/p%20~0"}}},
                    "required": ["add"],
                    "additionalProperties": False,
                },
            ]
        },
        "p ~": {
            "type": "object",
            "properties": {"times": {"type": "array", "items": {"$ref": "#/$defs/a~1sum"}}},
            "required": ["times"],
            "additionalProperties": False,
        },
    },
}


def tree(rng: random.Random, depth: int) -> Any:
    n = rng.randint(0, 2) if depth else 0
    return {"name": rng.choice("ab"), "children": [tree(rng, depth - 1) for _ in range(n)]}


def chain(rng: random.Random, depth: int) -> Any:
    ends = not depth or rng.random() < 0.2
    return {"n": rng.randint(0, 1), "next": None if ends else chain(rng, depth - 1)}


def sums(rng: random.Random, depth: int) -> Any:
    if not depth or rng.random() < 0.3:
        return rng.randint(1, 2)
    n = rng.randint(0, 2)
    return {"add": [{"times": [sums(rng, depth - 1) for _ in range(n)]} for _ in range(n)]}


def is_tree(v: Any) -> bool:
    return (
        isinstance(v, dict)
        and set(v) == {"name", "children"}
        and v["name"] in ("a", "b")
        and isinstance(v["children"], list)
        and len(v["children"]) <= 2
        and all(map(is_tree, v["children"]))
    )


def is_chain(v: Any) -> bool:
    return (
        isinstance(v, dict)
        and set(v) == {"n", "next"}
        and v["n"] in (0, 1)
        and v["n"] is not True
        and (v["next"] is None or is_chain(v["next"]))
    )


def is_sum(v: Any) -> bool:
    if type(v) is int:
        return v in (1, 2)
    if not isinstance(v, dict) or set(v) != {"add"} or not isinstance(v["add"], list):
        return False
    return all(
        isinstance(p, dict)
        and set(p) == {"times"}
        and isinstance(p["times"], list)
        and all(map(is_sum, p["times"]))
        for p in v["add"]
    )


CASES = [
    pytest.param(TREE, tree, is_tree, id="itself"),
    pytest.param(CHAIN, chain, is_chain, id="by name"),
    pytest.param(SUMS, sums, is_sum, id="each other"),
]


def broken(value: Any, rng: random.Random) -> Any:
    """The same document with one inner place replaced by something else."""
    copy = json.loads(json.dumps(value))
    place: Any = copy
    while True:
        key = rng.choice(list(place) if isinstance(place, dict) else list(range(len(place))))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
            place[key] = rng.choice(["x", True, {"y": 1}, [None]])
            return copy
        place = inner


@pytest.mark.parametrize(("schema", "make", "check"), CASES)
def test_generated_documents_pass_and_damaged_ones_do_not(
    llama: LlamaModel, schema: Any, make: Any, check: Any
) -> None:
    grammar = guide("schema", json.dumps(schema), llama.vocab)
    rng = random.Random(1)
    refused = 0
    for _ in range(60):
        value = make(rng, rng.randint(0, 5))
        assert check(value)
        assert lets_through(llama, grammar, json.dumps(value)), value
        if isinstance(value, dict):
            other = broken(value, rng)
            assert lets_through(llama, grammar, json.dumps(other)) is check(other), other
            refused += not check(other)
    assert refused > 20


def test_references_of_one_name_in_two_places_and_odd_names(llama: LlamaModel) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/one/x"},
            "ref-x": {"$ref": "#/$defs/two/x"},
            "": {"$ref": "#/$defs/string"},
            "$ref": {"type": "null"},
        },
        "required": ["a", "ref-x", "", "$ref"],
        "$defs": {
            "one": {"x": {"type": "integer"}},
            "two": {"x": {"type": "boolean"}},
            "string": {"enum": ["only"]},
        },
    }
    grammar = guide("schema", json.dumps(schema), llama.vocab)
    good = {"a": 3, "ref-x": True, "": "only", "$ref": None}
    assert lets_through(llama, grammar, json.dumps(good))
    for key, value in (("a", True), ("ref-x", 3), ("", "other"), ("$ref", 1)):
        assert not lets_through(llama, grammar, json.dumps({**good, key: value}))


# -- JSON schemas over the tokens of a model --


CARD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 30},
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        "age": {"type": "integer", "minimum": 18, "maximum": 120},
        "score": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
        "when": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["fast", "small"]}, "maxItems": 3},
        "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 40}]},
    },
    "required": ["name", "id", "age", "score", "when", "tags", "note"],
    "additionalProperties": False,
}


def test_the_bundled_target_writes_what_the_schema_says(tiny: Engine) -> None:
    params = GenerateParams(
        sampling=SamplingParams(temperature=1.0),
        max_tokens=400,
        json_schema=json.dumps(CARD),
        proposer="mixed",
        window="fixed",
    )
    for seed in range(16):
        *_, last = tiny.generate("A person, as JSON: ", params.replace(seed=seed))
        assert last.reason == "stop_token", last.text
        card = json.loads(last.text)
        assert list(card) == CARD["required"]
        assert 3 <= len(card["name"]) <= 30
        assert card["id"][:2].isupper()
        assert card["id"][2] == "-"
        assert card["id"][3:].isdecimal()
        assert type(card["age"]) is int
        assert 18 <= card["age"] <= 120
        assert 0 <= card["score"] < 1
        year, month, day = map(int, card["when"].split("-"))
        assert year >= 0
        assert 1 <= month <= 12
        assert 1 <= day <= 31
        assert len(card["tags"]) <= 3
        assert set(card["tags"]) <= {"fast", "small"}
        assert card["note"] is None or len(card["note"]) <= 40


# -- GBNF grammars as llama.cpp reads them --


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
GBNF_SUMS = r"""
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
GRAMMARS = (JSON, GBNF_SUMS, PROGRAM, LISTED, SCRIPTS, GAME, ENGLISH)
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

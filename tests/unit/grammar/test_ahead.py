"""What a grammar leaves no choice about is told, spelled as the vocabulary does, and nothing
depends on who asks."""

import json
import random
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from specllama.errors import UsageError
from specllama.grammar.guide import END, Guide, Guides
from specllama.grammar.json_layout import Habits, JsonLayout
from specllama.grammar.source import Kind, source_of

WORDS = [b'{"', b'":', b' "', b'",', b"name", b"na", b"me", b'"}', b"\n  ", b" [", b"true", b"}"]
PIECES = [*(bytes([b]) for b in range(256)), *WORDS, b""]
OVER = len(PIECES) - 1
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["cat", "cow"]},
        "at": {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "kind", "at"],
    "additionalProperties": False,
}


def cut(text: str) -> list[int]:
    """The longest piece first."""
    data, found = text.encode(), []
    while data:
        word = max((w for w in PIECES if w and data.startswith(w)), key=len)
        found.append(PIECES.index(word))
        data = data[len(word) :]
    return found


@lru_cache(1)
def vocabulary() -> Guides:
    return Guides(PIECES, [OVER], cut)


def guide(kind: Kind, text: Any, written: str = "") -> Guide:
    it = vocabulary().guide(source_of(kind, text if isinstance(text, str) else json.dumps(text)))
    for token in cut(written):
        it.accept(token)
    return it


def said(it: Guide, habits: Habits | None = None, most: int = 40) -> list[str]:
    told = it.ahead(most, {} if habits is None else habits)
    return ["END" if t == END else PIECES[t].decode() for t, _ in told]


@pytest.mark.parametrize(
    ("kind", "text", "written", "ahead"),
    [
        ("grammar", 'root ::= "yes" | "no"', "", []),
        ("grammar", 'root ::= "yes" | "no"', "y", ["e", "s", "END"]),
        ("regex", "(red|green) (lamp|light)", "red", [" ", "l"]),
        ("schema", {"enum": ["name", "nay"]}, '"', ["na"]),
        ("schema", {"const": True}, "", ["true", "END"]),
        ("schema", {"type": "string"}, '"ab', []),
        ("schema", {"type": "integer"}, "12", []),
        ("schema", {"type": "array", "items": {"type": "integer"}, "minItems": 2}, "[12", []),
        ("schema", PERSON, "", ["{"]),
        ("schema", PERSON, '{"', ["name", '":', ' "']),
        ("schema", PERSON, '{"name": "x', []),
        ("schema", PERSON, '{"name": "x"', [",", ' "', *"kind", '":', ' "', "c"]),
        ("schema", PERSON, '{"name": "x", "kind": "ca', ["t", '",', ' "', "a", "t", '":', " ", '{"',
                                                         "x", '":', " "]),
        ("schema", PERSON, '{"name": "x", "kind": "cat", "at": {"x": 1}', ["}", "END"]),
        ("schema", PERSON, '{\n  "name": "x",', ["\n  ", '"', *"kind", '":', ' "', "c"]),
        ("schema", PERSON, '{\n  "name": "x",\n  "kind": "cat",\n  "at": {\n    "x": 1\n  }',
         ["\n", "}", "END"]),
    ],
)  # fmt: skip
def test_what_follows_where_there_is_no_choice(
    kind: Kind, text: Any, written: str, ahead: list[str]
) -> None:
    assert said(guide(kind, text, written)) == ahead


def test_no_more_is_told_than_was_asked_for() -> None:
    assert said(guide("schema", PERSON, '{"'), most=2) == ["name", '":']


def test_without_a_tokenizer_nothing_is_told() -> None:
    assert Guides(PIECES, [OVER]).guide(source_of("regex", "abc")).ahead(8, {}) == []


def test_only_the_end_of_what_is_known_and_white_space_are_in_doubt() -> None:
    told = guide("schema", PERSON, '{"').ahead(8, {})
    sure = [likely == 1.0 for _, likely in told]
    assert [PIECES[t].decode() for t, _ in told] == ["name", '":', ' "']
    assert sure == [True, False, False]
    assert told[2][1] < told[1][1]


def test_a_layout_is_kept_from_text_to_text() -> None:
    habits: Habits = {}
    begun = '{"name": "x",'
    assert said(guide("schema", PERSON, begun), {})[:1] == [' "']
    for _ in range(3):
        guide("schema", PERSON, '{\n  "name" : "x",\n  "kind" : "cat"').ahead(1, habits)
    assert said(guide("schema", PERSON, "{"), habits)[:3] == ["\n  ", '"', "name"]
    assert " " in said(guide("schema", PERSON, '{\n  "name"'), habits)[:1]
    assert said(guide("schema", PERSON, begun), habits)[:1] == [' "'], "this text has its own"


def test_asking_changes_nothing_and_all_that_is_told_fits() -> None:
    rng, every = random.Random(3), np.arange(len(PIECES), dtype=np.int32)
    shapes: list[tuple[Kind, Any]] = [
        ("schema", PERSON),
        ("schema", {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 2}),
        ("grammar", 'root ::= ("name" | "namea") [ \\n]* "}" root?'),
        ("regex", "a{2,5}(name)+true"),
    ]
    told = 0
    for kind, text in shapes * 4:
        asked, silent, habits = guide(kind, text), guide(kind, text), {}
        for _ in range(40):
            ahead = asked.ahead(rng.randint(1, 9), habits)
            drafted = asked.fork()
            for token, _ in ahead:
                drafted.accept(OVER if token == END else token)
                told += 1
            whole = silent.allowed(every)
            assert np.array_equal(asked.allowed(every), whole)
            fits = np.flatnonzero(whole[:-1]).tolist()
            if not fits:
                break
            likely = [token for token, _ in ahead[:1] if token != END]
            token = (likely or [rng.choice(fits)])[0] if rng.random() < 0.8 else rng.choice(fits)
            asked.accept(token)
            silent.accept(token)
    assert told > 300


def test_a_limit_that_asking_runs_into_does_not_end_the_reply() -> None:
    it = guide("grammar", 'root ::= r\nr ::= [a-z] r | [a-z] | "-"')
    it.accept(ord("a"))
    drafted = it.fork()

    def go_on() -> None:
        for _ in range(2000):
            drafted.accept(ord("b"))

    with pytest.raises(UsageError, match="too much work"):
        go_on()
    assert drafted.ahead(8, {}) == it.ahead(8, {}) == []
    it.accept(ord("b"))


@pytest.mark.parametrize("style", [{"indent": 2}, {"indent": 4}, {}, {"separators": (",", ":")}])
def test_the_layout_of_json_is_found_out(style: Any) -> None:
    """Where a text of this style was read before, all of its white space is guessed."""
    value = {"a": [1, 2], "b": {"c": "x: [y, {", "d": [{"e": True}, {"e": None}]}, "f": 1.5}
    text = json.dumps(value, **style).encode()
    habits: Habits = {}
    JsonLayout().read(text, habits)
    layout, at, right = JsonLayout(), 0, 0
    quoted = False
    while at < len(text):
        end = at
        while text[end] in b" \n":
            end += 1
        guess = layout.guess(text[end], habits)
        assert (
            quoted
            or at == 0
            or guess is None
            or text[at - 1 : at].isalnum()
            or (guess[0] == text[at:end])
        ), text[:end]
        right += guess is not None
        layout.read(text[at : end + 1])
        quoted ^= text[end] == 0x22
        at = end + 1
    assert right > 20

"""GBNF grammars: exactly the texts that they describe, whatever is ambiguous in them."""

import random
import sys

import numpy as np
import pytest
from spelling import BYTES, END, guide, takes

from specllama.errors import UsageError
from specllama.grammar.gbnf import lark_of
from specllama.grammar.guide import Guide, Guides, require
from specllama.grammar.source import Kind, source_of


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('root ::= [a-z]+ "b"', ["ab", "abb", "bb"], ["a", "b", "ba"]),
        ('root ::= w "b" x\nw ::= [a-z]+\nx ::= "(" x ")" | "c"', ["aab(c)", "bbbc"], ["b(c)"]),
        ('root ::= ("a" | "ab") ("c" | "bcd") y\ny ::= "(" y ")" | ""', ["ac", "abcd()"], ["abd"]),
        ('root ::= i " " | "if(" i ")"\ni ::= [a-z]+', ["if ", "if(if)"], ["if"]),
        ('root ::= e root "a" | "b"\ne ::= "x"?', ["b", "xba", "xxbaa", "baa"], ["xb", "a"]),
        ('root ::= root "a" | "b"', ["b", "baa"], ["a", ""]),
        ('root ::= ("a"*)* "b"', ["b", "aab"], ["a"]),
        ('root ::= "\\u0022" [\\u00e4-\\u00ff]+ "\\U0001F600" "\\x41" "\\t\\\\\\]"',
         ['"äö😀A\t\\]'], ['"ä']),
        ('root ::= [^\\x00-\\x1f"] . [a\\]^-]', ["äö-", "😀\n]", "aa^", "aaa"], ['"aa', "aab"]),
        ("root ::= # why\n  \"a\" # because\n\nx ::= \"c\"\n", ["a"], ["c"]),
        ('root ::= (\n "a"\n |\n "b" )\r\n', ["a", "b"], ["c"]),
        ('root ::= "a" |\n "b"\n', ["a", "b"], ["c"]),
        ('root ::= "ab"{2} "" | ""', ["abab", ""], ["ab", "abb"]),
        ('root ::= "a" x-1 | x_2\nx-1 ::= "b"{ 2 , }\nx_2 ::= "c"{0}', ["abb", "abbb", ""], ["ab"]),
        ('root ::= "a"\nroot ::= "b"', ["b"], ["a"]),
    ],
)  # fmt: skip
def test_what_grammars_say(text: str, good: list[str], bad: list[str]) -> None:
    g = guide("grammar", text)
    for one in good:
        assert takes(g, one), one
    for one in bad:
        assert not takes(g, one), one


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("root ::= (((", "expecting ) at the end"),
        ('foo ::= "a"', "no rule root"),
        ("root ::= missing", "the rule missing is not defined at 'missing' in line 1"),
        ('root ::= "a"\n"b"', "expecting a name at '\"b\"' in line 2"),
        ("root ::= [a-z]{1000000}", "more than 2000 repetitions"),
        ("root ::= [a]{3,2}", "ends before it begins"),
        ("root ::= * [a]", "expecting an item before *"),
        ('root ::= ""* "a"', "expecting an item before *"),
        ('root ::= "\\q"', "unknown escape \\q"),
        ('root ::= "\\u00"', "expecting 4 hexadecimal digits"),
        ('root ::= "a', "unexpected end"),
        ('root ::= "a" ' + "[" * 16_000, "unexpected end"),
        ("root ::= []", "no character is in the class"),
        ("root ::= <[5]>", "tokens are not taken"),
        ("hello there", "expecting ::="),
        (" \n", "empty"),
        ('root ::= "\0"', "NUL"),
        ("root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000, "more than 20000 symbols"),
        ("[" * 10**6, "more than 256 Ki characters"),
    ],
    ids=lambda v: v[:30],
)
def test_broken_grammars_say_why(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        require("grammar", text)
    assert says in caught.value.message
    assert len(caught.value.message) < 200
    assert "\n" not in caught.value.message


def test_nothing_nests() -> None:
    """A stack of parentheses or of rules is as long as memory allows, compiled or not."""
    deep = "root ::= " + "(" * 4000 + '"a"' + ")" * 4000
    assert "(" not in lark_of(deep)
    assert takes(guide("grammar", deep), "a")
    chain = "\n".join(
        ["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(9000)), 'r9000 ::= "a"']
    )
    assert takes(guide("grammar", chain), "a")


# -- guides


def test_without_llguidance_constraints_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match="llguidance, which is not installed"):
        Guides(BYTES, [])


def mask(g: Guide) -> list[int]:
    return np.flatnonzero(g.allowed(np.arange(END + 1, dtype=np.int32))).tolist()


def test_forks_stand_where_they_stand() -> None:
    """However they are asked in turn, and however far apart they are."""
    rng = random.Random(1)
    text = 'root ::= "[" (root ("," root)*)? "]" | [a-c]{1,4}'
    forks = [("", guide("grammar", text))]
    for _ in range(300):
        written, g = rng.choice(forks)
        fresh = guide("grammar", text)
        for byte in written.encode():
            fresh.accept(byte)
        assert mask(g) == mask(fresh)
        allowed = [t for t in mask(g) if t != END]
        if allowed:
            fork, byte = g.fork(), rng.choice(allowed)
            fork.accept(byte)
            forks.append((written + chr(byte), fork))


LISTS = '{"$ref": "#/$defs/x", "$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/x"}}}}'


def test_a_draft_that_misled_a_matcher() -> None:
    """Taking back what these tokens were, llguidance 1.9.1 took a comma for allowed at the end."""
    pieces = [b"[", b" [", b"\n ", b"\n   ", b"]", b" ]", b"],", b",", b""]
    made, every = Guides(pieces, [8]), np.arange(9, dtype=np.int32)

    def at(text: str) -> Guide:
        g = root.fork()
        for digit in text:
            g.accept(int(digit))
        return g

    root = made.guide(source_of("schema", LISTS))
    for text in ("0120202", "0135", "0136", "0134", "01352", "01362", "01352"):
        at(text).allowed(every[:0])
    at("0142").allowed(every)
    at("01020202").allowed(every[:0])
    here = at("0102").allowed(every).tolist()
    root = made.guide(source_of("schema", LISTS))
    assert here == at("0102").allowed(every).tolist()


@pytest.mark.parametrize("kind", ["schema", "grammar"])
def test_what_was_drafted_and_refused_leaves_nothing_behind(kind: Kind) -> None:
    """Rounds of trees of guesses, each asked about now and then: as if none had been made."""
    pieces = [*BYTES, b" [", b"\n ", b"],", b" ]", b"\n   ", b" ],", b"[[", b"]]", b""]
    made = Guides(pieces, [len(pieces) - 1])
    grammar = 'root ::= "[" w (root w ("," w root w)*)? "]"\nw ::= (" " | "\\n" [ \\t]{0,20})?'
    source = source_of(kind, LISTS if kind == "schema" else grammar)
    every = np.arange(len(pieces), dtype=np.int32)
    for seed in range(2):
        rng = random.Random(seed)
        text: list[int] = []
        here = made.guide(source)
        for _ in range(10):
            tree = [(here, text)]
            for _ in range(12):
                g, path = rng.choice(tree)
                fresh = made.guide(source)
                for token in path:
                    fresh.accept(token)
                expected = fresh.allowed(every)
                some = every[rng.randrange(len(every)) :][:5]
                if rng.random() < 0.6:
                    assert g.allowed(every).tolist() == expected.tolist()
                assert g.allowed(some).tolist() == expected[some].tolist()
                fits = [t for t in np.flatnonzero(expected).tolist() if t != len(pieces) - 1]
                if fits:
                    fork, token = g.fork(), rng.choice(fits)
                    fork.accept(token)
                    tree.append((fork, [*path, token]))
            here, text = rng.choice(tree[len(tree) // 2 :])


def test_one_token_is_judged_as_all_are() -> None:
    """A mask and a look at each token agree."""
    pieces = [*BYTES, b"ab", b"abc", b'":', b"\xc3\xa4b", b"\xff", b"", b""]
    made = Guides(pieces, [len(pieces) - 1])
    every = np.arange(len(pieces), dtype=np.int32)
    rng = random.Random(2)
    for source in ('root ::= "ab"* [^a] "\\"" ":"? .*', 'root ::= "x" root | "äb" root | ""'):
        g = made.guide(source_of("grammar", source))
        for _ in range(12):
            whole = g.allowed(every)
            assert whole.tolist() == [bool(g.allowed(every[t : t + 1])[0]) for t in every]
            fits = np.flatnonzero(whole[:-1])
            if not len(fits):
                break
            g.accept(int(rng.choice(fits.tolist())))


def test_the_end_is_a_token_that_changes_nothing() -> None:
    g = guide("grammar", 'root ::= "a"*')
    g.accept(ord("a"))
    g.accept(END)
    assert mask(g) == [ord("a"), END]
    g = guide("grammar", 'root ::= "a"')
    with pytest.raises(UsageError, match="does not fit"):
        g.accept(END)


def test_a_draft_that_runs_into_a_limit_does_not_end_the_reply() -> None:
    """A matcher is of no more use then; the text before goes on with a new one."""
    g = guide("grammar", 'root ::= r\nr ::= [a-z] r | [a-z] | "-"')
    g.accept(ord("a"))
    drafted = g.fork()

    def go_on() -> None:
        for _ in range(2000):
            drafted.accept(ord("b"))

    with pytest.raises(UsageError, match="too much work"):
        go_on()
    assert mask(g) == [ord("-"), *range(ord("a"), ord("z") + 1), END]
    g.accept(ord("b"))


def test_its_work_does_not_grow_with_what_can_be_left_out() -> None:
    """300 optional parts, and 4,096 empty words: automata of stacks take minutes for either."""
    empty = "root ::= a a a a a a a a\na ::= b b b b b b b b\nb ::= c c c c c c c c\n"
    assert takes(guide("grammar", empty + 'c ::= d d d d d d d d\nd ::= "x"?'), "x" * 40)
    assert takes(guide("grammar", 'root ::= "a"*' + ' "a"?' * 300), "a" * 40)

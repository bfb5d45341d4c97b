"""Stop conditions inside a run of tokens, text held back, and pieces that split characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from table_model import FakeVocab

from specllama.engine.reply import ReplyBuilder
from specllama.events import FinishReason
from specllama.settings.params import GenerateParams


class Pieces:
    """A vocabulary given as bytes; token 0 ends a turn."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = (b"", *pieces)

    @property
    def n_tokens(self) -> int:
        return len(self._pieces)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        raise NotImplementedError

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return self._pieces[token]

    def is_eog(self, token: int) -> bool:
        return token == 0


def reply(*pieces: bytes, **changes: Any) -> ReplyBuilder:
    return ReplyBuilder(GenerateParams(**changes), Pieces(*pieces))


class Taken(NamedTuple):
    kept: int
    text: str
    reason: FinishReason | None


def take(reply: ReplyBuilder, tokens: Sequence[int], *, late: bool = False) -> Taken:
    kept = reply.accept(tokens, late=late)
    return Taken(kept, reply.new[1], reply.reason)


def test_tokens_become_text() -> None:
    r = reply(b"ab", b"c")
    taken = take(r, [1, 2, 1])
    assert (taken.kept, taken.text, taken.reason) == (3, "abcab", None)
    assert (r.token_ids, r.text, r.finish(None)) == ([1, 2, 1], "abcab", ("", ""))


def test_a_stop_token_is_kept_but_not_shown() -> None:
    r = reply(b"ab", b"c")
    taken = take(r, [1, 0, 2])
    assert (taken.kept, taken.text, taken.reason) == (2, "ab", "stop_token")
    assert r.token_ids == [1, 0]


def test_control_tokens_are_spelled_for_whoever_reads_calls() -> None:
    class Marked(Pieces):
        def piece(self, token: int, *, special: bool = False) -> bytes:
            return b"<|call|>" if special and token < 2 else self._pieces[token]

    for spelled, text in ((False, "ab"), (True, "<|call|>ab")):
        r = ReplyBuilder(GenerateParams(spelled=spelled), Marked(b"", b"ab"))
        assert take(r, [1, 2, 0]).text == text


def test_ignore_eos_makes_it_an_ordinary_token() -> None:
    r = reply(b"ab", ignore_eos=True)
    assert not r.is_stop(0)
    assert take(r, [1, 0, 1]).kept == 3
    assert r.text == "abab"


@pytest.mark.parametrize("limit", range(1, 7))
def test_max_tokens_inside_a_run(limit: int) -> None:
    r = reply(b"a", b"b", max_tokens=limit)
    assert r.remaining == limit
    first = take(r, [1, 2])
    if limit <= 2:
        assert (first.kept, first.reason) == (limit, "length")
        assert r.remaining == 0
        return
    second = take(r, [1, 2, 1, 2, 1])
    assert (second.kept, second.reason) == (limit - 2, "length")
    assert len(r.token_ids) == limit


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    assert take(reply(b"a", max_tokens=2), [1, 0]).reason == "stop_token"


def test_a_stop_string_over_tokens_and_rounds() -> None:
    r = reply(b"hel", b"lo w", b"orld", stop=("lo world",))
    first = take(r, [1, 2])
    assert (first.kept, first.text, first.reason) == (2, "hel", None)
    second = take(r, [3, 1])
    assert (second.kept, second.text, second.reason) == (1, "", "stop_string")
    assert (r.text, r.finish("stop_string"), r.token_ids) == ("hel", ("", ""), [1, 2, 3])


def test_a_false_start_is_shown_later() -> None:
    r = reply(b"hel", b"lo", b"!", stop=("lox",))
    assert take(r, [1, 2]).text == "hel"
    assert take(r, [3]).text == "lo!"
    r = reply(b"lo", stop=("lox",))
    assert take(r, [1]).text == ""
    assert r.finish("length") == ("", "lo")
    assert r.text == "lo"


def test_a_stop_string_at_the_limit_is_a_stop_string() -> None:
    r = reply(b"a", b"b", stop=("ab",), max_tokens=2)
    assert take(r, [1, 2]).reason == "stop_string"


def test_characters_split_over_tokens() -> None:
    snowman = "☃".encode()
    r = reply(snowman[:1], snowman[1:2], snowman[2:], b"x")
    assert [take(r, [t]).text for t in (1, 2, 3, 4)] == ["", "", "☃", "x"]
    r = reply(snowman[:2], b"x")
    assert take(r, [1]).text == ""
    assert r.finish("length") == ("", ""), "an unfinished character is left out at the end"
    r = reply(snowman[:2], b"x")
    assert take(r, [1, 2]).text == "�x"


@given(
    tokens=st.lists(st.integers(1, 20), max_size=40),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=40),
    stop=st.lists(st.text("etaoin", min_size=1, max_size=3), max_size=2),
    limit=st.none() | st.integers(1, 30),
)
def test_how_rounds_cut_the_tokens_does_not_matter(
    tokens: list[int], cuts: list[int], stop: list[str], limit: int | None
) -> None:
    params = GenerateParams(stop=tuple(dict.fromkeys(stop)), max_tokens=limit)
    whole, parts = ReplyBuilder(params, FakeVocab(24)), ReplyBuilder(params, FakeVocab(24))
    one = take(whole, tokens)
    rest, reason, shown, i = list(tokens), None, "", 0
    while rest and reason is None:
        n = cuts[i % len(cuts)]
        taken = take(parts, rest[:n])
        shown += taken.text
        reason = taken.reason
        rest, i = rest[n:], i + 1
    assert reason == one.reason
    assert parts.token_ids == whole.token_ids
    assert len(whole.token_ids) == one.kept
    assert shown == one.text
    assert shown + parts.finish(reason)[1] == one.text + whole.finish(reason)[1] == whole.text
    assert parts.text == whole.text
    for s in params.stop:
        assert s not in whole.text


CODE = b"x)\n    a = 1\n\n    return total\n"


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"indent": 4}, "x)\n    a = 1\n", "length"),
        ({"indent": 5}, "x)\n    ", "length"),
        ({"indent": 0}, CODE.decode(), "stop_token"),
        ({"repeats": ("\n    return total\n",)}, "x)\n    a = 1\n", "stop_string"),
        ({"repeats": ("\n\n    return total\n", "\n    return total\n")}, "x)\n    a = 1",
         "stop_string"),
        ({"repeats": (")\n    a = 1\n",), "indent": 4}, "x", "stop_string"),
        ({"repeats": ("\n    return tot\n",)}, CODE.decode(), "stop_token"),
        ({"stop": (" = ",), "indent": 5}, "x)\n    ", "length"),
    ],
)  # fmt: skip
def test_what_fills_a_gap_ends_by_itself(
    size: int, fields: dict[str, Any], text: str, reason: str
) -> None:
    pieces = [CODE[i : i + size] for i in range(0, len(CODE), size)]
    r = reply(*pieces, **fields)
    taken = take(r, [*range(1, len(pieces) + 1), 0])
    assert (taken.text + r.finish(taken.reason)[1], taken.reason) == (text, reason)


def test_a_repeated_line_without_its_break_is_left_out_at_the_end() -> None:
    r = reply(b"x", b"\n    return total", repeats=("\n    return total\n",))
    taken = take(r, [1, 2, 0])
    assert (taken.text, r.finish(taken.reason)[1]) == ("x", "")


def test_when_time_is_up_the_reply_ends_with_its_line() -> None:
    r = reply(b"a", b":\n  ")
    assert take(r, [1, 2, 1], late=False).kept == 3
    taken = take(r, [1, 2, 1], late=True)
    assert (taken.kept, taken.reason, r.text) == (2, "length", "a:\n  aa:\n  ")

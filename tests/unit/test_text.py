"""Incremental UTF-8, stop strings over token boundaries, and the terminal choke point."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specllama.engine.reply import TextStream
from specllama.text import (
    WordCount,
    decoded,
    encodable,
    sanitize,
    sanitize_line,
    spelled,
)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    marks = sorted({0, len(data), *(i % (len(data) + 1) for i in at)})
    return [data[a:b] for a, b in itertools.pairwise(marks)]


def first_stop(text: str, stops: list[str]) -> str:
    """The reference: grow the text by one character and stop at the first complete stop string."""
    for n in range(1, len(text) + 1):
        starts = [n - len(s) for s in stops if text[:n].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


@given(
    text=st.text(alphabet="ab\u00e9\U0001f600", max_size=20),
    stops=st.lists(st.text(alphabet="ab\u00e9\U0001f600", min_size=1, max_size=4), max_size=3),
    at=st.lists(st.integers(0, 80), max_size=8),
)
def test_stops_do_not_depend_on_the_cut(text: str, stops: list[str], at: list[int]) -> None:
    stream = TextStream(stops)
    out = "".join(stream.feed(piece) for piece in cut(text.encode(), at)) + stream.finish()
    assert out == stream.text == first_stop(text, stops)
    assert stream.stopped == any(s in text for s in stops)


@given(data=st.binary(max_size=30), at=st.lists(st.integers(0, 30), max_size=8))
def test_any_bytes_decode_like_the_whole(data: bytes, at: list[int]) -> None:
    stream = TextStream()
    pieces = cut(data, at)
    out = "".join(stream.feed(piece) for piece in pieces) + stream.finish()
    assert out == decoded(data)
    assert out == data.decode("utf-8", "replace") or out + "\ufffd" == data.decode(
        "utf-8", "replace"
    )


def test_nothing_that_may_be_a_stop_is_shown_early() -> None:
    stream = TextStream(["\nUser:"])
    assert stream.feed(b"Yes.\nU") == "Yes."
    assert stream.feed(b"s") == ""
    assert not stream.stopped
    assert stream.feed(b"er: and more") == ""
    assert stream.stopped
    assert stream.stop == "\nUser:"
    assert stream.feed(b"never") == ""
    assert stream.finish() == ""
    assert stream.text == "Yes."


def test_held_text_comes_out_when_the_stop_fails_or_the_text_ends() -> None:
    stream = TextStream(["END"])
    assert stream.feed(b"the E") == "the "
    assert stream.feed(b"NT and EN") == "ENT and "
    assert stream.finish() == "EN"
    assert stream.text == "the ENT and EN"


def test_a_character_over_three_tokens() -> None:
    stream = TextStream()
    assert [stream.feed(bytes([b])) for b in "€".encode()] == ["", "", "€"]
    assert TextStream().feed(b"\xe2\x82") == ""
    stream.feed(b"\xe2\x82")
    assert stream.finish() == ""  # what ends inside a character ends before it
    assert TextStream().feed("\ufffd".encode()) == "\ufffd"  # written as such


def test_a_token_that_is_no_character_shows_its_bytes() -> None:
    llama = "🦙".encode()
    assert [spelled(llama[:2]), spelled(llama[2:]), spelled(b" a" + llama[:1])] == [
        "<F0 9F>", "<A6 99>", " a<F0>",
    ]  # fmt: skip
    assert spelled("é🦙\ufffd".encode()) == "é🦙\ufffd"
    assert decoded("é".encode() + llama[:3]) == "é"


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError):
        TextStream([""])


def test_sanitize_leaves_no_control_character() -> None:
    every = "".join(map(chr, range(0x300))) + "\u202e\u2066"
    safe = sanitize(every)
    for char in safe:
        assert char in "\n\t" or not (ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0), hex(ord(char))
    assert "\u202e" not in safe
    assert "⟦RLO⟧" in safe
    assert sanitize("\x1b]0;title\x07") == "␛]0;title␇"
    assert sanitize(safe) == safe
    assert sanitize("Grüße, 你好 😀 \t ok\n") == "Grüße, 你好 😀 \t ok\n"


def test_sanitize_works_piece_by_piece() -> None:
    text = "a\x1b[2J\x9b31m\u202eb"
    assert "".join(map(sanitize, text)) == sanitize(text)


def test_lines_and_surrogates() -> None:
    assert sanitize_line("two\nlines\tand\x1b") == "two lines and␛"
    assert sanitize("\ud800") == "\ufffd"
    assert encodable("a\udcffb").encode("utf-8") == b"a?b"


@given(st.text("ab \n\u00a0", max_size=30), st.lists(st.integers(0, 30), max_size=6))
def test_words_are_counted_however_they_arrive(text: str, at: list[int]) -> None:
    count = WordCount()
    cuts = [0, *sorted(at), len(text)]
    for start, end in itertools.pairwise(cuts):
        count.feed(text[start:end])
    assert count.words == len(text.split())


@pytest.mark.parametrize("seed", range(40))
def test_stops_are_found_as_by_searching_the_whole_text(seed: int) -> None:
    """However the text is cut, and where beginnings of stop strings overlap."""
    rng = random.Random(seed)
    stops = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 4))]
    text = "".join(rng.choices("abc", weights=(5, 5, 1), k=40))
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    stream, shown, at = TextStream(stops), "", 0
    while at < len(text) and not stream.stopped:
        n = rng.randint(1, 7)
        shown += stream.feed(text[at : at + n].encode())
        at += n
        assert not any(stop in shown for stop in stops)
    shown += stream.finish()
    if ends:
        _, start, stop = min(ends)
        assert (shown, stream.stop) == (text[:start], stop)
    else:
        assert (shown, stream.stop) == (text, None)


def test_a_long_stop_string_costs_each_character_once() -> None:
    class Counted(str):
        looked = 0

        def __getitem__(self, at: Any) -> str:
            Counted.looked += 1
            return str(self).__getitem__(at)

    stream = TextStream(["a" * 1000 + "b"])
    (stop,) = stream._stops
    stop.text = Counted(stop.text)
    n = 20_000
    for _ in range(n):
        stream.feed(b"a")
    assert Counted.looked <= 6 * n

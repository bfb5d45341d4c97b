"""Text for terminals: no control character in it, bytes of characters cut in two, words counted."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from specllama.text import WordCount, decoded, encodable, sanitize, sanitize_line, spelled


def test_a_token_that_is_no_character_shows_its_bytes() -> None:
    llama = "🦙".encode()
    assert [spelled(llama[:2]), spelled(llama[2:]), spelled(b" a" + llama[:1])] == [
        "<F0 9F>", "<A6 99>", " a<F0>",
    ]  # fmt: skip
    assert spelled("é🦙\ufffd".encode()) == "é🦙\ufffd"
    assert decoded("é".encode() + llama[:3]) == "é"


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
    for start, end in itertools.pairwise([0, *sorted(at), len(text)]):
        count.feed(text[start:end])
    assert count.words == len(text.split())

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specllama.tui.reading import PlainGuard, ThoughtSplitter, code_blocks, split_thoughts

CASES = {
    "no thoughts": ("", "no thoughts"),
    "<think>a</think>b": ("a", "b"),
    "\n<think>\nhm\n</think>\n\nAnswer": ("\nhm\n", "Answer"),
    "<think>never ends": ("never ends", ""),
    "text <think>not at the start</think>": ("", "text <think>not at the start</think>"),
    "<thin": ("", "<thin"),
    "<think>a</thin": ("a</thin", ""),
    "": ("", ""),
}


@pytest.mark.parametrize("text", CASES)
def test_thoughts_are_split_off_however_they_arrive(text: str) -> None:
    assert split_thoughts(text) == CASES[text]
    splitter = ThoughtSplitter()
    parts = [part for ch in text for part in splitter.feed(ch)] + splitter.finish()
    assert "".join(p for thought, p in parts if thought) == CASES[text][0]
    assert "".join(p for thought, p in parts if not thought) == CASES[text][1]


@given(st.text(alphabet="<think>/a \n", max_size=40), st.integers(1, 9))
def test_pieces_do_not_change_the_split(text: str, size: int) -> None:
    splitter = ThoughtSplitter()
    parts = [
        part for i in range(0, len(text), size) for part in splitter.feed(text[i : i + size])
    ] + splitter.finish()
    whole = split_thoughts(text)
    assert "".join(p for thought, p in parts if thought) == whole[0]
    assert "".join(p for thought, p in parts if not thought) == whole[1]


def test_what_would_choke_markdown_is_told_apart() -> None:
    assert not PlainGuard().feed("An ordinary reply.\n" * 500)
    assert PlainGuard().feed("|a" * 1000)
    assert PlainGuard().feed("x" * 21_000)
    guard = PlainGuard()
    assert not any(guard.feed("y" * 1000) for _ in range(20))
    assert guard.feed("y")


def test_code_blocks_newest_first_and_open_ones_too() -> None:
    text = "a\n```py\nx = 1\n```\nb\n~~~\ny\n~~~\n```\nopen"
    assert code_blocks(text) == ["open", "y", "x = 1"]
    assert code_blocks("none") == []

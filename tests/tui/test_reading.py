from __future__ import annotations

from specllama.tui.widgets.growing import PlainGuard, code_blocks


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

"""A paste is text, even where it holds what a terminal means as a key."""

from __future__ import annotations

from pathlib import Path

import pytest
from terminals import terminal
from textual import events

from specllama.tui.clipboard import END, START, PasteParser

PASTED = "red \x1b[31mtext\x1b[0m\tand \x1bOP, \x1b\x1b[201 e"
CLEAN = "red [31mtext[0m\tand OP, [201 e"


def read(chunks: list[str]) -> list[str]:
    """Keys by name, pastes by their text."""
    parser = PasteParser()
    return [
        event.text if isinstance(event, events.Paste) else event.key
        for chunk in chunks
        for event in parser.feed(chunk)
        if isinstance(event, events.Paste | events.Key)
    ]


def test_what_is_pasted_is_not_typed() -> None:
    sent = f"a{START}{PASTED}{END}b{START}second{END}\x1bOP"
    # Textual tells a paste once it reads on
    assert read([sent, "c"]) == ["a", CLEAN, "b", "second", "f1", "c"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_wherever_a_read_ends(size: int) -> None:
    sent = f"a{START}{PASTED}{END}b{START}second{END}c"
    chunks = [sent[i : i + size] for i in range(0, len(sent), size)]
    assert read(chunks) == ["a", CLEAN, "b", "second", "c"]


def test_keys_outside_a_paste_are_as_ever() -> None:
    sent = "x\x1b[A\x1bOQ\x1b[200y"
    from textual._xterm_parser import XTermParser

    usual = [e.key for e in XTermParser().feed(sent) if isinstance(e, events.Key)]
    assert read([sent]) == usual


def test_in_a_terminal(tmp_path: Path) -> None:
    with terminal(tmp_path) as t:
        t.until(lambda: "demo-target" in t.words)
        t.type(f"{START}one \x1bmore word{END}")
        t.until(lambda: "one more word" in t.words)
        t.type("\x11")
        assert t.ended() == 0

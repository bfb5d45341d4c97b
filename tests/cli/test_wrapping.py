"""Lines of a plain chat end between words, and its figures take one line."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import Reply, ScriptedEngine
from hypothesis import example, given
from hypothesis import strategies as st

from specllama.cli import diagnostics, output
from specllama.cli.output import WordWrap, columns, wrapped
from specllama.cli.printer import Printer
from specllama.events import Event, Finished, Notice
from specllama.interface import Message
from specllama.settings.params import GenerateParams

PROSE = "The blue light is absorbed by water, and so the sea looks blue to us."


def test_no_word_is_broken() -> None:
    lines = wrapped(PROSE, 24).split("\n")
    assert lines == [
        "The blue light is",
        "absorbed by water, and",
        "so the sea looks blue to",
        "us.",
    ]
    assert wrapped("a " + "b" * 30 + " c", 10) == "a\n" + "b" * 30 + "\nc"
    assert wrapped("  indented  text\n\n- item", 80) == "  indented  text\n\n- item"


def test_signs_of_two_columns_end_a_line_between_them() -> None:
    assert wrapped("漢字漢字漢字", 8) == "漢字漢字\n漢字"
    family = "👨\u200d👩\u200d👧"
    assert family in wrapped(f"{family}{family}", 3)
    assert columns("cafe\u0301") == 4


def test_code_keeps_its_lines() -> None:
    code = "```python\nprint('a line that is longer than the screen is wide')\n```\n"
    assert wrapped(code + PROSE, 24) == code + wrapped(PROSE, 24)


@example(text="\u200d` ``", cuts=[1], width=2)
@given(
    text=st.text("ab \n`漢\u200d", max_size=60),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=60),
    width=st.integers(2, 20),
)
def test_pieces_do_not_matter(text: str, cuts: list[int], width: int) -> None:
    wrap, out, at = WordWrap(width), "", 0
    for n in cuts:
        out += wrap.feed(text[at : at + n])
        at += n
    out += wrap.feed(text[at:]) + wrap.finish()
    assert out == wrapped(text, width)
    assert "".join(out.split()) == "".join(text.split())
    if "```" not in text:
        assert all(columns(line) <= width or " " not in line.strip() for line in out.split("\n"))


def events(text: str) -> list[Event]:
    engine = ScriptedEngine([Reply(text)])
    return list(engine.generate([Message("user", "Hi")], GenerateParams(seed=1)))


def test_a_chat_on_a_terminal_wraps_the_stream_and_says_things_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda stream=None: True)
    monkeypatch.setattr(output, "width", lambda: 24)
    monkeypatch.setattr(diagnostics, "width", lambda: 24)
    known: set[str] = set()
    told = [Notice("one thing to know of this conversation"), *events(PROSE)]
    for _ in range(2):
        Printer(known=known).show(iter(told))
    out, err = capsys.readouterr()
    assert out == (wrapped(PROSE, 24) + "\n") * 2
    assert err.count("one thing to know of") == 1
    assert all(len(line) <= 24 for line in err.splitlines())
    assert "seed" not in err
    assert "rounds" not in err


@pytest.mark.parametrize("known", [None, set()])
def test_an_ending_before_the_first_token_has_no_figures_of_one(
    capsys: pytest.CaptureFixture[str], known: set[str] | None
) -> None:
    end = events(PROSE)[-1]
    assert isinstance(end, Finished)
    none = replace(end, text="", token_ids=(), rounds=0, reason="cancelled", verdict=None)
    Printer(known=known).show(iter([none]))
    Printer(known=known).show(iter([replace(none, token_ids=(0,), reason="stop_token")]))
    stopped, empty = capsys.readouterr().err.splitlines()
    assert "first token" not in stopped
    assert stopped.endswith("stopped")
    assert empty.endswith("the model ended at once")

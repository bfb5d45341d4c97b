"""A gap in a text as a prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from table_model import FakeVocab

from specllama.backend.base import Gap
from specllama.engine.infilling import infilled
from specllama.errors import UsageError


class Gapped(FakeVocab):
    gap = Gap(60, 61, 62, 63)  # type: ignore[assignment]


def shown(vocab: FakeVocab, ids: list[int]) -> str:
    marks = {60: "<", 61: "|", 62: ">", 63: "#"}
    return "".join(marks.get(id) or vocab.piece(id).decode() for id in ids)


def fill(
    before: str, after: str, *others: tuple[str, str], room: int = 200, near: int = 100
) -> str:
    return shown(vocab := Gapped(), infilled(vocab, before, after, others, room=room, near=near))


def test_the_gap_is_marked() -> None:
    assert fill("let x be ", " and so on") == "<let x be | and so on>"
    assert fill("", "") == "<|>"


def test_other_texts_come_first_the_nearest_last() -> None:
    # the alphabet has no line break: its first letter, which is e, stands for it
    assert fill("a", "b", ("one", "in"), ("two", "out")) == "#oneein#twoeout#filee<a|b>"


def test_what_does_not_fit_is_cut_far_from_the_gap() -> None:
    text = fill("s" * 300 + "n", "t" * 300, ("x", "u" * 500))
    assert len(text) == 200
    around = text[text.index("<") :]
    assert len(around) == 100
    assert around == "<" + "s" * 72 + "n|" + "t" * 24 + ">"
    assert text.startswith("uu")
    assert len(fill("s" * 300, "", room=50)) == 50


def test_without_tokens_for_files_a_line_parts_the_texts() -> None:
    class Plain(Gapped):
        gap = replace(Gapped.gap, file=None)

    ids = infilled(Plain(), "a", "b", [("one", "in")], room=200, near=100)
    text = shown(Plain(), ids)
    assert "snippet" in text
    assert text.endswith("in<a|b>")


def test_a_model_without_such_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="no tokens for a gap"):
        infilled(FakeVocab(), "a", "b", [], room=10, near=5)

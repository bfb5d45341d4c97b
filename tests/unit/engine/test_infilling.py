"""A gap in a text as a prompt."""

from dataclasses import replace
from itertools import pairwise, takewhile

import pytest
from table_model import FakeVocab

from specllama.backend.base import Gap
from specllama.engine.infilling import infilled, repeated
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
    assert 190 <= len(text) <= 200
    around = text[text.index("<") :]
    assert 90 <= len(around) <= 100
    assert around.strip("<s") == "n|" + "t" * 24 + ">"
    assert text.startswith("uu")
    assert 40 <= len(fill("s" * 300, "", room=50)) <= 50


LINES = "\nabcdefghij :0123456789"


def typed(before: str, after: str, room: int) -> str:
    """The prompt of a gap in a text of several lines."""
    vocab = Gapped(alphabet=LINES)
    ids = infilled(vocab, before, after, [], room=room, near=room)
    assert len(ids) <= room
    return shown(vocab, ids)


def same(a: str, b: str) -> int:
    """How long the common beginning of two prompts is."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def read_again(prompts: list[str]) -> list[int]:
    """How many tokens of each prompt but the first the one before it has not at the same place."""
    return [len(b) - same(a, b) for a, b in pairwise(prompts)]


@pytest.mark.parametrize("room", [1000, 8000])
@pytest.mark.parametrize("newline", ["", "\n"])
def test_a_key_press_reads_little_again_however_much_is_around_the_gap(
    room: int, newline: str
) -> None:
    before = "".join(f"def {i}: {i * i}{newline}" for i in range(300))
    after = "".join(f"{i} gaf{newline}" for i in range(300))
    keys = [before + f"\nadd {newline} beg{newline} fe"[:n] for n in range(20)]
    again = read_again([typed(key, after, room) for key in keys])
    assert sorted(again)[-2] < 80
    assert max(again) < 80 or newline == ""  # of a text of one line, now and then an eighth is cut


def test_the_window_of_an_editor_slides_and_little_is_read_again() -> None:
    lines = [f"def {i}: {i * i}\n" for i in range(400)]
    keys = ["".join(lines[n : n + 256]) for n in range(60)]
    again = read_again([typed(key, "\n0 gaf\n" * 90, 8000) for key in keys])
    assert sum(one < 100 for one in again) > 50


def test_what_is_read_ahead_stands_in_the_prompt_of_the_next_key() -> None:
    others = [(str(i), "abc" * 30) for i in range(20)]
    ahead, key = fill("", "", *others, room=1000), fill("ab" * 40, "c" * 90, *others, room=1000)
    assert same(ahead, key) == ahead.index("<") + 1 > 800


@pytest.mark.parametrize(
    ("after", "texts"),
    [
        ("\n    return total\n\nx", ("\n    return total\n",)),
        (")\n    return total", (")\n    return total", "\n    return total")),
        ("\n}\n\nint main() {\n", ("\n}\n\nint main() {\n", "\nint main() {\n")),
        (" = compute(a)\nx", (" = compute(a)\n",)),
        ("\nx = 1\ny = 2\n", ("\nx = 1\ny = 2\n",)),
        ("\n}\n", ()),
        ("", ()),
    ],
)
def test_what_shows_that_the_text_behind_a_gap_is_repeated(
    after: str, texts: tuple[str, ...]
) -> None:
    assert repeated(after) == texts


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

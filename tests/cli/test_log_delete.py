"""``specllama log rm`` and ``log texts``: nothing goes without being asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest

from specllama.cli import asking
from specllama.errors import StoreError
from specllama.store.corpus import Corpus
from specllama.store.rounds import delete_run, list_runs

KEY, OTHER = "0123456789abcdef", "fedcba9876543210"


def answer(monkeypatch: pytest.MonkeyPatch, said: bool) -> list[str]:
    """Somebody is there to answer; returns what they are asked."""
    asked: list[str] = []

    def reply(question: str, **options: object) -> None:
        asked.append(question)
        assert options["default"] is False  # Enter deletes nothing
        if not said:
            raise click.Abort

    monkeypatch.setattr("specllama.cli.log_delete.confirm", reply)
    return asked


@pytest.fixture
def three(cli):
    for _ in range(3):
        assert cli("run", "x", "--seed", "1").code == 0
    assert len(list_runs()) == 3
    return cli


def test_rm_deletes_what_was_named(three) -> None:
    newest, middle, oldest = list_runs()
    result = three("log", "rm", "last", newest.stem, oldest.stem, "--yes")
    assert (result.code, result.out) == (0, "")
    assert "deleted 2 round logs" in result.err
    assert list_runs() == [middle]
    assert three("log", "rm", "--all", "-y").code == 0
    assert list_runs() == []
    assert "no round log to delete" in three("log", "rm", "--all").err


def test_rm_asks_first(three, monkeypatch: pytest.MonkeyPatch) -> None:
    result = three("log", "rm", "--all")
    assert result.code == 2
    assert "there is no terminal to ask on" in result.err
    asked = answer(monkeypatch, False)
    assert three("log", "rm", "last").code != 0
    assert list_runs()[0].stem in asked[0]
    assert len(list_runs()) == 3
    answer(monkeypatch, True)
    assert three("log", "rm", "last").code == 0
    assert len(list_runs()) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "give the runs to delete"),
        (("last", "--all"), 2, "give the runs to delete"),
        (("nobody", "-y"), 1, "no round log is named"),
        (("mine.jsonl", "-y"), 2, "not in the log folder"),
    ],
)
def test_rm_refuses(three, tmp_path: Path, arguments, code: int, words: str) -> None:
    (tmp_path / "mine.jsonl").write_text("{}")
    result = three("log", "rm", *arguments)
    assert (result.code, result.out) == (code, "")
    assert words in result.err
    assert len(list_runs()) == 3
    assert (tmp_path / "mine.jsonl").exists()


def test_a_log_that_is_gone_or_cannot_go(tmp_path: Path) -> None:
    assert delete_run(tmp_path / "gone.jsonl") == 0
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(StoreError, match="cannot delete"):
        delete_run(tmp_path / "folder.jsonl")


@pytest.fixture
def kept(cli):
    corpus = Corpus()
    corpus.add(KEY, range(20))
    corpus.add(KEY, range(5, 35))
    corpus.add(OTHER, range(40))
    return cli


def test_texts_lists_counts_and_sizes(kept) -> None:
    rows = {row["tokenizer"]: row for row in kept("log", "texts", "--json").json[0]["texts"]}
    assert (rows[KEY]["texts"], rows[KEY]["tokens"], rows[KEY]["file_bytes"]) == (2, 50, 216)
    assert rows[OTHER]["texts"] == 1
    table = kept("log", "texts").out
    assert KEY in table
    assert OTHER in table
    assert KEY not in kept("log", "texts", "fed").out
    assert len(Corpus().files()) == 2


def test_texts_are_deleted_after_a_question(kept, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept("log", "texts", "--delete").code == 2
    asked = answer(monkeypatch, False)
    assert kept("log", "texts", "--delete").code != 0
    assert asked == ["delete 3 kept texts?"]
    assert len(Corpus().files()) == 2
    assert "deleted 1 kept text," in kept("log", "texts", "fed", "--delete", "--yes").err
    assert [file.tokenizer for file in Corpus().files()] == [KEY]
    answer(monkeypatch, True)
    assert kept("log", "texts", "--delete").code == 0
    assert Corpus().files() == []
    assert "no texts are kept" in kept("log", "texts").err
    result = kept("log", "texts", "fed", "--delete", "-y")
    assert result.code == 1
    assert "no texts are kept for a tokenizer 'fed'" in result.err


def test_confirm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(click, "confirm", lambda *_, **options: options["default"])
    asking.confirm("go on?")
    with pytest.raises(click.Abort):
        asking.confirm("delete?", default=False)

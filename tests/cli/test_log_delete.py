"""``specllama log rm``: nothing goes without being asked for."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from specllama.errors import StoreError
from specllama.store.rounds import delete_run, list_runs


def answer(monkeypatch: pytest.MonkeyPatch, said: bool) -> list[str]:
    """Somebody is there to answer; returns what they are asked."""
    asked: list[str] = []

    def reply(question: str, **options: object) -> None:
        asked.append(question)
        assert options["default"] is False  # Enter deletes nothing
        if not said:
            raise click.Abort

    monkeypatch.setattr("specllama.cli.log.confirm", reply)
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

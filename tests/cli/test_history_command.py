"""Chatting without a trace, and deleting what was kept."""

from __future__ import annotations

from pathlib import Path

from specllama.cli.lines import history_file
from specllama.paths import rounds_dir, sessions_file


def test_an_unstored_chat_leaves_nothing(cli, home: Path) -> None:
    result = cli("chat", "--unstored", stdin=b"a secret\n/sessions\n")
    assert result.code == 0
    assert result.out
    assert not sessions_file().exists()
    assert not list(rounds_dir().glob("*"))
    assert not any(b"a secret" in path.read_bytes() for path in home.rglob("*") if path.is_file())
    assert cli("chat", "--unstored", "--resume").code == 2


def test_conversations_are_listed_and_deleted_for_good(cli, home: Path) -> None:
    for text in (b"the first words\n", b"second thoughts\n"):
        assert cli("chat", "--plain", "--no-log", stdin=text).code == 0
    (listed,) = cli("history", "ls", "--json").json
    titles = [one["title"] for one in listed["conversations"]]
    assert sorted(titles) == ["second thoughts", "the first words"]
    assert "second thoughts" in cli("history", "ls").out
    (found,) = cli("history", "ls", "first", "--json").json
    assert [one["title"] for one in found["conversations"]] == ["the first words"]
    assert cli("history", "rm").code == 2
    assert cli("history", "rm", "last").code == 2, "there is no terminal to ask on"
    assert cli("history", "rm", "-y", found["conversations"][0]["id"]).code == 0
    (left,) = cli("history", "ls", "--json").json
    assert [one["title"] for one in left["conversations"]] == ["second thoughts"]
    history_file().write_text("typed\n")
    assert cli("history", "rm", "--all", "--typed", "-y").code == 0
    assert cli("history", "ls").err.startswith("no conversation is stored")
    assert not history_file().exists()
    kept = [path for path in home.rglob("*") if path.is_file()]
    assert sessions_file() in kept
    assert not any(b"thoughts" in path.read_bytes() for path in kept), "for good"

"""Chatting without a trace, and deleting what was kept."""

from __future__ import annotations

from pathlib import Path

import click

from specllama.cli import completion
from specllama.cli.lines import history_file
from specllama.paths import rounds_dir, sessions_file
from specllama.store.message_tree import StoredMessage
from specllama.store.sessions import SessionStore


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
    assert "[second]" in cli("history", "ls", "second").out  # there is an index now
    assert cli("history", "rm", "-y", found["conversations"][0]["id"]).code == 0
    (left,) = cli("history", "ls", "--json").json
    assert [one["title"] for one in left["conversations"]] == ["second thoughts"]
    history_file().write_text("typed\n")
    assert cli("history", "rm", "--all", "--typed", "-y").code == 0
    assert cli("history", "ls").err.startswith("no conversation is stored")
    assert not history_file().exists()
    kept = [path for path in home.rglob("*") if path.is_file()]
    assert sessions_file() in kept
    for part in (b"thoughts", b"thought", b"houghts"):
        assert not any(part in path.read_bytes() for path in kept), "for good"
    assert not any(b"tho" in path.read_bytes() for path in kept if path.name == "sessions.db")


def test_words_are_found_and_marked(cli, home: Path) -> None:
    with SessionStore.open() as store:
        for question, reply in (("About apples", "They are Red."), ("Pears", "Red, at times.")):
            session = store.create()
            store.put(session, 0, StoredMessage("user", question))
            store.put(session, 1, StoredMessage("assistant", reply))
    (found,) = cli("history", "ls", "red", "appl", "--json").json
    assert [one["title"] for one in found["conversations"]] == ["About apples"]
    assert found["conversations"][0]["found"] in ("About apples", "They are Red.")
    assert "[Red], at times." in cli("history", "ls", "red").out
    assert "They [are Red]." in cli("history", "ls", "are red").out
    assert cli("history", "ls", "red are").out == ""
    assert cli("history", "ls", "zebra").err.startswith("no conversation holds")


def test_every_command_names_a_damaged_file(cli, home: Path) -> None:
    for args in (("history", "ls"), ("history", "rm", "--all", "-y"), ("chat", "--plain")):
        sessions_file().parent.mkdir(parents=True, exist_ok=True)
        sessions_file().write_bytes(b"no database at all" * 400)
        result = cli(*args, stdin=b"Hi\n")
        assert result.code == 0
        assert "the sessions file was damaged; it was moved to" in result.err, args


def test_completing_leaves_a_damaged_file_where_it_is(home: Path) -> None:
    sessions_file().parent.mkdir(parents=True)
    sessions_file().write_bytes(b"no database at all" * 400)
    completion.conversations(click.Context(click.Command("x")), click.Argument(["id"]), "")
    assert sessions_file().read_bytes().startswith(b"no database")
    assert len(list(sessions_file().parent.iterdir())) == 1

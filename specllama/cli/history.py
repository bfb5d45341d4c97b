"""``specllama history``: list, search and delete stored conversations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from specllama.cli import completion, diagnostics
from specllama.cli.diagnostics import confirm, yes_option
from specllama.cli.listing import Column, json_option, limit_option, listing, number, picked, when
from specllama.cli.output import examples
from specllama.errors import UsageError
from specllama.paths import data_dir
from specllama.store import states
from specllama.text import number_of

if TYPE_CHECKING:
    from specllama.store.sessions import SessionStore

_EXCERPT = 70


@click.group("history", epilog=examples()["history"])
def command() -> None:
    """List, search and delete stored conversations.

    Round logs contain text, too: see specllama log rm.
    """


@contextmanager
def stored() -> Iterator[SessionStore]:
    """Open the stored conversations; problems of the file are reported."""
    from specllama.store.sessions import SessionStore

    with SessionStore.open() as store:
        for notice in store.notices:
            diagnostics.warn(notice)
        told = len(store.notices)
        yield store
    for notice in store.notices[told:]:
        diagnostics.warn(notice)


@command.command("ls")
@click.argument("words", nargs=-1)
@limit_option
@json_option
def ls(words: tuple[str, ...], limit: int, as_json: bool) -> None:
    """List conversations, newest first; with WORDS, those that hold all of them, and where.

    Each may stand anywhere in the title or a message, also as a part of a word; an argument of
    several words stands together.
    """
    query = " ".join(f'"{word}"' if " " in word else word for word in words)
    with stored() as store:
        found = store.summaries(query=query, limit=limit)
    columns = [
        Column("id", "id"),
        Column("last", lambda one: when(one.updated_s)),
        number("messages", "messages"),
        Column("title", "title", give=True),
        *([Column("found", lambda one: _marked(one.found, query), give=True)] if query else []),
    ]
    listing(
        as_json,
        "conversations",
        found,
        columns,
        to_dict=lambda one: picked(one, "id title created_s updated_s messages found"),
        empty="no conversation " + ("holds all of these words" if query else "is stored"),
    )


def _marked(text: str, query: str) -> str:
    """Show the excerpt in one line, the words that were found [in brackets]."""
    from specllama.store.search import excerpt, hits, terms

    wanted = terms(query)
    line = excerpt(text, wanted, _EXCERPT)
    for begin, end in reversed(hits(line, wanted)):
        line = f"{line[:begin]}[{line[begin:end]}]{line[end:]}"
    return line


@command.command("rm")
@click.argument("ids", nargs=-1, metavar="[ID]...", shell_complete=completion.conversations)
@click.option("--all", "every", is_flag=True, help="Delete every conversation.")
@click.option(
    "--typed", is_flag=True, help="Also delete the input history: every typed line, sent or not."
)
@yes_option
def rm(ids: tuple[str, ...], every: bool, typed: bool, yes: bool) -> None:
    """Delete conversations for good, including those deleted in the app.

    ID is one from `history ls` or the start of one, or `last`.
    """
    if every and ids:
        raise UsageError("give conversations to delete, or --all, not both")
    if not (every or ids or typed):
        raise UsageError(
            "give the conversations to delete, or --all", "list them: specllama history ls"
        )
    with stored() as store:
        chosen = [one.id for one in store.summaries(limit=2**31)] if every else []
        chosen = chosen or list(dict.fromkeys(store.find(one) for one in ids))
        what = number_of(len(chosen), "conversation")
        what += " and what was typed" if typed else ""
        if not yes:
            confirm(f"delete {what} for good?", default=False)
        for one in chosen:
            store.delete(one)
        if every or ids:
            store.purge(-1.0)  # negative age: what was deleted this moment, too
    if every:
        states.forget("*")  # what a server's clients left, too
    if typed:
        from specllama.cli.lines import history_file

        app = data_dir() / "tui"
        for path in (history_file(), app / "history.jsonl", app / "unsent.json"):
            path.unlink(missing_ok=True)
    diagnostics.note(f"deleted {what}")

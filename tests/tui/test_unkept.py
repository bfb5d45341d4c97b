"""A conversation that the store cannot hold is not left without a question."""

from pathlib import Path
from typing import Any

import pytest
from app_driver import Driver
from textual.widgets import Input

from specllama.store.sessions import SessionStore
from specllama.tui.screens.unkept_screen import UnkeptScreen


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    out = tmp_path / "here"
    out.mkdir()
    monkeypatch.chdir(out)
    return out


@pytest.fixture(params=["no folder", "read-only", "full"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> SessionStore:
    """A store that cannot take a conversation, from its opening on or later."""
    path = tmp_path / "store" / "sessions.db"
    if request.param == "no folder":
        path.parent.write_text("in the way")
    store = SessionStore.open(path)
    if request.param == "read-only":
        store._db.execute("PRAGMA query_only = on")
    elif request.param == "full":
        (pages,) = store._db.execute("PRAGMA page_count").fetchone()
        store._db.execute(f"PRAGMA max_page_count = {pages}")
    return store


LONG = "word " * 2000  # more than a page of the database has room for


def asked(d: Driver) -> bool:
    return isinstance(d.app.screen, UnkeptScreen)


@pytest.mark.parametrize("keys", [["ctrl+q"], ["ctrl+c", "ctrl+c"]])
async def test_leaving_offers_a_file(
    start: Any, store: SessionStore, folder: Path, keys: list[str]
) -> None:
    async with start(LONG, store=store) as d:
        await d.say("a question")
        assert store.lacks
        await d.pilot.press(*keys)
        await d.until(lambda: asked(d))
        assert d.app.is_running
        await d.press("enter", until=lambda: d.app.return_value == 0)
    (saved,) = folder.glob("*.md")
    assert "a question" in saved.read_text("utf-8")
    assert LONG.strip() in saved.read_text("utf-8")


async def test_esc_stays_and_ctrl_d_leaves_without_it(
    start: Any, store: SessionStore, folder: Path
) -> None:
    async with start(LONG, store=store) as d:
        await d.say("a question")
        await d.press("ctrl+q", until=lambda: asked(d))
        await d.press("escape", until=lambda: not asked(d))
        assert d.app.is_running
        assert d.texts[0] == ("user", "a question")
        await d.press("ctrl+q", until=lambda: asked(d))
        await d.press("ctrl+d", until=lambda: d.app.return_value == 0)
    assert not [*folder.iterdir()]


async def test_a_new_conversation_asks_as_well(
    start: Any, store: SessionStore, folder: Path
) -> None:
    async with start(LONG, store=store) as d:
        await d.say("a question")
        await d.press("ctrl+n", until=lambda: asked(d))
        await d.press("enter", until=lambda: not d.app.chat.session.messages)
        assert [*folder.glob("*.md")]


async def test_a_file_that_is_there_or_cannot_be_written_keeps_the_app_open(
    start: Any, store: SessionStore, folder: Path
) -> None:
    (folder / "mine.md").write_text("mine")
    async with start(LONG, store=store) as d:
        await d.say("a question")
        for place in ("mine.md", "mine.md/below.md"):
            await d.press("ctrl+q", until=lambda: asked(d))
            d.app.screen.query_one(Input).value = place
            await d.press("enter", until=lambda: not asked(d))
            await d.until(
                lambda: any("cannot be saved" in note.message for note in d.app._notifications)
            )
            d.app.clear_notifications()
            assert d.app.return_value is None
    assert (folder / "mine.md").read_text() == "mine"


async def test_what_was_saved_by_hand_is_not_asked_for(
    start: Any, store: SessionStore, folder: Path
) -> None:
    async with start(LONG, store=store) as d:
        await d.say("a question")
        await d.press("ctrl+s", until=lambda: [*folder.glob("*.md")])
        await d.press("ctrl+q", until=lambda: d.app.return_value == 0)


async def test_a_stored_conversation_and_an_empty_one_are_left_at_once(
    start: Any, store: SessionStore
) -> None:
    async with start(LONG) as d:
        await d.say("a question")
        await d.press("ctrl+q", until=lambda: d.app.return_value == 0)
    async with start(LONG, store=store) as d:
        await d.press("ctrl+q", until=lambda: d.app.return_value == 0)


async def test_a_locked_file_of_conversations_asks(
    start: Any, tmp_path: Path, folder: Path
) -> None:
    path = tmp_path / "sessions.db"
    with SessionStore.open(path) as mine, SessionStore.open(path) as other:
        mine._db.execute("PRAGMA busy_timeout = 1")
        async with start("Reply.", store=mine) as d:
            other._db.execute("BEGIN IMMEDIATE")
            await d.say("a question")
            assert mine.lacks
            await d.press("ctrl+q", until=lambda: asked(d))
            await d.press("enter", until=lambda: d.app.return_value == 0)
            other._db.execute("ROLLBACK")
    assert [*folder.glob("*.md")]

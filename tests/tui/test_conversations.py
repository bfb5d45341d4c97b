"""The list of conversations: by day, with a preview, and with what a search finds."""

import threading
import time
from typing import Any

import pytest
from app_driver import Driver, Recipe
from fakes import ScriptedEngine
from textual.widgets import Input, OptionList, Static
from textual.widgets._footer import FooterKey

from specllama.store.message_tree import StoredMessage
from specllama.store.sessions import SessionStore
from specllama.tui.screens.sessions_screen import Preview, SessionsScreen

DAY = 86400.0


def fill(**ago: float) -> None:
    """Conversations by title, so many seconds old."""
    with SessionStore.open() as store:
        for title, seconds in ago.items():
            session = store.create(title=title)
            store.put(session, 0, StoredMessage("user", f"What of {title}?"))
            reply = f"Of {title} there is [much] to say, and a llama \x1b[31m says it."
            store.put(session, 1, StoredMessage("assistant", reply, "partial"))
            when = time.time() - seconds
            store._db.execute("UPDATE sessions SET updated_s = ? WHERE id = ?", (when, session))


async def opened(d: Driver) -> SessionsScreen:
    await d.press("f7", until=lambda: isinstance(d.app.screen, SessionsScreen))
    screen = d.app.screen
    assert isinstance(screen, SessionsScreen)
    return screen


def rows(screen: SessionsScreen) -> list[str]:
    return [str(option.prompt) for option in screen.query_one("#sessions", OptionList).options]


async def test_headings_are_passed_over(start: Any) -> None:
    fill(fox=500 * DAY, crow=499 * DAY + 1, rain=0.0)
    async with start("Ok.") as d:
        screen = await opened(d)
        found = rows(screen)
        assert next(row.split()[0] for row in found if not row.startswith(" ")) == "Today"
        assert sum(row.startswith(" ") for row in found) == 3
        titles = []
        for _ in range(4):
            titles.append(screen._selected.title)
            await d.pilot.press("down")
        assert titles == ["rain", "crow", "fox", "rain"]
        await d.press("up", "enter", until=lambda: d.texts[:1] == [("user", "What of rain?")])


async def test_the_preview_shows_how_it_ended_and_what_was_found(start: Any) -> None:
    fill(fox=2 * DAY, rain=0.0)
    async with start("Ok.", size=(120, 36)) as d:
        screen = await opened(d)
        preview = screen.query_one(Preview)
        shown = str(preview.query_one("#preview-text", Static).render())
        assert "What of rain?" in shown
        assert "Of rain there is [much] to say" in shown
        assert "interrupted" in shown
        assert "\x1b" not in d.shown
        await d.pilot.press("down")
        await d.until(
            lambda: "What of fox?" in str(preview.query_one("#preview-text", Static).render())
        )
        await d.press(*"llama fox", until=lambda: len(screen._found) == 1)
        content = preview.query_one("#preview-text", Static).content
        assert "What of fox?" in str(content)
        spans = {str(content)[span.start : span.end]: str(span.style) for span in content.spans}
        for word in ("llama", "fox"):
            assert "underline" in spans[word]
            assert "bold" in spans[word]
        assert "a llama" in rows(screen)[1].splitlines()[1]


@pytest.mark.parametrize("size", [(60, 16), (80, 24)])
async def test_where_there_is_no_room_a_few_lines_say_how_it_ended(
    start: Any, size: tuple[int, int]
) -> None:
    fill(fox=2 * DAY, rain=0.0)
    async with start("Ok.", size=size) as d:
        screen = await opened(d)
        assert screen.query_one(Preview).region.height == 3
        await d.until(lambda: "Of rain there is" in d.shown)
        await d.pilot.press("down")
        await d.until(lambda: "Of fox" in d.shown)
        await d.press(*"says", until=lambda: len(screen._found) == 2)
        assert "says it" in rows(screen)[1]


async def test_an_empty_list_says_what_to_do(start: Any) -> None:
    async with start("Ok.") as d:
        screen = await opened(d)
        assert "No conversation is stored yet" in d.shown
        await d.pilot.press("enter", "ctrl+d", "ctrl+e")
        assert d.app.screen is screen
        screen.query_one(Input).value = "zebra"
        await d.until(lambda: "holds all of these words" in d.shown)


async def test_a_conversation_is_read_while_the_model_still_loads(start: Any) -> None:
    fill(fox=DAY)
    gate = threading.Event()
    recipe = Recipe(ScriptedEngine(["Ok."]), gate=lambda: assert_opened(gate))
    async with start(recipe=recipe, wait=False) as d:
        await opened(d)
        await d.press("enter", until=lambda: d.texts[:1] == [("user", "What of fox?")])
        assert "there is [much] to say" in d.shown
        assert not d.app.loader.ready
        gate.set()
        await d.ready()
        await d.say("And more?")
        assert recipe.engine.requests[0].prompt[0].content == "What of fox?"


def assert_opened(gate: threading.Event) -> None:
    assert gate.wait(30)


# -- beside the figures, and keys in the footer --


async def test_lines_stay_readable_beside_the_figures(start: Any) -> None:
    text = "word " * 200
    for size, most in (((160, 50), 104), ((300, 60), 104)):
        async with start(text, size=size) as d:
            await d.say("q")
            assert 60 <= d.app.chat.transcript.messages[-1].region.width <= most


@pytest.mark.parametrize(("width", "keys"), [(60, 6), (80, 6), (99, 6), (100, 8), (200, 8)])
async def test_function_keys_in_the_footer(start: Any, width: int, keys: int) -> None:
    async with start("Yes.", size=(width, 24)) as d:
        shown = [k for k in d.app.screen.query(FooterKey) if k.key.startswith("f")]
        assert len(shown) == keys
        last = d.shown.splitlines()[-1]
        for key in shown:
            assert key.description in last
            assert key.region.right <= width
        await d.pilot.press("f9")  # works where it has no room to be shown, too
        await d.until(lambda: not d.app.session.params.speculate)

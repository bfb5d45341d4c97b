"""The list of conversations beside the present one, and the keys in the footer."""

from __future__ import annotations

from typing import Any

import pytest
from app_driver import Driver
from textual.widgets import OptionList
from textual.widgets._footer import FooterKey

from specllama.store.message_tree import StoredMessage
from specllama.store.sessions import SessionStore
from specllama.tui.screens.sessions_screen import SessionsScreen
from specllama.tui.screens.settings_screen import SettingsScreen, Toggle
from specllama.tui.widgets.sidebar import Sidebar

WIDE = (160, 50)


def fill(*titles: str) -> None:
    with SessionStore.open() as store:
        for title in titles:
            session = store.create(title=title)
            store.put(session, 0, StoredMessage("user", f"question of {title}"))
            store.put(session, 1, StoredMessage("assistant", f"answer of {title}"))


def rows(d: Driver) -> list[str]:
    options = d.app.chat.query_one("#conversations", OptionList)
    return [str(option.prompt) for option in options.options]


async def test_conversations_are_listed_resumed_and_marked(start: Any) -> None:
    fill("first", "second \x1b[31m")
    async with start("Yes.", size=WIDE) as d:
        assert [row.split()[0] for row in rows(d)] == ["+", "second", "first"]
        assert "\x1b" not in d.shown
        await d.pilot.press("f7")
        assert d.app.focused is d.app.chat.query_one("#conversations")
        await d.pilot.press("down", "down", "enter")
        await d.until(lambda: d.texts[:1] == [("user", "question of first")])
        await d.until(lambda: d.app.chat.prompt.has_focus)
        assert rows(d)[2].startswith("● first")
        await d.say("More?")
        assert rows(d)[1].startswith("● first")  # the newest now
        await d.press("ctrl+n", until=lambda: not d.texts)
        assert not any("●" in row for row in rows(d))
        await d.say("A new one")
        assert rows(d)[1].startswith("● A new one")


async def test_the_list_is_hidden_in_the_settings_and_stays_hidden(start: Any) -> None:
    fill("first")
    async with start("Yes.", size=WIDE) as d:
        sidebar = d.app.chat.query_one(Sidebar)
        assert sidebar.region.width > 0
        await d.press("f7", "escape", until=lambda: d.app.chat.prompt.has_focus)
        assert sidebar.display
        await d.press("f8", until=lambda: isinstance(d.app.screen, SettingsScreen))
        d.app.screen.query_one("#set-show_sidebar", Toggle).value = False
        await d.press("ctrl+s", until=lambda: sidebar.region.width == 0)
    async with start("Yes.", size=WIDE) as d:
        assert d.app.chat.query_one(Sidebar).region.width == 0
        await d.press("f7", until=lambda: isinstance(d.app.screen, SessionsScreen))


async def test_from_the_list_its_key_opens_the_page(start: Any) -> None:
    async with start("Yes.", size=WIDE) as d:
        await d.press("f7", "f7", until=lambda: isinstance(d.app.screen, SessionsScreen))


async def test_where_there_is_no_room_the_key_opens_the_page(start: Any) -> None:
    async with start("Yes.", size=(159, 40)) as d:
        assert d.app.chat.query_one(Sidebar).region.width == 0
        await d.press("f7", until=lambda: isinstance(d.app.screen, SessionsScreen))


async def test_lines_stay_readable_between_the_sidebar_and_the_figures(start: Any) -> None:
    text = "word " * 200
    for size, most in ((WIDE, 104), ((300, 60), 104)):
        async with start(text, size=size) as d:
            await d.say("q")
            view = d.app.chat.transcript.messages[-1]
            assert 60 <= view.region.width <= most


@pytest.mark.parametrize(
    ("width", "keys"),
    [(60, 6), (80, 6), (99, 6), (100, 8), (200, 8)],
)
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

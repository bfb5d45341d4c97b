"""Every letter and colour is explained: on the help page, and beside the row of rounds."""

from __future__ import annotations

from typing import Any

import pytest
from app_driver import Recipe
from demo_engine import DemoEngine
from fakes import Reply

from specllama.settings.params import GenerateParams
from specllama.tui.screens.help_screen import HelpScreen
from specllama.tui.widgets.message import AssistantMessage


async def test_the_help_page_explains_every_sign_and_letter(start: Any) -> None:
    engine = DemoEngine(speed=0)
    async with start(recipe=Recipe(engine), size=(80, 140)) as d:
        await d.press("f1", until=lambda: isinstance(d.app.screen, HelpScreen))
        page = " ".join(d.shown.split())
        assert "■ a guess that was kept" in page
        for method in engine.info.methods:
            if method.letter:
                assert f"{d.app.glyphs.source(method.name)} {method.short}" in page
        for words in (
            "surely faster than plain",
            "/retry new takes another one",
            "left right the version before",
            "the truth lies between in 9 of 10 cases",
        ):
            assert words in page


@pytest.mark.parametrize(("width", "letters"), [(60, False), (140, True)])
async def test_the_row_of_rounds_is_explained_where_there_is_room(
    start: Any, width: int, letters: bool
) -> None:
    async with start(Reply("One two three four five six.", accept=(2, 0)), size=(width, 30)) as d:
        await d.say("q")
        assert "■ kept" in d.shown
        assert "□ refused" in d.shown
        assert ("ᵈ draft model" in d.shown) is letters


async def test_a_folded_thought_names_its_key(start: Any) -> None:
    async with start(Reply("<think>Hm, let me see.</think>Yes.")) as d:
        await d.say("q")
        assert "thought · 4 words · Tab, then t unfolds it" in d.shown
        await d.press("tab", "t", until=lambda: "Hm, let me see." in d.shown)
        assert d.app.focused is d.app.chat.query(AssistantMessage).last()
        await d.press("t", until=lambda: "Hm, let me see." not in d.shown)


async def test_the_legend_stays_where_something_is_wrong(start: Any) -> None:
    """It is needed most where refused guesses fill the row."""
    reply = Reply(" ".join(f"word{i}" for i in range(120)), accept=(0,), plain_ms=1.0)
    params = GenerateParams(window="fixed", draft_max=4)
    async with start(reply, size=(80, 24), params=params) as d:
        await d.say("go")
        await d.until(lambda: "F9 off" in d.shown)
        assert "■ kept  □ refused  · unread  + target" in d.shown


async def test_the_rows_of_the_inspector_say_what_they_are(start: Any) -> None:
    async with start(Reply("One two three four five six.", accept=(2, 0)), size=(120, 36)) as d:
        await d.say("go")
        await d.press("f3", until=lambda: "round  time, tokens" in d.shown)

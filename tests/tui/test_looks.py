"""Themes, and terminals with few colours."""

from datetime import datetime
from typing import Any

import pytest
from app_driver import Recipe
from demo_engine import DemoEngine
from fakes import Reply
from textual.color import Color
from textual.theme import BUILTIN_THEMES

from specllama.errors import SpecllamaError
from specllama.settings.params import GenerateParams
from specllama.tui import advice, themes
from specllama.tui.screens.help_screen import HelpScreen
from specllama.tui.screens.sessions_screen import age, date, heading, moment
from specllama.tui.state import Preferences
from specllama.tui.themes import DARK, LIGHT
from specllama.tui.widgets.markdown_parser import PlainGuard, code_blocks


@pytest.mark.parametrize("name", sorted({**BUILTIN_THEMES, DARK.name: DARK, LIGHT.name: LIGHT}))
async def test_what_carries_information_can_be_read(start: Any, name: str) -> None:
    """In every theme that has colours of its own, on everything that text stands on."""
    async with start() as d:
        d.app.theme = name
        if d.app.current_theme.ansi:
            assert d.app.ink.source("draft") != d.app.ink.source("suffix")
            colours = [themes.ANSI_VARIABLES[f"source-{one}"] for one in ("draft", "suffix")]
            assert colours[0] != colours[1]
            return
        variables = d.app.get_css_variables()
        for text in themes.READ:
            for behind in themes.BEHIND:
                pair = Color.parse(variables[text]), Color.parse(variables[behind])
                assert themes.contrast(*pair) >= 4.49, (text, behind, pair)


def test_contrast_is_that_of_the_standard() -> None:
    assert themes.contrast(Color(0, 0, 0), Color(255, 255, 255)) == pytest.approx(21.0)
    assert themes.contrast(Color.parse("#777777"), Color(255, 255, 255)) == pytest.approx(
        4.48, abs=0.01
    )


def test_sixteen_colours_tell_the_sources_apart() -> None:
    """The terminal's own are used where it has no more: ours would be rounded to one another."""
    used = [one for name, one in themes.ANSI_VARIABLES.items() if name.startswith("source-")]
    assert len(set(used)) == len(used)


async def test_damaged_settings_are_said_and_kept_aside(start: Any) -> None:
    path = Preferences.path()
    path.write_text('{"theme": "dracula", "keys": {"chat.re')
    async with start() as d:
        said = [one.message for one in d.app._notifications]
        assert any(str(path) in words and "are damaged" in words for words in said)
    assert path.with_name("tui.json.damaged").read_text().startswith('{"theme": "dracula"')
    assert Preferences.load().notice == ""


# -- the age of a conversation in words --


NOW = datetime(2026, 11, 25, 9, 30).timestamp()  # a Wednesday


def test_ages_in_words() -> None:
    assert [age(s) for s in (3, 200, 8000)] == ["just now", "3 min ago", "2 h ago"]


@pytest.mark.parametrize(
    ("then", "over", "under"),
    [
        (datetime(2026, 11, 25, 9, 28), "Today", "2 min ago"),
        (datetime(2026, 11, 25, 0, 10), "Today", "9 h ago"),
        (datetime(2026, 11, 24, 23, 59), "Yesterday", "23:59"),
        (datetime(2026, 11, 23, 10, 0), "Monday", "10:00"),
        (datetime(2026, 11, 19, 0, 1), "Thursday", "00:01"),
        (datetime(2026, 11, 18, 23, 0), "November", "18 Nov"),
        (datetime(2026, 2, 3, 8, 5), "February", "3 Feb"),
        (datetime(2025, 12, 31, 8, 5), "December 2025", "31 Dec"),
        (datetime(2026, 11, 25, 9, 45), "Today", "just now"),  # a clock that was set back
    ],
)
def test_headings_and_what_stands_under_them(then: datetime, over: str, under: str) -> None:
    at = then.timestamp()
    assert (heading(at, NOW), moment(at, NOW)) == (over, under)


def test_a_date_is_whole() -> None:
    assert date(NOW) == "25 November 2026, 09:30"


# -- every letter and colour is explained --


async def test_the_help_page_explains_every_sign_and_letter(start: Any) -> None:
    engine = DemoEngine(speed=0)
    async with start(recipe=Recipe(engine), size=(80, 240)) as d:
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
        assert "thought · 4 words · Alt+T unfolds it" in d.shown
        await d.press("alt+t", until=lambda: "Hm, let me see." in d.shown)
        await d.press("alt+t", until=lambda: "Hm, let me see." not in d.shown)


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


def test_what_would_choke_markdown_is_told_apart() -> None:
    assert not PlainGuard().feed("An ordinary reply.\n" * 500)
    assert PlainGuard().feed("|a" * 1000)
    assert PlainGuard().feed("x" * 21_000)
    guard = PlainGuard()
    assert not any(guard.feed("y" * 1000) for _ in range(20))
    assert guard.feed("y")


def test_code_blocks_newest_first_and_open_ones_too() -> None:
    assert code_blocks("a\n```py\nx = 1\n```\nb\n~~~\ny\n~~~\n```\nopen") == ["open", "y", "x = 1"]
    assert code_blocks("none") == []


# -- an error's advice in keys of the app --


@pytest.mark.parametrize(
    ("hint", "here"),
    [
        ("shorten it, or raise --ctx-size", "shorten it, or raise “context size” (F8)"),
        (
            "give a part of it, or a larger context with -c",
            "give a part of it, or a larger context with “context size” (F8)",
        ),
        ("use --verify match", "use “verification: match” (F8)"),
        (
            "draft with --proposer ngram, suffix or a draft model",
            "draft with “method: ngram” (F8), suffix or a draft model",
        ),
        ("get it with: specllama hub pull qwen3:Q4_0", "get it with: F6 (qwen3:Q4_0)"),
        (
            "specllama hub ls shows what is here, specllama hub pairs what can be pulled",
            "F6 shows what is here, F6 what can be pulled",
        ),
        ("see also: specllama hub pairs --fits", "see also: F6"),
        ("list them: /sessions", "list them: F7"),
        # what the app has no key for stays as it is
        ("check it with: specllama hub verify", "check it with: specllama hub verify"),
        ("give it with --head FILE", "give it with --head FILE"),
        (None, ""),
    ],
)
def test_a_hint_in_keys(hint: str | None, here: str) -> None:
    assert advice.hint(SpecllamaError("no", hint)) == here


def test_what_a_server_was_started_with_is_not_the_apps() -> None:
    error = SpecllamaError("no", "raise --ctx-size, or use --on-full shift")
    assert advice.hint(error, server=True) == "raise --ctx-size, or use “when full: shift” (F8)"
    assert advice.said(error, server=True).startswith("no: raise --ctx-size")

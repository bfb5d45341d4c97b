"""No key, in any order, at any speed, ends the app or loses what a person wrote."""

import json
from pathlib import Path
from typing import Any

import pytest
from app_driver import Driver, GatedEngine, Recipe
from key_fuzz import SIZES, Draw, play
from textual import events
from textual.command import CommandPalette
from textual.widgets import Input, OptionList
from textual.widgets._toast import ToastRack

from specllama.text import whole
from specllama.tui.screens.sessions_screen import SessionsScreen
from specllama.tui.state import Preferences
from specllama.tui.widgets.markdown_parser import parser
from specllama.tui.widgets.message import AssistantMessage, UserMessage

LONG = " ".join(f"word{i}" for i in range(120))


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_is_pressed_nothing_breaks_and_nothing_is_lost(
    seed: int, tmp_path: Path
) -> None:
    found = await play(Draw(seed, SIZES[seed % 3], lag=float(seed % 2), steps=10), tmp_path)
    assert not found.problems, str(found)


def burst(d: Driver, text: str) -> None:
    for letter in text:
        d.app.post_message(events.Key("space" if letter == " " else letter, letter))


async def test_letters_at_a_message_go_to_the_prompt_in_their_order(start: Any) -> None:
    async with start("One.", "Two.") as d:
        await d.say("a")
        await d.say("b")
        before = d.texts
        d.app.chat.query(UserMessage).first().focus()
        await d.pilot.pause()
        burst(d, "udr under")
        await d.until(lambda: d.app.chat.prompt.text == "udr under")
        d.app.chat.query(AssistantMessage).last().focus()
        await d.pilot.pause()
        d.app.post_message(events.Paste(" and more"))
        await d.until(lambda: d.app.chat.prompt.text == "udr under and more")
        assert d.texts == before


async def test_views_switch_while_messages_are_built(start: Any) -> None:
    async with start("One.", "Two.") as d:
        await d.say("a")
        await d.say("b")
        for key in ("alt+u", "f2", "ctrl+z", "f2", "alt+left", "f2", "ctrl+r", "f2") * 3:
            d.app.post_message(events.Key(key, None))
        await d.idle()
        await d.pilot.pause()
        assert d.app._exception is None
        written = {m.content for m in d.app.session._tree.messages.values()}
        assert written >= {"a", "One.", "b", "Two."}


async def test_a_page_of_an_empty_list_in_the_palette_ends_nothing(start: Any) -> None:
    async with start("One.") as d:
        await d.press("ctrl+p", until=lambda: isinstance(d.app.screen, CommandPalette))
        d.app.screen.query_one(OptionList).clear_options()
        for key in ("pagedown", "pageup", "down", "up", "enter"):
            d.app.post_message(events.Key(key, None))
        await d.pilot.pause()
        for _ in range(3):
            await d.pilot.press("escape")
        await d.press("x", until=lambda: d.app.chat.prompt.text == "x")


async def test_a_turn_that_was_taken_back_returns_by_the_key_of_undo(start: Any) -> None:
    async with start("One.", "Two.") as d:
        await d.say("a")
        await d.say("b")
        both = d.texts
        await d.press("alt+u", until=lambda: len(d.texts) == 2)
        await d.press("alt+u", until=lambda: len(d.texts) == 0)
        assert any("Ctrl+Z" in note.message for note in d.app._notifications)
        assert d.app.chat.prompt.text == "b"
        await d.press("ctrl+z", until=lambda: len(d.texts) == 2)
        await d.press("ctrl+z", until=lambda: d.texts == both)
        assert d.app.chat.prompt.text == ""


async def test_a_turn_that_was_taken_back_returns_beside_text_and_as_a_version(start: Any) -> None:
    async with start("One.") as d:
        await d.say("a")
        await d.type("half a thought")
        await d.press("tab", "alt+u", until=lambda: not d.texts)
        assert d.app.chat.prompt.text == "half a thought"
        await d.press("alt+left", until=lambda: len(d.texts) == 2)
        assert d.app.chat.prompt.text == "half a thought"


async def test_what_was_typed_before_is_undone_before_a_turn(start: Any) -> None:
    async with start("One.") as d:
        await d.say("a")
        await d.press("alt+u", until=lambda: d.app.chat.prompt.text == "a")
        await d.press("!", until=lambda: d.app.chat.prompt.text == "a!")
        await d.press("ctrl+z", until=lambda: d.app.chat.prompt.text == "a")
        assert not d.texts
        await d.press("ctrl+z", until=lambda: len(d.texts) == 2)


async def test_what_stood_in_the_prompt_returns_whatever_took_its_place(start: Any) -> None:
    async with start("One.", "Two.") as d:
        await d.say("a")
        await d.type("mine")
        await d.press("up", until=lambda: d.app.chat.prompt.text == "a")
        await d.press("enter", until=lambda: len(d.texts) == 4)
        await d.idle()
        for _ in range(3):
            await d.pilot.press("ctrl+z")
            if d.app.chat.prompt.text == "mine":
                break
        assert d.app.chat.prompt.text == "mine"


async def test_many_lines_are_undone_and_done_again(start: Any) -> None:
    lines = "\n".join(f"line {i}" for i in range(30))
    async with start("One.") as d:
        await d.type("mine")
        await d.type(lines)
        await d.press("ctrl+z", until=lambda: d.app.chat.prompt.text == "mine")
        await d.press("ctrl+y", until=lambda: d.app.chat.prompt.text == lines)


async def test_an_edit_that_is_sent_leaves_what_was_being_written(start: Any) -> None:
    async with start("One.", "Two.") as d:
        await d.say("a")
        await d.type("mine")
        await d.press("tab", "up", "enter", until=lambda: d.app.chat.editing == 0)
        await d.send("b", until=lambda: d.texts and d.texts[0] == ("user", "b"))
        assert d.app.chat.prompt.text == "mine"


async def test_versions_of_the_question_follow_those_of_the_reply(start: Any) -> None:
    async with start("One.", "Two.", "Three.") as d:
        await d.say("a")
        await d.send("/edit", until=lambda: d.app.chat.editing == 0)
        await d.send("b", until=lambda: d.texts and d.texts[-1] == ("assistant", "Two."))
        await d.idle()
        await d.press("ctrl+r", until=lambda: d.texts[-1] == ("assistant", "Three."))
        await d.idle()
        assert d.shown.count("‹2/2›") == 2
        assert d.shown.count("Alt+Left") == 1  # of the reply, which the keys change
        await d.press("alt+left", until=lambda: d.texts[-1] == ("assistant", "Two."))
        await d.press("alt+left", until=lambda: d.texts == [("user", "a"), ("assistant", "One.")])
        await d.press("alt+right", until=lambda: d.texts[-1] == ("assistant", "Two."))
        await d.press("alt+right", until=lambda: d.texts[-1] == ("assistant", "Three."))


@pytest.mark.parametrize("how", ["md", "json"])
async def test_what_is_saved_has_the_reply_that_is_being_written(
    start: Any, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with start(recipe=Recipe(GatedEngine([LONG]))) as d:
        await d.send("go", until=lambda: d.rounds == 3)
        shown = d.app.chat.live.text
        await d.send(f"/export {how}", until=lambda: [*tmp_path.glob(f"*.{how}")])
        text = next(tmp_path.glob(f"*.{how}")).read_text()
        if how == "json":
            reply = json.loads(text)["messages"][-1]
            assert reply["content"].startswith(shown)
            assert reply["state"] == "partial"
        else:
            assert shown in text
            assert "## Assistant (interrupted)" in text
        await d.send("/copy chat", until=lambda: True)
        d.engine.gate.set()
        await d.idle()
        assert d.texts[-1] == ("assistant", LONG)


async def test_a_picture_is_without_toasts(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with start("One.", toasts=True) as d:
        await d.say("go")
        d.app.notify("passing words")
        await d.pilot.pause(0.3)
        await d.send("/export svg", until=lambda: [*tmp_path.glob("*.svg")])
        assert "passing" not in next(tmp_path.glob("*.svg")).read_text()
        assert "passing" in d.shown


async def test_a_view_ends_with_the_app_and_says_how_it_is_left(start: Any) -> None:
    async with start("One.") as d:
        await d.say("a")
        await d.press("f2", until=lambda: "as drafted" in d.app.chat.prompt.border_title)
        assert "F2" in d.app.chat.prompt.border_title
    assert Preferences.load().view == "text"


async def test_a_waiting_line_ends_with_its_key(start: Any) -> None:
    async with start(recipe=Recipe(GatedEngine([LONG])), size=(60, 16)) as d:
        await d.send("go", until=lambda: d.rounds == 3)
        await d.send("漢字 " * 60, until=lambda: d.app.chat.queue)
        assert "(Esc takes it back)" in d.shown
        d.engine.gate.set()
        await d.idle()


@pytest.mark.parametrize("name", ["main.py", "README.md", "setup.sh", "lib.rs", "a@b.co", "x.ai"])
def test_names_of_files_are_no_links(name: str) -> None:
    assert "<a" not in parser().render(f"see {name} here")
    assert "<a" in parser().render("see https://example.org/x here")


def test_characters_of_several_tokens_are_whole() -> None:
    assert whole(["Hi <F0 9F>", "<A6 99>", " <E2 80>", "x"]) == ["Hi 🦙", "", " <E2 80>", "x"]
    assert "".join(whole(["<F0>", "<9F>", "<A6>", "<99><F0 9F>", "<A6 99>"])) == "🦙🦙"


async def test_no_toast_lies_over_the_field_of_a_page(start: Any) -> None:
    async with start("One.", size=(80, 24), toasts=True) as d:
        await d.press("f7", until=lambda: isinstance(d.app.screen, SessionsScreen))
        d.app.notify("passing words\nover two lines")
        await d.pilot.pause(0.3)
        rack = d.app.screen.query_one(ToastRack).region
        assert not rack.overlaps(d.app.screen.query_one(Input).region)


async def test_settings_show_their_values_on_a_narrow_screen(start: Any) -> None:
    async with start("One.", size=(40, 24)) as d:
        await d.pilot.press("f8")
        await d.until(lambda: d.app.screen.query("#set-temperature"))
        await d.pilot.pause()
        assert d.app.screen.query_one("#set-temperature").content_size.width >= 10

"""Completion of slash commands and paths, and files that go with a message."""

import threading
from pathlib import Path
from typing import Any

import pytest
from app_driver import Driver, GatedEngine, Recipe
from fakes import Reply, ScriptedEngine
from terminals import terminal
from textual import events
from textual.keys import _character_to_key

from specllama.errors import PromptTooLong
from specllama.settings.params import THINK
from specllama.store.sessions import SessionStore
from specllama.tui.clipboard import END, START, PasteParser
from specllama.tui.keymap import ACTIONS
from specllama.tui.widgets.above_prompt import Completions
from specllama.tui.widgets.transcript import Note


def offered(d: Driver) -> list[str]:
    completion = d.app.chat.query_one(Completions).completion
    return [c.label for c in completion.candidates] if completion else []


async def press(d: Driver, *keys: str) -> None:
    await d.pilot.press(*keys)
    await d.pilot.pause()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "here"
    (here / "more files").mkdir(parents=True)
    (here / "notes.md").write_text("Drafts guess.\nTargets check.\n")
    (here / "more files" / "a b.txt").write_text("```\ncode\n```")
    (here / "image.png").write_bytes(b"\x89PNG\0\0")
    monkeypatch.chdir(here)
    return here


async def test_a_slash_lists_the_commands_with_their_help(start: Any) -> None:
    async with start("Yes.") as d:
        await press(d, "/")
        assert "/help" in d.shown
        assert "What the keys do here" in d.shown
        assert "Tab or Enter takes it" in d.shown
        await press(d, "t", "h")
        assert offered(d)[0] == "/think"
        await press(d, "tab")
        assert d.app.chat.prompt.text == "/think "
        assert offered(d) == list(THINK)
        await press(d, "l", "enter")
        await d.until(lambda: d.app.session.params.think == "low")
        assert d.app.chat.prompt.text == ""
        assert offered(d) == []


async def test_arrows_choose_escape_closes_and_the_history_is_left_alone(start: Any) -> None:
    async with start("Yes.") as d:
        await d.say("before")
        await press(d, "/", "down", "down", "up")
        assert d.app.chat.query_one(Completions).chosen.label == offered(d)[1]
        await press(d, "escape")
        assert offered(d) == []
        assert d.app.chat.prompt.text == "/"
        await press(d, "v")
        assert offered(d) == []  # stays closed
        await press(d, "backspace", "enter")
        await d.until(lambda: ("user", "/") in d.texts)  # without the list it is a message
        await d.idle()
        await press(d, "/", "v")
        await press(d, "backspace", "backspace", "/", "n", "e", "w", "enter")
        await d.until(lambda: not d.texts)


async def test_escape_still_stops_a_reply(start: Any) -> None:
    engine = GatedEngine([Reply("One two three four five six.")])
    async with start(recipe=Recipe(engine)) as d:
        await d.send("go", until=lambda: d.rounds == 3)
        await press(d, "/", "escape")
        assert d.app.chat.busy
        await press(d, "escape")
        await d.idle()


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (200, 60)])
async def test_nothing_is_covered(start: Any, size: tuple[int, int]) -> None:
    async with start("Yes.", size=size) as d:
        await d.say("Hi")
        await press(d, "/")
        chat = d.app.chat
        listed = chat.query_one(Completions).region
        for widget in (chat.prompt, chat.query_one("#strip"), chat.query_one("#top")):
            assert not widget.region.overlaps(listed)
            assert widget.region.height > 0
        assert listed.height > 3
        assert chat.transcript.region.height > 0
        assert "Esc closes" in d.shown
        # no sentence ends in the middle
        assert "Does drafting pay?" in d.shown
        whole = next(one.help for one in ACTIONS if one.slash == "draft")
        assert (whole in d.shown) is (size[0] > 100)


async def test_a_file_is_completed_shown_and_sent(start: Any, folder: Path) -> None:
    async with start("Yes.") as d:
        await press(d, *"Read @no")
        assert offered(d) == ["notes.md"]
        await press(d, "enter")
        assert d.app.chat.prompt.text == "Read @notes.md "
        await d.until(lambda: "notes.md  29 bytes, 8 tokens" in d.shown)  # counted, not guessed
        await press(d, *"now", "enter")
        await d.until(lambda: len(d.texts) == 2)
        await d.idle()
        said = "```notes.md\nDrafts guess.\nTargets check.\n```\n\nRead @notes.md now"
        assert d.texts[0] == ("user", said)
        assert d.engine.requests[0].prompt[-1].content == said
        assert "notes.md  29 bytes, 2 lines" in d.shown
        assert "Drafts guess." not in d.shown
        assert "8 tokens" not in d.shown  # the chip above the prompt is gone


async def test_folders_spaces_and_quotes(start: Any, folder: Path) -> None:
    async with start("Yes.") as d:
        await press(d, *"@mo", "enter")
        assert d.app.chat.prompt.text == '@"more files/'
        assert offered(d) == ["more files/a b.txt"]
        await press(d, "tab")
        assert d.app.chat.prompt.text == '@"more files/a b.txt" '
        await press(d, "enter")
        await d.until(lambda: len(d.texts) == 2)
        assert d.texts[0][1].startswith("````more files/a b.txt\n```\ncode\n```\n````")


async def test_what_cannot_go_is_said_and_nothing_is_lost(start: Any, folder: Path) -> None:
    async with start("Yes.") as d:
        for name, words in (("image.png", "is not text in UTF-8"), ("no.md", "no such file")):
            await d.type(f"Look at @{name} please")
            await press(d, "enter")
            await d.until(lambda words=words: words in d.shown)
            assert d.app.chat.prompt.text == f"Look at @{name} please"
            assert d.texts == []
        await d.type("@@no.md and @anna please")
        await press(d, "enter")
        await d.until(lambda: len(d.texts) == 2)
        assert d.texts[0][1] == "@no.md and @anna please"


async def test_a_file_too_large_for_the_context_is_refused(start: Any, folder: Path) -> None:
    async with start("Yes.") as d:
        (folder / "big.txt").write_text("word " * d.app.chat.prompt.n_ctx * 3)
        await d.type("Sum up @big.txt for me")
        await d.until(lambda: "is too large: about" in d.shown)
        await press(d, "enter")
        assert d.texts == []


async def test_a_file_is_weighed_by_the_tokenizer_not_by_its_bytes(
    start: Any, folder: Path
) -> None:
    """Four characters a token are English in a large vocabulary: here a token is a letter."""

    class Letters(ScriptedEngine):
        def count_tokens(self, prompt: Any, params: Any = None) -> int:
            return len(prompt)

    gate = threading.Event()
    recipe = Recipe(Letters(["Yes."]), gate=lambda: gate.wait(60))
    async with start(recipe=recipe, wait=False) as d:
        n_ctx = recipe.engine.info.target.n_ctx
        (folder / "long.txt").write_text("a" * (n_ctx + 7))
        (folder / "short.txt").write_text("a" * 400)
        await d.type("Compare @long.txt with @short.txt please")
        await d.until(lambda: "short.txt  400 bytes, about 100 tokens" in d.shown)  # an estimate
        gate.set()
        await d.until(lambda: "short.txt  400 bytes, 400 tokens" in d.shown)
        words = f"long.txt is too large: at least {n_ctx + 7:,} tokens"
        await d.until(lambda: words in d.shown)


async def test_a_refusal_names_keys_of_the_app(start: Any) -> None:
    refusal = PromptTooLong(
        "too long", "start a new chat, raise --ctx-size, or use --on-full shift"
    )
    async with start(Reply(raise_first=refusal)) as d:
        await d.send("q", until=lambda: d.notes)
        for words in ("(Ctrl+N)", "“context size” (F8)", "“when full: shift” (F8)"):
            assert words in d.shown
        assert "--" not in d.app.chat.query(Note).last().hint


async def test_a_refused_message_returns_as_it_was_typed(start: Any, folder: Path) -> None:
    engine = ScriptedEngine([Reply(raise_first=PromptTooLong("too long")), "Yes."])
    async with start(recipe=Recipe(engine)) as d:
        await d.type("Read @notes.md now")
        await press(d, "enter")
        await d.until(lambda: "too long" in d.notes)
        await d.idle()
        assert d.app.chat.prompt.text == "Read @notes.md now"
        (folder / "notes.md").unlink()  # what was attached stays attached
        await press(d, "enter")
        await d.until(lambda: len(d.texts) == 2)
        assert "Drafts guess." in d.texts[0][1]


async def test_an_edited_message_keeps_its_file_and_unsent_ones_survive(
    start: Any, folder: Path
) -> None:
    async with start("Yes.", "No.") as d:
        await d.type("Read @notes.md now")
        await press(d, "enter")
        await d.until(lambda: len(d.texts) == 2)
        await d.idle()
        (folder / "notes.md").unlink()
        await d.type("/edit")
        await press(d, "enter")
        await d.until(lambda: d.app.chat.prompt.text == "Read @notes.md now")
        await d.until(lambda: "8 tokens" in d.shown)
        await d.until(lambda: d.app.chat.prompt.draft.load().pastes)
    async with start("No.") as d:
        assert d.app.chat.prompt.text == "Read @notes.md now"
        await press(d, "enter")
        await d.until(lambda: len(d.texts) == 2)
        assert "Drafts guess." in d.texts[0][1]


async def test_files_show_no_control_characters_but_are_sent_with_them(
    start: Any, folder: Path
) -> None:
    (folder / "odd\x1b.txt").write_text("\x1b[31mred")
    async with start("Yes.") as d:
        await press(d, *"@od", "enter")
        assert "odd␛.txt" in d.shown
        await press(d, "enter")
        await d.until(lambda: len(d.texts) == 2)
        assert "\x1b[31mred" in d.texts[0][1]
        assert "\x1b" not in d.shown
    with SessionStore.open() as store:
        assert "\x1b[31mred" in store.get(store.find()).messages[0].content


@pytest.mark.parametrize(
    "text", ["می\u200cخواهم", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "क्\u200dष"]
)
async def test_typed_joiners_are_kept(start: Any, text: str) -> None:
    async with start("Yes.") as d:
        prompt = d.app.chat.prompt
        for character in text:
            prompt.post_message(events.Key(_character_to_key(character), character))
        await d.until(lambda: prompt.text == text)


@pytest.mark.parametrize("keys", [["ctrl+c"], ["escape", "escape"], ["ctrl+u"]])
async def test_the_keys_that_people_try_empty_the_prompt(start: Any, keys: list[str]) -> None:
    async with start("Yes.") as d:
        prompt = d.app.chat.prompt
        prompt.put("\n".join(f"line {i}" for i in range(9)))
        await press(d, *keys)
        assert prompt.text == ""
        assert d.app.is_running
        await press(d, "ctrl+z")
        assert prompt.text.endswith("line 8")
        await press(d, "escape")
        assert prompt.text  # once only stops


async def test_a_paste_of_many_lines_is_folded(start: Any) -> None:
    async with start("Yes.") as d:
        prompt = d.app.chat.prompt
        prompt.put("before ")
        prompt.post_message(events.Paste("a\n" * 163))
        await d.until(lambda: "[pasted text #1" in prompt.text)
        assert prompt.full_text == "before " + "a\n" * 163
        prompt.empty()
        await press(d, "ctrl+z")
        assert prompt.full_text == "before " + "a\n" * 163


# -- a paste is text, even where it holds what a terminal means as a key --


PASTED = "red \x1b[31mtext\x1b[0m\tand \x1bOP, \x1b\x1b[201 e"
CLEAN = "red [31mtext[0m\tand OP, [201 e"


def read(chunks: list[str]) -> list[str]:
    """Keys by name, pastes by their text."""
    parser = PasteParser()
    return [
        event.text if isinstance(event, events.Paste) else event.key
        for chunk in chunks
        for event in parser.feed(chunk)
        if isinstance(event, events.Paste | events.Key)
    ]


def test_what_is_pasted_is_not_typed() -> None:
    sent = f"a{START}{PASTED}{END}b{START}second{END}\x1bOP"
    # Textual tells a paste once it reads on
    assert read([sent, "c"]) == ["a", CLEAN, "b", "second", "f1", "c"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_wherever_a_read_ends(size: int) -> None:
    sent = f"a{START}{PASTED}{END}b{START}second{END}c"
    chunks = [sent[i : i + size] for i in range(0, len(sent), size)]
    assert read(chunks) == ["a", CLEAN, "b", "second", "c"]


def test_keys_outside_a_paste_are_as_ever() -> None:
    sent = "x\x1b[A\x1bOQ\x1b[200y"
    from textual._xterm_parser import XTermParser

    usual = [e.key for e in XTermParser().feed(sent) if isinstance(e, events.Key)]
    assert read([sent]) == usual


def test_in_a_terminal(tmp_path: Path) -> None:
    with terminal(tmp_path) as t:
        t.until(lambda: "demo-target" in t.words)
        t.type(f"{START}one \x1bmore word{END}")
        t.until(lambda: "one more word" in t.words)
        t.type("\x11")
        assert t.ended() == 0

"""The engine's loads as a person sees them: progress, failures, native aborts, switches.

What ends a process must be tested with a process: these apps run a real engine host with a child.
"""

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from app_driver import Recipe
from fakes import AbortingRecipe, Reply, ScriptedEngine, ScriptedRecipe, engine_info, model_info

from specllama import paths
from specllama.engine.host import EngineHost, LoadEngine
from specllama.errors import BadGguf
from specllama.events import Event, LoadProgress, Notice
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams
from specllama.tui.screens.models_screen import ModelsScreen
from specllama.tui.state import Preferences

ASSERTION = "GGML_ASSERT(n > 0) failed"


def chosen_from(recipes: dict[str, Any]) -> Callable[[str, str | None], Any]:
    return lambda target, draft: recipes[target]


# ---------------------------------------------------------------------- the first load


async def test_what_a_load_warns_of_is_shown_once_it_is_over(start: Any) -> None:
    """A build of llama.cpp that dies in one layout, say: progress that follows hides it."""

    class Warned(Recipe):
        def __call__(self, progress: Callable[[Event], None], /) -> Any:
            progress(Notice("this build dies; again: CXXFLAGS=x pip install", "warning", "trial"))
            progress(LoadProgress("target", "one.gguf", 0.5))
            return super().__call__(progress)

    async with start(recipe=Warned()) as d:
        await d.until(lambda: any("CXXFLAGS" in n.message for n in d.app._notifications))
        assert not d.app.loader.warned


async def test_a_relative_path_is_remembered_from_every_folder(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    for name in ("target.gguf", "draft.gguf"):
        (here / name).touch()
    asked: list[tuple[str, str | None]] = []
    recipe = Recipe()

    def factory_for(target: str, draft: str | None) -> Recipe:
        asked.append((target, draft))
        return recipe

    monkeypatch.chdir(here)
    async with start(
        recipe=recipe, target="target.gguf", draft="./draft.gguf", factory_for=factory_for
    ):
        pass
    monkeypatch.chdir(elsewhere)
    async with start(recipe=recipe, target=None, factory_for=factory_for):
        pass
    assert asked == [(str(here / "target.gguf"), str(here / "draft.gguf"))] * 2


async def test_a_failed_load_says_what_and_what_next(start: Any) -> None:
    recipe = Recipe(error=BadGguf("the file is cut short", "pull it again"))
    async with start(recipe=recipe, wait=False) as d:
        await d.until(lambda: d.notes)
        for words in ("the file is cut short", "pull it again", "F6 chooses", "not loaded"):
            await d.until(lambda words=words: words in d.shown)
        recipe.error = None
        d.app.action_ask("reload")
        await d.ready()
        assert "not loaded" not in d.shown


async def test_a_native_abort_while_loading_keeps_what_was_typed(
    start: Any, tmp_path: Path
) -> None:
    fuse = tmp_path / "fuse"
    fuse.touch()
    recipe = AbortingRecipe(f"ggml.c:1: {ASSERTION}", fuse, ScriptedRecipe(("Now.",)))
    async with start(
        wait=False, host_class=EngineHost, factory_for=lambda target, draft: recipe
    ) as d:
        await d.send("sent early")
        # What waited for the model is in the prompt again, and the next try is one key away.
        await d.until(lambda: d.notes and d.app.chat.prompt.text == "sent early")
        await d.until(lambda: "not loaded" in d.shown)
        tries = len(d.notes)  # two where the first one was over before the text was sent
        assert tries in (1, 2)
        for said in d.notes:
            assert "SIGABRT" in said
            assert "while loading" in said
            assert ASSERTION in said
        await d.press("enter", until=lambda: len(d.notes) == tries + 1)
        await d.until(lambda: d.app.chat.prompt.text == "sent early")
        fuse.unlink()
        await d.press("enter", until=lambda: len(d.texts) == 2)
        assert d.texts == [("user", "sent early"), ("assistant", "Now.")]
        await d.idle()
        assert d.app.is_running


async def test_after_an_abort_another_pair_can_be_chosen(start: Any) -> None:
    recipes = {"broken": AbortingRecipe(), "sound": ScriptedRecipe(("Sound.",), "sound one")}
    async with start(
        target="broken", wait=False, host_class=EngineHost, factory_for=chosen_from(recipes)
    ) as d:
        await d.until(lambda: d.notes)
        await d.type("half a thought")
        d.app.switch_model(("sound", None))
        await d.ready()
        assert "sound one" in d.shown
        assert d.app.chat.prompt.text == "half a thought"
        await d.say("whole")
        assert d.texts[-1] == ("assistant", "Sound.")
        assert Preferences.load().last_target == "sound"


# ---------------------------------------------------------------------- a switch


async def test_an_abort_of_the_new_pair_goes_back_to_the_old_one(start: Any) -> None:
    recipes = {"old": ScriptedRecipe(("Old.",), "the old one"), "new": AbortingRecipe()}
    async with start(target="old", host_class=EngineHost, factory_for=chosen_from(recipes)) as d:
        await d.say("first")
        before = d.app.loader.host.pid
        await d.type("being written")
        d.app.switch_model(("new", None))
        await d.until(lambda: d.notes)
        assert "SIGABRT" in d.notes[0]
        await d.until(lambda: "back to the old one" in d.shown)
        await d.ready()
        assert d.app.loader.host.pid not in (None, before)
        assert d.app.loader.wanted == ("old", None)
        assert Preferences.load().last_target == "old"
        assert d.app.chat.prompt.text == "being written"
        await d.say("second")
        assert d.texts == [
            ("user", "first"),
            ("assistant", "Old."),
            ("user", "second"),
            ("assistant", "Old."),
        ]


async def test_an_engine_that_dies_and_aborts_when_it_is_started_again(
    start: Any, tmp_path: Path
) -> None:
    fuse = tmp_path / "fuse"
    recipe = AbortingRecipe(fuse=fuse, after=ScriptedRecipe(("One.",)))
    async with start(host_class=EngineHost, factory_for=lambda target, draft: recipe) as d:
        await d.say("first")
        fuse.touch()
        os.kill(d.app.loader.host.pid, signal.SIGKILL)
        await d.until(lambda: d.notes)
        assert "SIGKILL" in d.notes[0]
        await d.send("second", until=lambda: len(d.notes) == 2)
        assert "SIGABRT" in d.notes[1]
        # The question was not asked yet, and is back in the prompt.
        await d.until(lambda: d.app.chat.prompt.text == "second")
        fuse.unlink()
        await d.press("enter", until=lambda: len(d.texts) == 4)
        await d.idle()
        assert d.texts[2:] == [("user", "second"), ("assistant", "One.")]


async def test_an_engine_that_dies_unasked_is_announced(start: Any) -> None:
    recipe = ScriptedRecipe(("One.", "Two."))
    async with start(host_class=EngineHost, factory_for=lambda target, draft: recipe) as d:
        await d.say("first")
        os.kill(d.app.loader.host.pid, signal.SIGKILL)
        await d.until(lambda: d.notes)
        assert "ended while nothing was asked of it (SIGKILL" in d.notes[0]
        await d.until(lambda: "not loaded" in d.shown)
        await d.say("second")
        await d.until(lambda: len(d.texts) == 4)
        await d.until(lambda: "not loaded" not in d.shown)
        assert len(d.notes) == 1


async def test_an_engine_that_dies_in_a_reply_is_announced_once(start: Any) -> None:
    recipe = ScriptedRecipe((Reply("word " * 400, delay_s=0.2),))
    async with start(host_class=EngineHost, factory_for=lambda target, draft: recipe) as d:
        await d.send("first", until=lambda: d.rounds)
        os.kill(d.app.loader.host.pid, signal.SIGKILL)
        await d.idle()
        await d.until(lambda: "not loaded" in d.shown)
        await d.pilot.pause(0.3)
        assert len(d.notes) == 1
        assert "while it was working (SIGKILL" in d.notes[0]


async def test_a_switch_shows_progress_and_the_conversation_goes_with_it(start: Any) -> None:
    gate = threading.Event()
    new = ScriptedEngine(["New."], engine_info(target=model_info(name="other model"), draft=None))

    def slowly(progress: Callable[[Event], None], /) -> ScriptedEngine:
        progress(LoadProgress("target", "other.gguf", 0.25))
        gate.wait(60)
        return new

    recipes = {"scripted": Recipe(ScriptedEngine(["Old."])), "other": slowly}
    async with start(recipe=recipes["scripted"], factory_for=chosen_from(recipes)) as d:
        await d.say("first")
        assert "scripted draft" in d.shown
        assert d.app.chat.strip.figures.drafted > 0
        d.app.switch_model(("other", None))
        await d.until(lambda: "loading target 25%" in d.shown)
        # What is sent meanwhile waits for the new pair.
        await d.send("second", until=lambda: "waiting: second" in d.shown)
        assert " other " in d.shown.splitlines()[0]
        assert "scripted target" not in d.shown.splitlines()[0]
        gate.set()
        await d.until(lambda: len(d.texts) == 4)
        await d.idle()
        assert d.texts[-1] == ("assistant", "New.")
        assert "other model" in d.shown
        assert "scripted draft" not in d.shown
        # The strip is that of the new reply, whatever was measured on the old pair.
        assert d.app.chat.strip.figures.drafted == d.app.session.last.draft_n
        assert [m.content for m in new.requests[0].prompt] == ["first", "Old.", "second"]


async def test_a_load_that_is_pushed_aside_is_no_failure(start: Any) -> None:
    """Another pair is chosen while the first still loads: its end is not an error to show."""
    recipes = {"slow": HangingRecipe(), "quick": ScriptedRecipe(("Quick.",), "quick one")}
    async with start(
        target="slow", wait=False, host_class=EngineHost, factory_for=chosen_from(recipes)
    ) as d:
        await d.until(lambda: d.app.loader.host.pid)
        d.app.switch_model(("quick", None))
        await d.ready()
        await d.say("hello")
        assert d.texts[-1] == ("assistant", "Quick.")
        assert d.notes == []


class HangingRecipe:
    def __call__(self, progress: Callable[[Event], None], /) -> ScriptedEngine:
        threading.Event().wait()
        raise AssertionError


# ---------------------------------------------------------------------- the bundled pair


@pytest.mark.e2e
async def test_a_second_pair_is_found_weighed_and_loaded_in_the_middle_of_a_chat(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pair under other names; a damaged file in between; and back."""
    bundled = paths.bundled_dir()
    if not (bundled / "tiny-target-q4_0.gguf").is_file():
        pytest.skip("the bundled pair is not there")
    folder = tmp_path / "models"
    folder.mkdir()
    second = folder / "otter-q4_0.gguf"
    shutil.copy(bundled / "tiny-target-q4_0.gguf", second)
    shutil.copy(bundled / "tiny-draft-q8_0.gguf", folder / "heron-q8_0.gguf")
    whole = second.read_bytes()
    (folder / "cracked-q4_0.gguf").write_bytes(whole[: len(whole) // 2])
    monkeypatch.setenv("SPECLLAMA_MODEL_DIRS", str(folder))
    options = EngineOptions(threads=1)
    async with start(
        target="tiny",
        wait=False,
        size=(120, 36),
        host_class=EngineHost,
        factory_for=lambda target, draft: LoadEngine(target, draft, options),
        params=GenerateParams(seed=1, max_tokens=12, sampling=SamplingParams(temperature=0)),
        limit_s=120.0,
    ) as d:
        await d.ready()
        await d.say("Tell me about a fox")
        said = d.texts[1][1]
        before = d.app.loader.host.pid

        async def look_for(target: str) -> ModelsScreen:
            await d.press("f6", until=lambda: isinstance(d.app.screen, ModelsScreen))
            screen = d.app.screen
            await d.until(lambda: target in d.shown)
            await d.press(*target, until=lambda: screen.targets.row is not None)
            await d.until(lambda: target in screen.targets.row.ref)
            return screen

        screen = await look_for("otter")
        await d.until(lambda: "best: heron" in d.shown and "needs about" in d.shown)
        await d.press("enter", until=lambda: screen.active is screen.drafts)
        await d.press(*"heron", "enter", until=lambda: d.app.screen is d.app.chat)
        await d.until(lambda: d.app.loader.host.pid not in (None, before))
        await d.ready()
        assert d.app.loader.wanted == (str(second), str(folder / "heron-q8_0.gguf"))
        assert d.app.loader.info.target.path == str(second)
        assert d.texts[1][1] == said
        # The same weights at temperature 0: the other pair writes the same reply.
        earlier = d.app.session.last
        await d.press("ctrl+r", until=lambda: d.app.session.last is not earlier)
        await d.idle()
        assert d.texts[1][1] == said

        # What cannot be run is refused where it is chosen; and if it comes to a load, this fails.
        screen = await look_for("cracked")
        await d.until(lambda: screen.targets.row.refused)
        await d.press("enter", until=lambda: "truncated" in d.shown)
        assert d.app.screen is screen
        await d.pilot.press("escape")
        d.app.switch_model((str(folder / "cracked-q4_0.gguf"), None))
        await d.until(lambda: d.notes)
        await d.ready()
        assert d.app.loader.wanted[0] == str(second)
        await d.say("And a crow")
        assert len(d.texts) == 4
        assert d.texts[1][1] == said
        assert d.texts[3][1]

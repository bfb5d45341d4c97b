"""A model at rest is unloaded; the conversation stays, and the next message loads it again."""

from __future__ import annotations

import os
from typing import Any

from app_driver import Driver, GatedEngine, Recipe
from fakes import ScriptedRecipe

from specllama.engine.host import EngineHost
from specllama.tui.bridge import FlushPace

IDLE_S = 3600.0  # tests do not wait: they say when it is over


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


async def rest(d: Driver) -> None:
    """As if the time were over."""
    d.app.chat.resting.rest()
    await d.until(lambda: d.app.loader.resting)


async def test_it_is_unloaded_and_the_next_message_loads_it(start: Any) -> None:
    async with start("One.", "Two.", idle_s=IDLE_S) as d:
        await d.say("First?")
        loader = d.app.loader
        await rest(d)
        await d.until(lambda: d.engine.closed)
        await d.until(lambda: "unloaded after 1 h at rest" in d.shown)
        assert "One." in d.shown
        await d.say("Second?")
        assert [text for _, text in d.texts] == ["First?", "One.", "Second?", "Two."]
        assert loader.ready
        assert not loader.resting


async def test_its_process_ends(start: Any) -> None:
    recipe = ScriptedRecipe(("One.", "Two."))
    async with start(recipe=Recipe(), host_class=EngineHost, idle_s=IDLE_S,
                     factory_for=lambda target, draft: recipe) as d:  # fmt: skip
        await d.say("First?")
        process = d.app.loader.host.pid
        await rest(d)
        await d.until(lambda: d.app.loader.host.pid is None)
        await d.until(lambda: not alive(process))
        assert not d.notes, "that is no failure"
        await d.say("Second?")
        assert d.app.loader.host.pid not in (None, process)


async def test_typing_loads_it_again(start: Any) -> None:
    async with start("One.", idle_s=IDLE_S) as d:
        await rest(d)
        await d.type("F")
        await d.ready()


async def test_it_is_not_unloaded_while_it_writes_or_something_is_typed(start: Any) -> None:
    engine = GatedEngine(["One two three four five six seven eight."])
    async with start(recipe=Recipe(engine), idle_s=IDLE_S) as d:
        await d.send("Go on?", until=lambda: d.rounds)
        d.app.chat.resting.rest()
        assert d.app.loader.ready
        engine.gate.set()
        await d.idle()
        await rest(d)


async def test_the_time_is_what_was_said(start: Any) -> None:
    async with start("One.", idle_s=0.05, wait=False) as d:
        await d.until(lambda: d.app.loader.resting)


async def test_a_question_is_asked_again_of_a_model_at_rest(start: Any) -> None:
    async with start("One.", "Two.", idle_s=IDLE_S) as d:
        await d.say("First?")
        await rest(d)
        await d.press("ctrl+r", until=lambda: d.texts[-1][1] == "Two.")
        await d.ready()


async def test_never(start: Any) -> None:
    async with start("One.") as d:
        await d.say("First?")
        assert d.app.chat.resting._timer is None


def test_on_battery_the_screen_is_drawn_less_often() -> None:
    plugged, battery = (FlushPace(0.1, on_battery=lambda on=on: on) for on in (False, True))
    assert (plugged.observe(0.001), battery.observe(0.001)) == (0.1, 0.2)

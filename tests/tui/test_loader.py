"""The engine's loader by itself: no app, no screen; the messages are given back by hand."""

import dataclasses
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from app_driver import Driver, GatedEngine, Recipe
from fakes import ScriptedEngine, ScriptedRecipe, engine_info, model_info
from textual.message import Message

from specllama.engine.host import EngineHost, InlineHost
from specllama.errors import BadGguf
from specllama.events import Event, Finished, LoadProgress, Measuring
from specllama.settings.params import GenerateParams
from specllama.tui.bridge import Drained, FlushPace, Rest
from specllama.tui.loader import EngineLoader, Pair, loading_words
from specllama.tui.messages import EngineFailed, EngineLoading, EngineReady

LIMIT_S = 20.0
BROKEN = BadGguf("cut short", "pull it again")


class Told:
    """A loader of these recipes, and what it told."""

    def __init__(self, wanted: Pair | None, **recipes: Any) -> None:
        self.messages: queue.Queue[Message] = queue.Queue()
        self.loader = EngineLoader(
            wanted, lambda target, draft: recipes[target], InlineHost, self.messages.put
        )

    def until(self, kind: type[Message]) -> Message:
        while True:
            told = self.messages.get(timeout=LIMIT_S)
            assert isinstance(told, EngineLoading | EngineReady | EngineFailed)
            self.loader.apply(told)
            if isinstance(told, kind):
                return told


def named(name: str) -> Recipe:
    return Recipe(ScriptedEngine(["Ok."], engine_info(target=model_info(name=name), draft=None)))


def loaded(loader: EngineLoader) -> str:
    return loader.info.target.name if loader.ready else ""


def test_nothing_is_known_before_it_is_taken() -> None:
    told = Told(("one", None), one=named("one"))
    loader = told.loader
    assert (loader.possible, loader.ready, loader.info) == (True, False, None)
    loader.load()
    message = told.messages.get(timeout=LIMIT_S)
    while not isinstance(message, EngineReady):
        message = told.messages.get(timeout=LIMIT_S)
    assert not loader.ready
    loader.apply(message)
    assert loaded(loader) == "one"


def test_no_model_is_a_failure_with_a_next_step() -> None:
    told = Told(None)
    assert not told.loader.possible
    told.loader.load()
    failed = told.until(EngineFailed)
    assert isinstance(failed, EngineFailed)
    assert failed.error.hint == "press F6 to choose one"


def test_a_failed_switch_goes_back() -> None:
    told = Told(("one", None), one=named("one"), two=Recipe(error=BROKEN))
    told.loader.load()
    told.until(EngineReady)
    told.loader.switch("two", "its draft")
    assert told.loader.wanted == ("two", "its draft")
    failed = told.until(EngineFailed)
    assert isinstance(failed, EngineFailed)
    assert failed.kept
    told.until(EngineReady)
    assert told.loader.wanted == ("one", None)
    assert loaded(told.loader) == "one"


def test_with_nothing_to_go_back_to_the_last_choice_is_tried_again() -> None:
    two = named("two")
    two.error = BROKEN
    told = Told(("one", None), one=Recipe(error=BROKEN), two=two)
    told.loader.load()
    told.until(EngineFailed)
    told.loader.switch("two", None)
    told.until(EngineFailed)
    assert told.loader.failed
    two.error = None
    told.loader.load()
    told.until(EngineReady)
    assert loaded(told.loader) == "two"


def test_a_load_that_was_pushed_aside_says_nothing() -> None:
    gate = threading.Event()

    def slow(progress: Callable[[Event], None], /) -> ScriptedEngine:
        progress(LoadProgress("target", "slow.gguf", 0.5))
        gate.wait(LIMIT_S)
        raise BROKEN

    told = Told(("slow", None), slow=slow, quick=named("quick"))
    told.loader.load()
    while told.loader.progress is None:
        told.until(EngineLoading)
    told.loader.switch("quick", None)
    told.until(EngineReady)
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "specllama-load":
            thread.join(LIMIT_S)
    assert told.messages.empty()
    assert loaded(told.loader) == "quick"


def test_what_a_load_measures_is_shown() -> None:
    gate = threading.Event()

    def slow(progress: Callable[[Event], None], /) -> ScriptedEngine:
        progress(Measuring("checking", 2, 4, 0.4, 20.0))
        gate.wait(LIMIT_S)
        raise BROKEN

    told = Told(("slow", None), slow=slow)
    told.loader.load()
    while told.loader.progress is None:
        told.until(EngineLoading)
    assert loading_words(told.loader.progress) == "first-use check 2 of 4, about 20 s"
    gate.set()
    told.until(EngineFailed)


def test_what_is_measured_at_rest_is_shown_and_changes_what_is_known() -> None:
    told = Told(("one", None), one=named("one"))
    told.loader.load()
    told.until(EngineReady)
    tell = told.loader.host.on_event
    assert tell is not None
    tell(Measuring("checking", 1, 4, 0.1))
    told.until(EngineLoading)
    assert loaded(told.loader) == "one"
    assert loading_words(told.loader.progress) == "first-use check 1 of 4"
    engine = told.loader.host.engine  # type: ignore[attr-defined]
    engine.info = dataclasses.replace(engine.info, exactness="bitwise up to 65 rows")
    tell(Measuring(over=True))
    told.until(EngineLoading)
    assert told.loader.progress is None
    assert told.loader.info.exactness == "bitwise up to 65 rows"


def test_an_error_that_nobody_foresaw_is_a_failure_too() -> None:
    told = Told(("one", None), one=Recipe(error=ValueError("odd")))
    told.loader.load()
    failed = told.until(EngineFailed)
    assert isinstance(failed, EngineFailed)
    assert failed.error.message == "ValueError: odd"


def test_a_batch_with_nothing_but_the_end_is_not_empty() -> None:
    # the drain may fall between the last event and the end of the thread
    last = list(ScriptedEngine(["Hi."]).generate("x", GenerateParams(seed=1)))[-1]
    assert isinstance(last, Finished)
    assert not Drained()
    assert Drained(finished=last)


def test_every_field_makes_a_batch_worth_showing_but_the_error() -> None:
    # an error always comes with ``ended``
    for field in fields(Drained):
        if field.name != "error":
            assert Drained(**{field.name: "x"}), field.name  # type: ignore[arg-type]


def test_flushes_keep_to_their_share_of_a_core() -> None:
    pace = FlushPace(0.2, longest_s=0.8, share=0.1)
    for _ in range(40):
        period = pace.observe(0.05)
    assert abs(0.05 / period - 0.1) < 0.001
    for _ in range(40):
        period = pace.observe(0.001)
    assert period == 0.2
    for _ in range(40):
        period = pace.observe(1.0)
    assert period == 0.8


def test_one_slow_flush_hardly_slows_the_next() -> None:
    pace = FlushPace(0.2, share=0.1)
    for _ in range(10):
        pace.observe(0.01)
    assert pace.observe(0.05) < 0.3
    for _ in range(5):
        period = pace.observe(0.01)
    assert period == 0.2


def test_figures_rest_but_the_last_ones_are_drawn() -> None:
    now = 0.0
    rest = Rest(1.0, clock=lambda: now)
    assert rest.over(True)
    now = 0.4
    assert not rest.over(True)
    now = 1.0
    assert rest.over(False)
    now = 9.0
    assert not rest.over(False)


# -- a model at rest is unloaded; the conversation stays --


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

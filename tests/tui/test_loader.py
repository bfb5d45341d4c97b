"""The engine's loader by itself: no app, no screen; the messages are given back by hand."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable
from typing import Any

from app_driver import Recipe
from fakes import ScriptedEngine, engine_info, model_info
from textual.message import Message

from specllama.engine.host import InlineHost
from specllama.errors import BadGguf
from specllama.events import Event, LoadProgress, Measuring
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
    assert loader.info is not None
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
    assert told.loader.info is not None
    assert told.loader.info.exactness == "bitwise up to 65 rows"


def test_an_error_that_nobody_foresaw_is_a_failure_too() -> None:
    told = Told(("one", None), one=Recipe(error=ValueError("odd")))
    told.loader.load()
    failed = told.until(EngineFailed)
    assert isinstance(failed, EngineFailed)
    assert failed.error.message == "ValueError: odd"

"""The files of a pair are opened in a thread; the caller hears of it in its own."""

import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specllama.cancel import Cancel
from specllama.engine import opening
from specllama.engine.opening import OpeningPair
from specllama.errors import Cancelled, CannotLoad
from specllama.events import Event, LoadProgress, Notice

READING = LoadProgress("target", "m.gguf", 0.0)


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Puts an opener in the place of all."""

    def put(open_pair: Callable[..., Any]) -> None:
        monkeypatch.setattr(opening, "resolve_pair", lambda *names: (Path("m.gguf"), None))
        module = SimpleNamespace(open_gguf=open_pair)
        monkeypatch.setattr(opening, "import_module", lambda name: module)

    return put


class Opened(SimpleNamespace):
    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_the_block_begins_with_the_weights_and_events_come_to_its_thread(opens: Any) -> None:
    goes_on, opened = threading.Event(), Opened()
    heard: list[tuple[Event, int]] = []

    def open_pair(target: Path, draft: None, options: Any, report: Any, stop: Cancel) -> Opened:
        report(Notice("first", topic="x"))
        report(READING)
        assert goes_on.wait(20)
        report(LoadProgress("target", "m.gguf", 1.0))
        return opened

    opens(open_pair)
    before = sys.getswitchinterval(), gc.isenabled()
    with OpeningPair("m", on_progress=lambda e: heard.append((e, threading.get_ident()))) as one:
        assert [event for event, _ in heard] == [Notice("first", topic="x"), READING]
        assert not gc.isenabled()
        goes_on.set()
        assert one.pair() is opened
    assert len(heard) == 3
    assert {thread for _, thread in heard} == {threading.get_ident()}
    assert (sys.getswitchinterval(), gc.isenabled()) == before
    assert not opened.closed


def test_what_is_not_taken_is_closed(opens: Any) -> None:
    opened = Opened()

    def open_pair(target: Path, draft: None, options: Any, report: Any, stop: Cancel) -> Opened:
        report(READING)
        return opened

    opens(open_pair)
    with pytest.raises(ZeroDivisionError), OpeningPair("m"):
        raise ZeroDivisionError
    assert opened.closed == 1


def test_leaving_the_block_ends_what_is_being_read(opens: Any) -> None:
    ended = threading.Event()

    def open_pair(target: Path, draft: None, options: Any, report: Any, stop: Cancel) -> Opened:
        report(READING)
        while not stop.is_set():
            ended.wait(0.001)
        ended.set()
        raise Cancelled("stopped")

    opens(open_pair)
    with pytest.raises(ZeroDivisionError), OpeningPair("m"):
        raise ZeroDivisionError
    assert ended.is_set()


def test_a_cancel_and_an_error_reach_the_caller(opens: Any) -> None:
    cancel = Cancel()

    def open_pair(target: Path, draft: None, options: Any, report: Any, stop: Cancel) -> Opened:
        report(READING)
        while not stop.is_set():
            cancel.wait(0.001)
        raise Cancelled("stopped")

    opens(open_pair)
    with OpeningPair("m", cancel=cancel) as one:
        cancel.set()
        with pytest.raises(Cancelled):
            one.pair()

    def refuse(*args: Any) -> Opened:
        raise CannotLoad("no")

    opens(refuse)
    with OpeningPair("m") as one, pytest.raises(CannotLoad, match="no"):
        one.pair()


def test_a_caller_that_cannot_hear_ends_it(opens: Any) -> None:
    opened = Opened()

    def open_pair(target: Path, draft: None, options: Any, report: Any, stop: Cancel) -> Opened:
        report(READING)
        return opened

    opens(open_pair)

    def fails(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        OpeningPair("m", on_progress=fails).__enter__()
    assert opened.closed == 1
    assert gc.isenabled()

"""What an engine in a child process measures at rest: after a reply, until anything is asked."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from fakes import Reply, ScriptedEngine, engine_info

from specllama.backend import cores
from specllama.cancel import Cancel
from specllama.engine import serving
from specllama.engine.host import EngineHost
from specllama.events import Event, Finished, Measuring
from specllama.interface import Stepped
from specllama.settings.params import GenerateParams

REST_S = 0.05
PARAMS = GenerateParams(seed=1)


@dataclass(frozen=True)
class NewModel:
    """A model that nothing was measured of. ``takes_s``: to measure it."""

    takes_s: float
    crowded: bool = False

    def __call__(self, progress: Callable[[Event], None], /) -> Stepped:
        serving.REST_S = serving.KEEP_S = REST_S
        cores.Others.busy = lambda one, most=None: self.crowded  # type: ignore[method-assign]
        return Unmeasured(self.takes_s)


class Unmeasured(ScriptedEngine):
    def __init__(self, takes_s: float) -> None:
        super().__init__((Reply("one two three"),))
        self.info = replace(engine_info(), exact_rows=0)
        self._takes_s = takes_s
        self._replies = 0

    @property
    def unmeasured(self) -> bool:  # type: ignore[override]
        return self._replies > 0 and not self.info.exact_rows

    def begin(self, ready: Any, *, cancel: Cancel | None = None) -> int:
        self._replies += 1
        return super().begin(ready, cancel=cancel)

    def measure(self, report: Any = None, *, cancel: Cancel | None = None) -> bool:
        report(Measuring("checking", 1, 4, 0.0))
        if cancel.wait(self._takes_s):
            return False
        self.info = replace(self.info, exact_rows=65)
        return True


class Heard:
    """What a host tells beside replies."""

    def __init__(self) -> None:
        self.events: list[Measuring] = []
        self.moved = threading.Condition()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Measuring):
            with self.moved:
                self.events.append(event)
                self.moved.notify_all()

    def wait(self, n: int, seconds: float = 20.0) -> bool:
        with self.moved:
            return self.moved.wait_for(lambda: len(self.events) >= n, seconds)


def ask(host: EngineHost) -> float:
    """Seconds until a whole reply is there."""
    begin = time.monotonic()
    assert isinstance(list(host.generate("Hello", PARAMS))[-1], Finished)
    return time.monotonic() - begin


def test_it_is_measured_after_a_reply_and_told() -> None:
    heard = Heard()
    with EngineHost(NewModel(0.05), on_event=heard) as host:
        host.start()
        assert not heard.wait(1, 0.5), "nothing was asked yet"
        ask(host)
        assert heard.wait(2)
        assert [one.over for one in heard.events] == [False, True]
        assert host.info.exact_rows == 65
        ask(host)
        assert not heard.wait(3, 0.5), "once is enough"


def test_a_request_ends_it_at_once_and_it_begins_anew() -> None:
    heard = Heard()
    with EngineHost(NewModel(3600.0), on_event=heard) as host:
        host.start()
        plain = ask(host)
        assert heard.wait(1)
        assert ask(host) < plain + 5.0
        assert heard.wait(3), "it is begun again"
        assert [one.over for one in heard.events[:3]] == [False, True, False]
        assert host.info.exact_rows == 0


def test_each_request_that_ends_it_doubles_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Engine:
        unmeasured, info = True, None

        def keep(self) -> None: ...

        def measure(self, report: Any, cancel: Cancel) -> bool:
            cancel.set()
            return False

    class Ready:
        def get(self, timeout: float = 0.0) -> None:
            waits.append(timeout)
            if len(waits) % 3:
                raise queue.Empty

        def empty(self) -> bool:
            return True

    monkeypatch.setattr(cores.Others, "busy", lambda one: False)
    link = serving.Link(None)  # type: ignore[arg-type]
    link.ready = Ready()  # type: ignore[assignment]
    for _ in range(14):
        serving._next(Engine(), link)  # type: ignore[arg-type]
    assert waits[1::3] == [2.0 * 2**i for i in range(9)] + [600.0] * 5


def test_it_can_be_skipped() -> None:
    heard = Heard()
    with EngineHost(NewModel(3600.0), on_event=heard) as host:
        host.start()
        ask(host)
        assert heard.wait(1)
        host.skip()
        assert heard.wait(2)
        ask(host)
        assert not heard.wait(3, 0.7)


def test_closing_does_not_wait_for_it() -> None:
    heard = Heard()
    with EngineHost(NewModel(3600.0), on_event=heard) as host:
        host.start()
        ask(host)
        assert heard.wait(1)
        begin = time.monotonic()
        host.close()
        assert time.monotonic() - begin < 3.0, "it ended by itself, nobody killed it"


def test_a_crowded_minute_is_waited_for() -> None:
    heard = Heard()
    with EngineHost(NewModel(0.05, crowded=True), on_event=heard) as host:
        host.start()
        ask(host)
        assert not heard.wait(1, 0.7)


@pytest.mark.parametrize(("load", "crowd"), [(0.3, False), (4.0, False), (4.4, False), (5.0, True)])
def test_a_load_above_the_processors_is_a_crowd(
    load: float, crowd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores.os, "getloadavg", lambda: (load, 9.0, 9.0))
    monkeypatch.setattr(cores.os, "cpu_count", lambda: 4)
    assert cores.crowded() is crowd

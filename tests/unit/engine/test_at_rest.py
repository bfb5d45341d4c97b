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
from specllama.engine.pulse import Pulse
from specllama.errors import Cancelled
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
    link = serving.Link(None, Pulse())  # type: ignore[arg-type]
    link.ready = Ready()  # type: ignore[assignment]
    for _ in range(14):
        serving._next(Engine(), link)  # type: ignore[arg-type]
    assert waits[1::3] == [2.0 * 2**i for i in range(9)] + [600.0] * 5


class Crowd:
    """An engine whose requests write a token a step, for 0.1 s of ``clock``; measuring takes 20
    passes of 0.3 s."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock
        self.info = replace(engine_info(), exact_rows=0)
        self.patience_s = 1.0
        self.left: dict[int, int] = {}  # tokens
        self.passes: list[int] = []  # requests in each pass, 0 for what measures
        self.known = True
        self.on_pass: dict[int, Callable[[], object]] = {}  # by how many passes came before

    @property
    def free(self) -> bool:
        return len(self.left) < 4

    def begin(self, tokens: int, cancel: Cancel) -> int:
        self.left[id := len(self.passes) * 10 + len(self.left)] = tokens
        return id

    def ran(self, requests: int, seconds: float) -> None:
        self.on_pass.get(len(self.passes), lambda: None)()
        self.passes.append(requests)
        self.clock[0] += seconds

    def step(self) -> list[tuple[int, Event]]:
        self.ran(len(self.left), 0.1)
        self.left = {id: n - 1 for id, n in self.left.items()}
        over = [id for id, n in self.left.items() if not n]
        for id in over:
            del self.left[id]
        return [(id, Finished("length", seed=1, n_ctx=8)) for id in over] + [
            (id, Measuring("a token")) for id in self.left
        ]

    def measure(self, report: Callable[[Event], None], *, times: bool) -> bool:
        assert not times, "no time is taken beside others"
        try:
            for i in range(20):
                report(Measuring("checking", 1, 4, i / 20))
                self.ran(0, 0.3)
        except Cancelled:
            return False
        if self.known:
            self.info = replace(self.info, exact_rows=65)
        return self.known


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> tuple[Crowd, serving.Link, Callable[[], None]]:
    clock = [0.0]
    monkeypatch.setattr(serving.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(serving.Link, "flush", lambda one: None)
    engine, link = Crowd(clock), serving.Link(None, Pulse())  # type: ignore[arg-type]
    return engine, link, serving._Pump(engine, link, Pulse()).run  # type: ignore[arg-type]


def ready(link: serving.Link, *tokens: int) -> None:
    for i, n in enumerate(tokens, len(link.cancels)):
        link.cancels[i] = Cancel()
        link.begins((i, n))


def closes(link: serving.Link) -> None:
    link.closing = True
    link.begins(None)


def test_a_crowd_is_measured_between_its_passes_for_as_long_as_these_take(
    crowd: tuple[Crowd, serving.Link, Callable[[], None]],
) -> None:
    engine, link, run = crowd
    ready(link, 200, 200, 200)
    engine.on_pass[150] = lambda: closes(link)
    run()
    first = engine.passes.index(0)
    assert 20 <= first <= 22, "once several had waited for each other for two seconds"
    last = len(engine.passes) - engine.passes[::-1].index(0)
    assert engine.passes[first:last].count(0) == 20
    assert 2.5 <= engine.passes[first:last].count(3) / 20 <= 4.0, "three passes take as long"
    assert set(engine.passes[last:]) == {3}
    assert engine.info.exact_rows == 65
    assert [kind for kind, *_ in link._said if kind != "event"] == ["ready"]


def test_a_request_alone_does_not_wait_for_what_is_measured(
    crowd: tuple[Crowd, serving.Link, Callable[[], None]],
) -> None:
    engine, link, run = crowd
    ready(link, 30, 300)
    engine.on_pass[60] = lambda: ready(link, 300)  # who comes meanwhile begins at once
    engine.on_pass[150] = lambda: closes(link)
    run()
    assert engine.passes.count(0) == 20
    passes = "".join(map(str, engine.passes))
    before, alone, behind = passes.partition("1" * 20)
    assert alone
    assert before.count("0") >= 2, "it had begun"
    assert "0222" in behind


def test_it_is_not_tried_twice_and_ends_with_the_engine(
    crowd: tuple[Crowd, serving.Link, Callable[[], None]],
) -> None:
    engine, link, run = crowd
    engine.known = False
    ready(link, 300, 300)
    engine.on_pass[280] = lambda: closes(link)
    run()
    assert engine.passes.count(0) == 20
    engine.passes.clear()
    engine.left.clear()
    link.closing = False
    engine.on_pass = {40: lambda: closes(link)}
    ready(link, 300, 300)
    serving._Pump(engine, link, Pulse()).run()  # type: ignore[arg-type]
    assert 0 < engine.passes.count(0) < 12, "the engine closed meanwhile"


def test_it_closes_while_nothing_runs(
    crowd: tuple[Crowd, serving.Link, Callable[[], None]],
) -> None:
    engine, link, run = crowd
    ready(link, 22, 24)
    engine.on_pass[34] = lambda: closes(link)
    run()
    assert engine.passes[28:34] == [0] * 6, "both had ended"
    assert engine.passes.count(0) < 20


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

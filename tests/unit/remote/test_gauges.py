"""A server by its counters: live, by depth, over time."""

from __future__ import annotations

import itertools

import pytest
from other_engines import running, script

from specllama.errors import EngineError
from specllama.remote import board
from specllama.remote.address import Address
from specllama.remote.answers import Counters
from specllama.remote.board import Gauges, event_of
from specllama.remote.remote_engine import watched


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second goes by with every look."""
    seconds = itertools.count(100.0)
    monkeypatch.setattr(board, "monotonic", lambda: next(seconds))


def lines(watch: Gauges, width: int = 80) -> list[str]:
    found = [line.text for line in watch.lines(width)]
    assert all(len(line) <= width for line in found)
    return found


def test_acceptance_of_late_by_depth_and_over_time(clock: None) -> None:
    watch = Gauges("vLLM 0.32.0 at box")
    looks = [Counters(100, 400, 300, (90, 80, 70, 60), 1000, 0, 0),
             Counters(110, 440, 320, (100, 85, 71, 64), 1040, 2, 1),
             Counters(120, 480, 360, (110, 95, 81, 74), 1090, 3, 0)]  # fmt: skip
    for look in looks:
        watch.take(event_of("vLLM 0.32.0", "tiny", look))
    shown = lines(watch)
    assert shown[0] == "vLLM 0.32.0 at box: 3 running, 0 waiting, 45 tok/s"
    assert shown[1] == "of late: kept 75% (60 of 80), 4.00 tokens a pass that drafted"
    assert shown[2] == "since it was started: kept 75% (360 of 480)"
    assert shown[4] == "kept by depth, of late, of 20 drafts"
    assert [line.split()[-1] for line in shown[5:9]] == ["100%", "75%", "55%", "70%"]
    assert shown[-4:] == [
        "kept     ▄█ up to 100%",
        "tok/s    ▆█ up to 50",
        "running  ▅█ up to 3",
        "waiting  █  up to 1",
    ]
    assert lines(watch, 40)[:2] == ["vLLM 0.32.0 at box", "3 running, 0 waiting, 45 tok/s"]
    assert len(lines(watch, 40)) == len(shown) + 1


def test_what_is_not_counted_is_not_shown_as_nothing(clock: None) -> None:
    watch = Gauges("SGLang 0.5.23 at box")
    assert lines(watch) == ["SGLang 0.5.23 at box: not heard of yet"]
    watch.take(event_of("", "", Counters(per_round=2.4)))
    shown = lines(watch)
    assert shown[0] == "SGLang 0.5.23 at box: – running, – waiting"
    assert shown[1] == "of late: 2.40 tokens a pass"
    assert shown[2] == "since it was started: kept –"
    anew = Gauges("box")
    anew.take(event_of("", "", Counters(10, 40, 30, (10,), 50, 0, 0)))
    anew.take(event_of("", "", Counters(1, 4, 0, (0,), 5, 0, 0)))  # it was started again
    assert "kept –" in lines(anew)[1]


@pytest.mark.parametrize("name", ["vllm-0.32.0-draft", "llama-server-b9210", "sglang-0.5.23"])
def test_a_server_is_watched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specllama.remote.foreign.EVERY_S", 0.0)
    with running(name) as server:
        watch, events = watched(Address(server.url))
        for event in itertools.islice(events, 2):
            watch.take(event)
    assert "0 running, 0 waiting" in watch.lines(100)[0].text


def test_one_that_counts_nothing_says_so_and_what_to_do() -> None:
    with running("ollama-0.33.0") as server:
        _, events = watched(Address(server.url))
        with pytest.raises(EngineError, match="tells no figures of its drafting"):
            next(events)
    told = script("llama-server-b9210")
    del told["get"]["/metrics"]
    with running(told) as server:
        _, events = watched(Address(server.url))
        with pytest.raises(EngineError) as caught:
            next(events)
        assert caught.value.hint == "start it with --metrics"

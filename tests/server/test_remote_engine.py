"""``RemoteEngine``: a server is an engine like any other."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from servers import Serving, serving, table

from specllama.cancel import Cancel
from specllama.errors import EngineError, PromptTooLong, UsageError
from specllama.events import Event, Finished, PrefillProgress, RoundDone, Started, Timings
from specllama.interface import Message
from specllama.remote.address import Address
from specllama.remote.remote_engine import RemoteEngine, open_remote
from specllama.server.guard import Access
from specllama.settings.params import GenerateParams, SamplingParams

PARAMS = GenerateParams(
    seed=4, max_tokens=30, sampling=SamplingParams(temperature=0.7, logit_bias={0: -100.0})
)
TURNS = [Message("user", "the rain")]


def untimed(event: Event) -> Any:
    if isinstance(event, Finished):
        return replace(event, timings=Timings(), cached_n=0)
    return event if not isinstance(event, RoundDone) else event.emitted


def test_a_server_says_what_the_engine_says(server: Serving) -> None:
    with RemoteEngine(Address(server.url)) as engine:
        assert engine.info == server.host.info
        assert engine.count_tokens(TURNS) == engine.count_tokens("the rain") == 8
        plain = PARAMS.replace(proposer="none")
        remote = list(engine.generate(TURNS, plain))
        here = list(server.host.generate(TURNS, plain))
        raw = [2, 9, 1, 7, 10, 3, 5, 6]  # no chat: its noise counts from its own first token
        ids, ids_here = (list(one.generate(raw, plain)) for one in (engine, server.host))
    # but for how much of the prompt was cached, which the second found
    cached = (Started, PrefillProgress)
    told = [[untimed(e) for e in es if not isinstance(e, cached)] for es in (remote, here)]
    assert told[0] == told[1]
    assert isinstance(ids[-1], Finished)
    assert isinstance(ids_here[-1], Finished)
    assert ids[-1].token_ids == ids_here[-1].token_ids


def test_a_reply_is_told_while_it_is_written(server: Serving) -> None:
    with RemoteEngine(Address(server.url)) as engine:
        events = engine.generate(TURNS, PARAMS.replace(proposer="none", max_tokens=1500))
        begin = time.monotonic()
        at = [time.monotonic() - begin for event in events if isinstance(event, RoundDone)]
    assert at[len(at) // 2] < 0.9 * at[-1]


def test_cancelling_keeps_what_was_written(server: Serving) -> None:
    cancel = Cancel()
    with RemoteEngine(Address(server.url)) as engine:
        events: list[Event] = []
        for event in engine.generate(TURNS, PARAMS.replace(max_tokens=1500), cancel=cancel):
            events.append(event)
            if isinstance(event, RoundDone):
                cancel.set()
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "cancelled"
    assert 0 < len(events[-1].token_ids) < 1500


def test_errors_keep_their_kind(server: Serving) -> None:
    with RemoteEngine(Address(server.url)) as engine:
        with pytest.raises(PromptTooLong):
            list(engine.generate("x" * 5000, PARAMS))
        with pytest.raises(UsageError):
            list(engine.generate("", PARAMS))
    with pytest.raises(EngineError, match="no specllama answers"):
        RemoteEngine(Address("http://127.0.0.1:9"))
    with pytest.raises(UsageError, match="no address"):
        RemoteEngine(Address("ftp://here"))


def test_it_is_recognised_and_asked_as_other_engines_are(server: Serving) -> None:
    with open_remote(server.url) as engine:
        assert isinstance(engine, RemoteEngine)
        assert engine.kind.name == "specllama"
        assert engine.kind.switches
        before = engine.counters()
        on, off = (engine.ask(TURNS, PARAMS, speculation=on, stream=on) for on in (True, False))
        after = engine.counters()
    assert on.text == off.text
    assert on.tokens == off.tokens == 30
    assert off.draft is None
    assert after.generated is not None
    assert after.generated - (before.generated or 0) == 60


def test_a_proxy_is_not_asked_the_way_to_this_machine(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with RemoteEngine(Address(server.url)) as engine:
        assert engine.count_tokens("the rain") > 0


def test_why_a_server_does_not_serve(tmp_path: Path) -> None:
    with serving(table(tmp_path), access=Access(keys=("open",)), most=0) as server:
        with pytest.raises(EngineError, match="the key is missing or wrong") as caught:
            RemoteEngine(Address(server.url, "shut"))
        assert caught.value.hint == "give one of its keys as SPECLLAMA_API_KEY"
        server.queue.lanes = 0  # as if all were taken
        with RemoteEngine(Address(server.url, "open")) as engine:
            with pytest.raises(
                EngineError, match="at most 0 requests of one client wait"
            ) as caught:
                list(engine.generate(TURNS, PARAMS))
            assert caught.value.hint == "try again in a moment"


def test_a_server_that_loads_is_waited_for(tmp_path: Path) -> None:
    with (
        serving(table(tmp_path), wait=False) as server,
        RemoteEngine(Address(server.url)) as engine,
    ):
        assert engine.info == server.host.info


def test_a_request_waits_for_the_first_load_as_for_any_other(tmp_path: Path) -> None:
    with serving(table(tmp_path), wait=False) as server:
        assert server.http.get("/health").status_code == 503
        assert server.chat()["usage"]["completion_tokens"] > 0

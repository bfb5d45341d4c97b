"""An engine that ends no pass while work waits: ended, started again, its request known again."""

import asyncio
import contextlib
import gc
import json
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from fakes import ScriptedEngine, engine_info
from servers import Serving, serving, until

from specllama.engine.host import EngineHost
from specllama.errors import EngineDied, EngineError, EngineStuck
from specllama.events import Event, Finished, PrefillProgress, Started, TextDelta
from specllama.interface import Message, Prompt
from specllama.server import exchange
from specllama.server.anthropic import MessagesDialect
from specllama.server.chat_completions import (
    ChatDialect,
    ChatRequest,
    CompletionDialect,
    CompletionRequest,
)
from specllama.server.dialect import Dialect, Job, Reply
from specllama.server.native import NativeCompletion, NativeDialect
from specllama.server.ollama_api import OllamaDialect
from specllama.server.responses import ResponsesDialect, ResponsesRequest
from specllama.server.tools import Tool, ToolReader, ToolUse
from specllama.settings.params import GenerateParams

CHAT = "/v1/chat/completions"
PATIENCE_S = 1.5


def text_of(prompt: Prompt) -> str:
    return "".join(p.content if isinstance(p, Message) else str(p) for p in prompt)


class Hanging(ScriptedEngine):
    """Stands still in a pass, or in preparing, where a prompt says so."""

    def prepare(self, prompt: Prompt, params: GenerateParams, *, cancel: Any = None) -> Any:
        if "hang unread" in text_of(prompt):
            time.sleep(600)
        return super().prepare(prompt, params, cancel=cancel)

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        params: GenerateParams,
        *,
        cancel: threading.Event | None = None,
    ) -> Iterator[Event]:
        if "hang" in text_of(prompt):
            time.sleep(600)
        yield from super().generate(prompt, params, cancel=cancel)

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        return [len(text)]


@dataclass(frozen=True)
class Hangs:
    """A recipe that crosses into the child; it takes as long to load as ``gate`` is missing."""

    gate: Path
    patience_s: float = PATIENCE_S

    def __call__(self, progress: Callable[[Event], None], /) -> Hanging:
        while not self.gate.exists():
            time.sleep(0.02)
        engine = Hanging(["Hello there."], engine_info(lanes=2))
        engine.patience_s = self.patience_s
        return engine


def asking(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4}


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    (tmp_path / "gate").touch()
    return tmp_path / "gate"


@pytest.fixture
def server(gate: Path) -> Iterator[Serving]:
    with serving(Hangs(gate)) as running:
        yield running


@pytest.mark.parametrize("text", ["hang", "hang unread"])
def test_a_stuck_engine_is_replaced_and_its_request_refused(
    server: Serving, gate: Path, text: str
) -> None:
    first = server.host.pid
    assert server.post(CHAT, asking("Hi")).status_code == 200  # how long a pass may take is told
    gate.unlink()  # the next engine loads until it is there
    refused = server.post(CHAT, asking(text))
    assert refused.status_code == 500
    error = refused.json()["error"]
    assert error["code"] == "engine_died"
    assert "ended" in error["message"]
    assert refused.headers["x-should-retry"] == "false"
    health = server.http.get("/health")
    assert health.status_code == 503
    assert health.json()["error"]["code"] == "restarting"
    gate.touch()
    until(lambda: server.http.get("/health").status_code == 200)  # though nothing was asked
    assert server.queue.restarts == 1
    assert server.host.pid not in (first, None)
    again = server.post(CHAT, asking(text))
    assert again.status_code == 500
    assert again.headers["x-should-retry"] == "false"
    assert "did not survive" in again.json()["error"]["message"]
    assert server.queue.restarts == 1, "it was not tried again"
    assert server.post(CHAT, asking("the rain")).status_code == 200


def test_who_was_only_there_may_ask_again(server: Serving) -> None:
    """One is being written, the other is prepared: whose fault it is is not known."""
    heard: list[httpx2.Response] = []

    def ask(text: str) -> None:
        heard.append(server.post(CHAT, asking(text)))

    threads = [threading.Thread(target=ask, args=(text,)) for text in ("hang", "the rain")]
    for thread in threads:
        thread.start()
        until(lambda: bool(server.queue.running))
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in heard] == [500, 500]
    assert server.post(CHAT, asking("the rain")).status_code == 200


def test_who_was_there_is_tried_alone(server: Serving) -> None:
    """Two requests come again and again together, as clients repeat them: only one is at fault."""
    queue = server.queue
    together: list[int] = []

    def both() -> list[int]:
        codes: dict[str, int] = {}

        def ask(text: str) -> None:
            codes[text] = server.post(CHAT, asking(text)).status_code

        threads = [threading.Thread(target=ask, args=(text,)) for text in ("hang", "the rain")]
        for thread in threads:
            thread.start()
            until(lambda: bool(queue.running))
            time.sleep(0.1)
            together.append(len(queue.running))
        for thread in threads:
            thread.join()
        return [codes["hang"], codes["the rain"]]

    assert both() == [500, 500]
    assert together == [1, 2]
    assert both() == [500, 200], "the other one waited, and was written alone"
    assert together[2:] == [1, 1]
    assert queue.restarts == 2
    assert server.post(CHAT, asking("hang")).status_code == 500
    assert queue.restarts == 2, "it is refused now"
    assert server.post(CHAT, asking("the rain")).status_code == 200


def test_two_replies_to_one_request_are_one_death(server: Serving) -> None:
    body = {"prompt": ["hang", "hang"], "max_tokens": 4}
    queue = server.queue
    answers: list[httpx2.Response] = []

    def ask() -> None:
        answers.append(server.post("/v1/completions", body))

    asker = threading.Thread(target=ask)
    asker.start()
    until(lambda: len(queue.running) == 2 or bool(answers))
    asker.join()
    assert answers[0].status_code == 500
    assert [suspect.refused for suspect in queue._suspects.values()] == [False]


def test_health_and_calls_go_on_beside_a_stuck_pass(gate: Path) -> None:
    with serving(Hangs(gate, 60.0), drain_s=0.5) as server:

        def ask() -> None:
            with contextlib.suppress(httpx2.HTTPError):  # the server ends before it answers
                httpx2.post(server.url + CHAT, json=asking("hang"), timeout=30)

        threading.Thread(target=ask, daemon=True).start()
        until(lambda: bool(server.queue.running))
        assert server.http.get("/health").status_code == 200
        assert server.post("/tokenize", {"content": "four"}).json() == {"tokens": [4]}
        begin = time.monotonic()
    assert time.monotonic() - begin < 40, "a stuck engine kept the server from ending"


def test_a_stuck_child_is_one_readable_error(gate: Path) -> None:
    with EngineHost(Hangs(gate)) as host:
        with pytest.raises(EngineDied, match="no pass of the model ended for") as caught:
            list(host.generate("hang", GenerateParams(seed=1)))
        assert "next message" in (caught.value.hint or "")
        again = list(host.generate("Hi", GenerateParams(seed=1)))
        assert "".join(e.text for e in again if isinstance(e, TextDelta)) == "Hello there."


def test_a_stuck_error_keeps_what_it_says_across_processes() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(EngineStuck("m", "h", culprit=True)))
    assert (error.message, error.hint, error.culprit) == ("m", "h", True)


def test_whoever_waits_hears_of_an_engine_that_cannot_be_started(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(server.host, "start", broken)
        os.kill(server.host.pid or 0, 9)
        until(lambda: not server.host.ready)
        assert server.post(CHAT, asking("the rain")).status_code == 500
    assert server.post(CHAT, asking("the rain")).status_code == 200


def test_a_broken_pipe_holds_nobody_up(gate: Path) -> None:
    """The parent's end is closed, and the reader busy: whoever asks goes on at once."""
    with EngineHost(Hangs(gate), close_grace_s=0.2) as host:
        host.start()
        child = host._child
        held = threading.Event()
        child._answer(child.ask(lambda said: None, "call", "", "figures", ()), "end", None)
        child.ask(lambda said: held.wait(30), "generate", "", "Hi", GenerateParams(seed=1))
        told: list[Any] = []
        try:
            os.kill(host.pid or 0, 9)
            begin = time.monotonic()
            for _ in range(50):
                child.ask(told.append, "generate", "", "x" * 100_000, GenerateParams())
            assert time.monotonic() - begin < 25, "asking waited for the reader"
        finally:
            held.set()
        until(lambda: len(told) == 50)
        assert all(isinstance(error, EngineError) for _, error in told)


def test_a_connection_is_closed_after_its_last_send(gate: Path) -> None:
    """An engine that dies while the writer is within a send: the writer keeps its handle."""
    sending, go_on, closed = threading.Event(), threading.Event(), threading.Event()
    with EngineHost(Hangs(gate), close_grace_s=0.2) as host:
        host.start()
        child = host._child
        inner = child._conn

        class Slow:
            def send(self, message: Any) -> None:
                sending.set()
                go_on.wait(30)
                assert not closed.is_set(), "the connection was closed within a send"
                inner.send(message)

            def recv(self) -> Any:
                return inner.recv()

            def close(self) -> None:
                closed.set()
                inner.close()

        child._conn = Slow()  # type: ignore[assignment]
        child.ask(lambda said: None, "call", "", "figures", ())
        assert sending.wait(30)
        os.kill(host.pid or 0, 9)
        child.wait_gone()
        assert not closed.wait(0.2)
        go_on.set()
        assert closed.wait(30)


class Slow:
    """Loads for ever."""

    def __call__(self, progress: Callable[[Event], None], /) -> ScriptedEngine:
        time.sleep(600)
        raise AssertionError


def asked_in_vain(url: str) -> None:
    asked = {"messages": [{"role": "user", "content": "the rain"}]}
    with contextlib.suppress(httpx2.TransportError):  # it may be cut off
        answer = httpx2.post(f"{url}{CHAT}", json=asked, timeout=30)
        assert answer.status_code == 503, answer.text


def test_a_server_that_is_stopped_while_it_loads_says_nothing_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(Slow(), wait=False) as server:
        assert server.http.get("/health").status_code == 503
        waits = threading.Thread(target=asked_in_vain, args=(server.url,))
        waits.start()
        time.sleep(0.5)
    waits.join(60)
    assert not waits.is_alive()
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


# -- streams, never silent for long --


TOOLS = ToolUse((Tool("look", "", {"type": "object"}),))
STARTED = Started(900, 0, 4096, 1, "none", "match", 0, "")
FINISHED = Finished(
    reason="stop_token", text="", token_ids=(1, 2), seed=1, rounds=2, draft_n=0,
    draft_n_accepted=0, cut=0, prompt_n=900, cached_n=0, n_ctx=4096, proposer="none",
    verify="match", exactness="", acceptance_rate=None, mean_acceptance_length=None,
)  # fmt: skip
JOB = Job(("",), GenerateParams())
MODEL: Any = SimpleNamespace(name="m")
DIALECTS: dict[str, Callable[[], Dialect]] = {
    "chat": lambda: ChatDialect(ChatRequest(messages=[], stream=True), "m"),
    "completions": lambda: CompletionDialect(CompletionRequest(prompt="", stream=True), "m"),
    "responses": lambda: ResponsesDialect(ResponsesRequest(stream=True), JOB, MODEL),
    "native": lambda: NativeDialect(NativeCompletion(prompt=""), "m", GenerateParams()),
    "messages": lambda: MessagesDialect("m"),
    "ollama chat": lambda: OllamaDialect("m", chat=True),
    "ollama generate": lambda: OllamaDialect("m", chat=False),
}
# what comes of an engine, and after how many seconds: parts of a prompt, a queue, a held-back call
READING = [(0.0, STARTED), *((1.3, PrefillProgress(n, 900, 0)) for n in range(100, 1000, 100))]
QUEUED = [(11.0, STARTED)]
CALLING = [(0.1, STARTED), *((0.7, TextDelta(c)) for c in '<tool_call>{"name": "look", "x')]
END: list[tuple[float, Event]] = [(0.5, TextDelta("It rains.")), (0.2, FINISHED)]


class SlowExchange:
    """An exchange whose engine is as slow as a list says."""

    def __init__(self, told: Iterable[tuple[float, Event]], *, tools: bool = False) -> None:
        self.now = 0.0
        self.replies = [Reply(0, ToolReader(TOOLS) if tools else None)]
        self._at = 0.0
        self._told: list[tuple[float, Event]] = []
        for after, event in told:
            self._at += after
            self._told.append((self._at, event))

    @property
    def done(self) -> bool:
        return not self._told

    async def wait(self, seconds: float) -> bool:
        due = min(self._told[0][0], self.now + seconds)
        assert due > self.now or self._told[0][0] <= self.now, "it waits for nothing"
        self.now = max(due, self.now)
        return self._told[0][0] <= self.now

    def take(self) -> list[tuple[Reply, list[Event]]]:
        events = []
        while self._told and self._told[0][0] <= self.now:
            events.append(self._told.pop(0)[1])
        return [(self.replies[0], events)] if events else []


def streamed(
    slow: SlowExchange, dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[float, bytes]]:
    """When what was sent."""
    monkeypatch.setattr(exchange, "monotonic", lambda: slow.now)

    async def write(call: Callable[[], bytes], rounds: Iterable[Any]) -> bytes:
        return call()

    scribe: Callable[..., Awaitable[bytes]] = write

    async def sent() -> list[tuple[float, bytes]]:
        scope = {"path": "/", "state": {}}
        bodies = exchange._bodies(slow, dialect, slow.take(), scribe, scope)  # type: ignore[arg-type]
        return [(slow.now, body) async for body in bodies]

    return asyncio.run(sent())


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("told", [READING, QUEUED, CALLING], ids=["read", "queued", "call"])
def test_something_is_sent_every_five_seconds(
    name: str, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowExchange([*told, *END], tools=told is CALLING)
    sent = streamed(slow, DIALECTS[name](), monkeypatch)
    times = [0.0, *(at for at, body in sent if body)]  # the headers
    assert max(b - a for a, b in pairwise(times)) <= 5.0
    assert b"rains" not in b"".join(body for at, body in sent if at < slow._at - 1)
    assert len([at for at in times if 0 < at < slow._at - 1]) <= slow._at / exchange.PING_S


LONG = [(0.0, STARTED), *((1.3, PrefillProgress(n, 400, 0)) for n in range(1, 400))]
NEWS = {
    "chat": '"delta":{"content":""}',
    "completions": '"text":""',
    "responses": '"type":"response.in_progress"',
    "messages": '"type":"message_delta"',
}


@pytest.mark.parametrize("name", NEWS)
def test_clocks_that_hear_events_alone_hear_one_each_minute(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claude Code and Codex end a stream after 300 s without one; pings and comments are none."""
    sent = streamed(SlowExchange([*LONG, *END]), DIALECTS[name](), monkeypatch)
    before = [(at, body.decode()) for at, body in sent if at < 500]
    heard = [at for at, body in before if "data: " in body and '"ping"' not in body]
    assert max(b - a for a, b in pairwise([*heard, 520])) <= 65
    assert len(heard) <= 10
    assert all(NEWS[name] in body for at, body in before if at in heard[1:])
    assert b"rains" in b"".join(body for _, body in sent)


def test_pings_of_anthropic_come_behind_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = streamed(SlowExchange([*READING, *END]), MessagesDialect("m"), monkeypatch)
    wire = b"".join(body for _, body in sent).decode()
    kinds = [line[7:] for line in wire.splitlines() if line.startswith("event: ")]
    data = [json.loads(line[6:]) for line in wire.splitlines() if line.startswith("data: ")]
    assert [one["type"] for one in data] == kinds
    assert kinds[0] == "message_start"
    assert kinds.index("content_block_start") > 3
    assert set(kinds[1 : kinds.index("content_block_start")]) == {"ping"}
    assert ": still" not in wire


@pytest.mark.parametrize("name", ["ollama chat", "ollama generate"])
def test_each_line_of_ollama_is_a_part_of_the_reply(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = streamed(SlowExchange([*READING, *END]), DIALECTS[name](), monkeypatch)
    lines = [json.loads(line) for line in b"".join(body for _, body in sent).splitlines()]
    texts = [one["message"]["content"] if "chat" in name else one["response"] for one in lines]
    assert "".join(texts) == "It rains."
    assert texts[:2] == ["", ""]
    assert [one["done"] for one in lines] == [False] * (len(lines) - 1) + [True]

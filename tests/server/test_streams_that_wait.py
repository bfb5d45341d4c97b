"""A stream is never silent for long, whatever the engine does; the clock is the test's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from specllama.events import Event, Finished, PrefillProgress, Started, TextDelta
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


class Slow:
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
    slow: Slow, dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[float, bytes]]:
    """When what was sent."""
    monkeypatch.setattr(exchange, "monotonic", lambda: slow.now)

    async def write(call: Callable[[], bytes], rounds: Iterable[Any]) -> bytes:
        return call()

    scribe: Callable[..., Awaitable[bytes]] = write

    async def sent() -> list[tuple[float, bytes]]:
        bodies = exchange._bodies(slow, dialect, slow.take(), scribe, "/")  # type: ignore[arg-type]
        return [(slow.now, body) async for body in bodies]

    return asyncio.run(sent())


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("told", [READING, QUEUED, CALLING], ids=["read", "queued", "call"])
def test_something_is_sent_every_five_seconds(
    name: str, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow([*told, *END], tools=told is CALLING)
    sent = streamed(slow, DIALECTS[name](), monkeypatch)
    times = [0.0, *(at for at, body in sent if body)]  # the headers
    assert max(b - a for a, b in pairwise(times)) <= 5.0
    between = b"".join(body for at, body in sent if at < slow._at - 1)
    assert b"rains" not in between
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
    sent = streamed(Slow([*LONG, *END]), DIALECTS[name](), monkeypatch)
    before = [(at, body.decode()) for at, body in sent if at < 500]
    heard = [at for at, body in before if "data: " in body and '"ping"' not in body]
    assert max(b - a for a, b in pairwise([*heard, 520])) <= 65
    assert len(heard) <= 10
    assert all(NEWS[name] in body for at, body in before if at in heard[1:])
    assert b"rains" in b"".join(body for _, body in sent)


def test_pings_of_anthropic_come_behind_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = streamed(Slow([*READING, *END]), MessagesDialect("m"), monkeypatch)
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
    sent = streamed(Slow([*READING, *END]), DIALECTS[name](), monkeypatch)
    lines = [json.loads(line) for line in b"".join(body for _, body in sent).splitlines()]
    texts = [one["message"]["content"] if "chat" in name else one["response"] for one in lines]
    assert "".join(texts) == "It rains."
    assert texts[:2] == ["", ""]
    assert [one["done"] for one in lines] == [False] * (len(lines) - 1) + [True]

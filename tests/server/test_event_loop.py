"""The event loop works on small bodies only; what is done to large ones is another thread's."""

import asyncio
import gc
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from servers import Serving, serving, table

from specllama.interface import Message
from specllama.server.dialect import Job
from specllama.server.exchange import Aside
from specllama.settings.params import GenerateParams

CHAT = "/v1/chat/completions"
MOST_S = 0.05


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(table(tmp_path_factory.mktemp("loop"), n_ctx=16384)) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """The garbage collector looks through all that the test process holds."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Probe:
    """The longest turn of a server's event loop, in seconds of its thread's processor time: other
    programs of the machine do not count."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, server: Serving) -> None:
        self.longest = 0.0
        loop = server.queue._loop
        inner = asyncio.events.Handle._run

        def run(handle: Any) -> None:
            begin = time.thread_time()
            inner(handle)
            if handle._loop is loop:
                self.longest = max(self.longest, time.thread_time() - begin)

        monkeypatch.setattr(asyncio.events.Handle, "_run", run)


def many(n: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "x"}] * n


def tool(name: str) -> dict[str, Any]:
    fields = {f"a{i}": {"type": "string"} for i in range(10)}
    schema = {"type": "object", "properties": fields}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def asking(**fields: Any) -> bytes:
    return json.dumps({"messages": many(1), "max_tokens": 1, **fields}).encode()


LARGE: dict[str, tuple[str, bytes]] = {
    "messages": (CHAT, asking(messages=many(20_000))),
    "messages of Anthropic": ("/v1/messages", asking(model="m", messages=many(20_000))),
    "messages of Ollama": ("/api/chat", asking(messages=many(20_000), stream=False)),
    "messages to be counted": ("/v1/messages/count_tokens", asking(messages=many(20_000))),
    "messages to be rendered": ("/apply-template", asking(messages=many(20_000))),
    "messages of our own": ("/specllama/count", asking(messages=many(20_000))),
    "items": ("/v1/responses", asking(input=many(20_000))),
    "lists": (CHAT, asking(chat_template_kwargs={"a": [[]] * 30_000})),
    "more lists than are read": (CHAT, asking(chat_template_kwargs={"a": [[]] * 100_000})),
    "escapes": (CHAT, asking(messages=[{"role": "user", "content": "\u00e9" * 1_300_000}])),
    "tools": (CHAT, asking(tools=[tool(f"f{i}") for i in range(1000)])),
    "tools, one of them to be called": (
        CHAT,
        asking(tools=[tool(f"f{i}") for i in range(1000)], tool_choice="required"),
    ),
    "unknown fields": (CHAT, asking(**{f"x{i}": 1 for i in range(30_000)})),
    "spaces": (CHAT, b" " * 7_000_000 + asking()),
}


@pytest.mark.parametrize(("path", "body"), LARGE.values(), ids=LARGE)
def test_large_bodies_are_not_worked_on_in_the_event_loop(
    server: Serving, monkeypatch: pytest.MonkeyPatch, path: str, body: bytes
) -> None:
    probe = Probe(monkeypatch, server)
    answer = server.http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 413), answer.text[:200]
    assert probe.longest < MOST_S


@pytest.mark.parametrize("stream", [False, True])
def test_many_probabilities_are_not_written_in_the_event_loop(
    server: Serving, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    body = {"logprobs": True, "top_logprobs": 128, "max_tokens": 400, "n": 2, "stream": stream}
    probe = Probe(monkeypatch, server)
    answer = server.post(CHAT, {"messages": many(1), "ignore_eos": True, **body})
    assert answer.status_code == 200
    assert answer.text.count('"top_logprobs"') == 800
    assert probe.longest < MOST_S


def test_a_prompts_beginning_chooses_its_arm(server: Serving) -> None:
    service = server.service
    service.experiment = (("none", 50), ("mixed", 50))
    try:

        def arm(*prompt: Any) -> str:
            given = prompt[0] if isinstance(prompt[0], str) else prompt
            return service._assigned(Job((given,), GenerateParams())).arm

        arms = {arm(f"the rain {i}") for i in range(40)}
        assert arms == {"none", "mixed"}
        hello = Message("user", "hello")
        for turn in (Message("user", "again"), Message("user", "x" * 10_000)):
            assert arm(hello, hello, turn) == arm(hello, hello)
        whole = "x" * 100_000
        assert arm(whole) == arm(whole + "y")
    finally:
        service.experiment = ()


def test_clients_take_turns_beside_the_event_loop() -> None:
    """A client's second piece of work comes behind the first of another."""
    aside, go_on, done = Aside(), threading.Event(), []

    async def work() -> None:
        first = asyncio.create_task(aside.run("a", go_on.wait, 10))
        await asyncio.sleep(0)
        later = [
            asyncio.create_task(aside.run(whose, done.append, name))
            for whose, name in (("a", "a2"), ("a", "a3"), ("b", "b1"))
        ]
        await asyncio.sleep(0)
        gone = asyncio.create_task(aside.run("c", done.append, "c1"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(first, *later)

    asyncio.run(work())
    assert done == ["b1", "a2", "a3"]


def test_what_fails_beside_the_event_loop_is_raised_in_it() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(Aside().run("a", fail))

"""What clients can have the server hold: sockets, bytes, places in the queue; and how it ends."""

import contextlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from servers import Serving, line_to, rest, serving, table, until

from specllama.server import server_process, service
from specllama.server.guard import IN_ALL, Access
from specllama.server.request_queue import QueuedReply

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "the rain"}], "max_tokens": 4, "seed": 1}
LONG = {**HELLO, "max_tokens": 1800, "logit_bias": {"0": -100}}
JSON = b"Content-Type: application/json\r\n"


def head(path: str = CHAT, more: bytes = JSON, host: bytes = b"localhost") -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: %s\r\n%s" % (path.encode(), host, more)


@contextlib.contextmanager
def beside(*calls: Callable[[], Any]) -> Iterator[list[Any]]:
    """Calls in threads of their own; what they return, in order, after the block."""
    found: list[Any] = [None] * len(calls)

    def call(i: int) -> None:
        found[i] = calls[i]()

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        for thread in threads:
            thread.join(60)


REFUSED = [
    (401, head(more=JSON + b"Content-Length: 9\r\n\r\n")),
    (403, head(host=b"evil.example", more=JSON + b"Content-Length: 9\r\n\r\n")),
    (404, head("/nothing", JSON + b"X-Api-Key: first\r\nContent-Length: 9\r\n\r\n")),
    (413, head(more=JSON + b"X-Api-Key: first\r\nContent-Length: 99999999\r\n\r\n")),
    (415, head(more=b"Content-Type: text/plain\r\nX-Api-Key: first\r\nContent-Length: 9\r\n\r\n")),
    (200, b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"),
]


def test_a_request_that_was_answered_before_its_body_came_costs_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "LINGER_S", 0.2)
    access = Access(keys=("first",), connections=len(REFUSED))
    with serving(table(tmp_path), access=access) as server, contextlib.ExitStack() as lines:
        for status, sent in REFUSED:
            line = lines.enter_context(line_to(server))
            line.sendall(sent)
            said = rest(line)
            assert said.startswith(b"HTTP/1.1 %d " % status)
            assert b"connection: close" in said.lower()
        for _ in range(20):  # the clients keep their ends open, and say nothing more
            with line_to(server) as line:
                line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                if b" 200 " in line.recv(1000):
                    break
            time.sleep(0.2)
        else:
            pytest.fail("the sockets are still taken")


def test_who_sends_all_of_a_body_that_is_refused_hears_why(tmp_path: Path) -> None:
    with serving(table(tmp_path)) as server, line_to(server) as line:
        line.sendall(head(more=JSON + b"Content-Length: 12000000\r\n\r\n"))
        for _ in range(12):
            line.sendall(bytes(1_000_000))
        said = rest(line)
        assert b" 413 " in said
        assert b"too_large" in said


@pytest.mark.parametrize("key", [b"", b"X-Api-Key: first\r\n"])
def test_a_body_in_very_many_parts_is_not_parsed_to_its_end(tmp_path: Path, key: bytes) -> None:
    """Without the key, its answer comes first; behind it, parts are not looked at."""
    sent = 0
    with serving(table(tmp_path), access=Access(keys=("first",))) as server:
        with line_to(server) as line:
            line.sendall(head(more=JSON + key + b"Transfer-Encoding: chunked\r\n\r\n"))
            time.sleep(0.2)
            with contextlib.suppress(ConnectionError):
                for _ in range(20):
                    line.sendall(b"1\r\n \r\n" * 1000)
                    sent += 1000
            assert rest(line)[:12] == (b"HTTP/1.1 400" if key else b"HTTP/1.1 401")
        parts = server.http.post(
            CHAT, content=(bytes([c]) for c in json.dumps(HELLO).encode()),
            headers={"content-type": "application/json", "x-api-key": "first"},
        )  # fmt: skip
        assert parts.status_code == 200, "a small body may come as it likes"


def test_all_clients_together_have_so_many_connections(tmp_path: Path) -> None:
    with (
        serving(table(tmp_path), access=Access(connections=1)) as server,
        contextlib.ExitStack() as lines,
    ):
        for i in range(IN_ALL):
            lines.enter_context(line_to(server, f"127.0.0.{i + 2}"))
        time.sleep(0.2)
        with line_to(server, "127.0.0.99") as line:
            assert b" 429 " in rest(line)


def test_bytes_of_bodies_are_bounded_by_client(tmp_path: Path) -> None:
    body = json.dumps({**HELLO, "pad": "x" * 500}).encode()
    whole = head(more=JSON + b"Content-Length: %d\r\n\r\n" % len(body)) + body
    with serving(table(tmp_path), access=Access(bodies=1000)) as server:
        with line_to(server) as held:
            held.sendall(head(more=JSON + b"Content-Length: 900\r\n\r\n") + b" " * 800)
            until(lambda: server.service.traffic._bytes.total() == 800)
            with line_to(server) as line:
                line.sendall(whole)
                assert b" 429 " in line.recv(1000)
            with line_to(server, "127.0.0.2") as other:
                other.sendall(whole)
                assert b" 200 " in other.recv(1000)
        until(lambda: not server.service.traffic._bytes)
        with line_to(server) as line:
            line.sendall(whole)
            assert b" 200 " in line.recv(1000)


def test_a_body_has_so_many_values(server: Serving) -> None:
    """To make a million lists of one body takes a second, in which nothing else is answered."""
    for many in ({"a": [[]] * 400_000}, {"a": ["x"] * 400_000}, {"a": [1] * 400_000}):
        answer = server.post(CHAT, {**HELLO, "chat_template_kwargs": many})
        assert answer.status_code == 413
        assert "values" in answer.json()["error"]["message"]


def test_marks_in_texts_are_no_values() -> None:
    text = 'a,b\\[{,"' * 5000 + "\\"
    body = json.dumps({"prompt": text, "more": [1, {"a": text}]}).encode()
    assert service._marks(body) > 10_000
    assert service._values(body, 10**6) == 5
    names = json.dumps({str(i): "" for i in range(1000)}).encode()
    assert service._values(names, 1000) == 1000
    assert service._values(names, 100) > 100


def test_one_request_is_one_place_in_the_queue(tmp_path: Path) -> None:
    with serving(table(tmp_path), most=1) as server:
        body = {"prompt": ["a", "b", "c", "d", "e"], "n": 4, "max_tokens": 2}
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 200
        assert len(answer.json()["choices"]) == 20
        assert not server.queue.places
        assert server.queue.n_waiting == 0


def test_a_client_that_waits_often_leaves_places_for_others(tmp_path: Path) -> None:
    keys = ("first", "second")
    with serving(table(tmp_path), access=Access(keys=keys), most=1) as server:
        queue, lanes = server.queue, server.queue.lanes
        queue.lanes = 0  # as if all were taken

        def ask(key: str) -> int:
            return server.post(CHAT, HELLO, headers={"x-api-key": key}).status_code

        with beside(lambda: ask("first")) as first:
            until(lambda: queue.n_waiting == 1)
            assert ask("first") == 429
            with beside(lambda: ask("second")) as second:
                until(lambda: queue.n_waiting == 2)
                queue.lanes = lanes
                assert ask("second") in (200, 429)
                queue._soon(queue._serve)
        assert first == second == [200]


def test_none_of_the_replies_to_a_request_is_lost_when_the_server_is_to_end(tmp_path: Path) -> None:
    """Further ones begin when the first has read the prompt: that may be after the signal."""
    with serving(table(tmp_path)) as server:
        queue = server.queue
        lanes, queue.lanes = queue.lanes, 0
        body = {**HELLO, "n": 3, "seed": 2}
        with beside(lambda: server.post(CHAT, body)) as found:
            until(lambda: queue.n_waiting == 1)
            queue.closing = True
            queue.lanes = lanes
            queue._soon(queue._serve)
        queue.closing = False
        [answer] = found
        assert answer.status_code == 200
        assert len(answer.json()["choices"]) == 3


def test_whoever_is_cut_off_by_the_end_hears_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said: dict[str, str] = {}
    status: dict[str, int] = {}

    def ask(url: str, name: str, path: str, body: Any) -> None:
        with (
            httpx2.Client(base_url=url, timeout=60) as http,
            http.stream("POST", path, json=body) as answer,
        ):
            status[name] = answer.status_code
            said[name] = answer.read().decode()

    asks = {
        "sse": (CHAT, {**LONG, "stream": True}),
        "anthropic": ("/v1/messages", {**LONG, "stream": True}),
        "ndjson": ("/api/chat", {"messages": HELLO["messages"], "options": {
            "num_predict": 1800, "logit_bias": {"0": -100}}}),
        "whole": (CHAT, LONG),
        "waits": (CHAT, LONG),
        "ours": ("/specllama/generate", {"text": "the rain", "params": {
            "max_tokens": 1800, "ignore_eos": True}, "id": "x"}),
    }  # fmt: skip
    began = time.monotonic()
    with serving(table(tmp_path), drain_s=0.0) as server:
        slow = line_to(server)
        slow.sendall(head(more=JSON + b"Content-Length: 900\r\n\r\n{"))
        threads = [
            threading.Thread(target=ask, args=(server.url, name, *what))
            for name, what in asks.items()
        ]
        for thread in threads:
            thread.start()
        queue = server.queue
        until(
            lambda: len(queue.running) == queue.lanes and queue.n_waiting == len(asks) - queue.lanes
        )
        began = time.monotonic()
        stop = threading.Thread(target=lambda: said.update(slow=rest(slow).decode()))
        stop.start()
    for thread in (*threads, stop):
        thread.join(30)
    slow.close()
    took = time.monotonic() - began
    assert took < 20, "the end of a server is bounded"
    assert status["whole"] == 503 or status["waits"] == 503
    for name in ("whole", "waits"):
        if status[name] == 503:
            assert json.loads(said[name])["error"]["code"] == "shutting_down"
    cut = "the server is shutting down"
    for name in ("sse", "ndjson", "anthropic", "ours"):
        if status[name] == 200:
            assert cut in said[name].strip().splitlines()[-1], (name, said[name][-300:])
        else:
            assert status[name] == 503
    assert " 503 " in said["slow"]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_ids_are_of_the_client_that_gave_them(tmp_path: Path) -> None:
    long = {"text": "the rain", "params": {"max_tokens": 1500, "ignore_eos": True}}
    with serving(table(tmp_path), access=Access(keys=("first", "second"))) as server:
        mine, other = {"x-api-key": "first"}, {"x-api-key": "second"}

        def stopped(id: str, key: dict[str, str]) -> bool:
            return bool(server.post("/specllama/stop", {"id": id}, headers=key).json()["stopped"])

        queue, path = server.queue, "/specllama/generate"
        lanes, queue.lanes = queue.lanes, 0  # replies wait, so that they can be stopped
        body = {**long, "id": "one"}
        with (
            server.http.stream("POST", path, json={**long, "id": ""}, headers=mine) as nameless,
            server.http.stream("POST", path, json=body, headers=mine) as answer,
            server.http.stream("POST", path, json=body, headers=other) as theirs,
        ):
            assert not stopped("", mine)
            assert not stopped("", other)
            again = server.post(path, body, headers=mine)
            assert again.status_code == 409
            assert again.json()["error"]["code"] == "id_in_use"
            assert queue.n_waiting == 3
            assert stopped("one", other)
            assert theirs.read() == b""
            assert queue.n_waiting == 2
            assert stopped("one", mine)
            assert answer.read() == b""
            assert not stopped("one", mine)
            assert nameless.status_code == 200
        queue.lanes = lanes
        short = {**body, "params": {"max_tokens": 2}}
        assert server.post(path, short, headers=mine).status_code == 200


@pytest.mark.parametrize(("proxies", "client"), [((), "127.0.0.1"), (("127.0.0.1",), "9.9.9.9")])
def test_only_a_named_proxy_says_who_asks(
    tmp_path: Path, proxies: tuple[str, ...], client: str
) -> None:
    asked: list[str] = []

    class Watch:
        def sent(self, queued: QueuedReply) -> None:
            asked.append(queued.client)

        def received(self, queued: QueuedReply, events: Any) -> None: ...

        def ended(self, queued: QueuedReply, error: Any) -> None: ...

    with serving(table(tmp_path), access=Access(proxies=proxies)) as server:
        server.queue.watchers.append(Watch())
        assert server.post(CHAT, HELLO, headers={"x-forwarded-for": "9.9.9.9"}).status_code == 200
    assert asked == [client]


def test_a_line_is_logged_for_each_request(tmp_path: Path) -> None:
    lines: list[str] = []
    with serving(table(tmp_path), log=lines.append, access=Access(keys=("first",))) as server:
        server.http.get("/health")
        server.post(f"{CHAT}?secret=1", HELLO, headers={"x-request-id": "r1", "x-api-key": "first"})
        server.post("/a%0Ab%1b[31m", HELLO)
        until(lambda: len(lines) == 2)
    asked, refused = lines
    assert asked.startswith(f"POST {CHAT} 200 ")
    assert re.search(r" s, key [0-9a-f]{8}, r1, nothing drafted: no drafting for 4 tokens", asked)
    assert "secret" not in asked
    assert "first" not in asked
    assert " 401 " in refused
    assert refused.isprintable()

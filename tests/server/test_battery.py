"""What somebody who means harm, or a broken client, sends; and processes that are killed."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from servers import Serving, serving, table, until

from specllama.errors import UsageError
from specllama.server.guard import Access
from specllama.server.server_process import _beside, bind

TABLE_CLI = Path(__file__).parents[1] / "support" / "table_cli.py"
CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {
    "messages": [{"role": "user", "content": "the rain"}],
    "max_tokens": 4,
    "seed": 1,
}
LONG = {**HELLO, "max_tokens": 1500, "logit_bias": {"0": -100}}
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
BODY = json.dumps(HELLO).encode()


def said(server: Serving, *parts: bytes, pause: float = 0.0) -> bytes:
    """What a connection hears until it is closed, or nothing more comes."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as line:
        line.settimeout(2)
        for part in parts:
            line.sendall(part)
            time.sleep(pause)
        heard = b""
        try:
            while more := line.recv(65536):
                heard += more
        except (TimeoutError, ConnectionError):
            pass
        return heard


def statuses(heard: bytes) -> list[int]:
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d+)", heard)]


# -- bodies --


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b"[" * 40_000,
        b'{"messages":' + b"[" * 40_000,
        b'{"messages":' + b'{"a":' * 50_000,
        b'{"messages":[{"role":"user","content":"\xff\xfe"}]}',
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":[{"role":"user","content":"a"}],"temperature":NaN}',
        b'{"messages":[{"role":"user","content":"a"}],"temperature":Infinity}',
        b'{"messages":[{"role":"user","content":"a"}],"temperature":1e400}',
        b'{"messages":[{"role":"user","content":"a"}],"temperature":-1e308}',
        b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1' + b"0" * 400 + b"}",
        b'{"messages":[{"role":"user","content":"a"}],"max_tokens":99999999999}',
        b'{"messages":[{"role":"user","content":"a"}],"seed":1' + b"0" * 30 + b"}",
        b'{"messages":[{"role":"user","content":"a"}],"top_k":2.5}',
        b'{"messages":[{"role":"user","content":"a"}],"n":1e3}',
        b'{"messages":[{"role":"user","content":"a"}],"logit_bias":{"1":1e400}}',
        b'{"messages":[{"role":"user","content":"a"}],"stop":["'
        + b'","'.join([b"x"] * 99)
        + b'"]}',
        b'{"messages":[{"role":"user","content":"a"}],"grammar":"root ::= ((((("}',
        b'{"messages":[{"role":"user","content":"a"}],"grammar":"root ::= root"}',
        b'{"messages":[{"role":"user","content":"a"}],"response_format":{"type":"json_schema",'
        b'"json_schema":{"schema":' + b'{"items":' * 5000 + b"{}" + b"}" * 5000 + b"}}}",
    ],
)
def test_a_body_that_means_nothing_is_refused(server: Serving, body: bytes) -> None:
    answer = server.http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_odd_texts_are_texts(server: Serving) -> None:
    for text in ("\0", "\x1b[2J", "\u202e", "</s><|im_end|>", "💥" * 50, "a\u0300" * 99):
        answer = server.post(CHAT, {**HELLO, "messages": [{"role": "user", "content": text}]})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("ids", [[-1], [2**31], [2**70], [10**6], [[]], [[[1]]], [True], [1.5]])
def test_tokens_that_are_none_never_reach_the_model(server: Serving, ids: Any) -> None:
    for path, field in (("/completion", "prompt"), ("/detokenize", "tokens")):
        assert server.post(path, {field: ids}).status_code == 400
    assert server.post(CHAT, HELLO).status_code == 200


# -- the head --


def test_hosts_are_one(server: Serving) -> None:
    twice = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    assert statuses(said(server, twice)) == [400]
    assert statuses(said(server, b"GET /v1/models HTTP/1.0\r\n\r\n")) == [403]
    absolute = b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert statuses(said(server, absolute)) == [404]


def test_thousands_of_headers(server: Serving) -> None:
    many = b"".join(b"x-%d: y\r\n" % i for i in range(10_000))
    heard = said(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + many + b"\r\n")
    assert statuses(heard) in ([], [400], [431]), "as it comes, in one piece or in several"
    long = b"GET /health?" + b"a" * (1 << 20) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert statuses(said(server, long)) in ([], [400], [431])
    assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: %d\r\n",
        b"Content-Length: %d\r\nContent-Length: 4\r\n",
        b"Content-Length: %d, 4\r\n",
        b"Content-Length: +%d\r\n",
        b"Content-Length: -%d\r\n",
        b"Content-Length: 0x%d\r\n",
        b"Content-Length : %d\r\n",
        b"X: y\r\nTransfer-Encoding: chunked, identity\r\nContent-Length: %d\r\n",
        b"Transfer-Encoding: xchunked\r\nY: %d\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\nY: %d\r\n",
    ],
)
def test_a_second_request_cannot_be_smuggled(server: Serving, head: bytes) -> None:
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    heard = said(server, HEAD + head % (5 + len(hidden)) + b"\r\n0\r\n\r\n" + hidden)
    assert [code for code in statuses(heard) if code < 400] == []
    assert len(statuses(heard)) <= 1


def test_requests_in_one_packet_are_answered_in_turn(server: Serving) -> None:
    asked = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    heard = said(server, asked + asked + health)
    assert statuses(heard) == [200, 200, 200]
    assert heard.endswith(b'{"status":"ok"}')


def test_whoever_closes_half_of_a_connection_has_left(server: Serving) -> None:
    asked = json.dumps({**LONG, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as line:
        line.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(asked) + asked)
        until(lambda: bool(server.queue.running))
        line.shutdown(socket.SHUT_WR)
        until(lambda: not server.queue.running)


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models",
        "/health/../v1/models",
        "/health/..;/v1/models",
        "/health%2f..%2fv1/models",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/v1/models/..%2f..%2f..%2fetc%2fpasswd",
        "/v1/models/%00",
        "/HEALTH",
        "/health\\..\\v1\\models",
        "/v1/models?path=/health",
        "/v1/models#/health",
        "/v1/models;/health",
    ],
)
def test_no_path_leads_around_the_key(locked: Serving, path: str) -> None:
    asked = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    [status] = statuses(said(locked, asked))
    assert status in (400, 401)
    with_key = asked.replace(b"Connection", b"X-Api-Key: the key\r\nConnection")
    [status] = statuses(said(locked, with_key))
    assert status in ((200,) if path.startswith("/v1/models?") else (200, 400, 404))


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "TRACE", "HEAD", "CONNECT", "FOO"])
def test_other_methods_need_the_key_and_do_nothing(locked: Serving, method: str) -> None:
    assert locked.http.request(method, "/v1/models").status_code == 401
    assert locked.http.request(method, CHAT, headers={"x-api-key": "the key"}).status_code == 405


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("locked")
    with serving(table(folder), access=Access(keys=("the key", "another"))) as running:
        yield running


def test_every_key_is_compared_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, key: bytes) -> bool:
        compared.append((given, key))
        return given == key

    monkeypatch.setattr("specllama.server.guard.hmac.compare_digest", compare)
    access = Access(keys=("first", "second", "third"))
    for given in ("first", "second", "fi", "wrong"):
        compared.clear()
        headers = httpx2.Headers({"x-api-key": given, "host": "localhost"})
        refused = access.refused("GET", "/v1/models", headers)  # type: ignore[arg-type]
        assert (refused is None) == (given in access.keys)
        assert [key for _, key in compared] == [b"first", b"second", b"third"]


# -- processes --


def test_a_request_that_ends_the_engine_twice_is_refused(tmp_path: Path) -> None:
    unseeded = {name: value for name, value in LONG.items() if name != "seed"}
    with serving(table(tmp_path)) as server:
        for _ in range(2):
            heard: list[httpx2.Response] = []
            ask = threading.Thread(target=lambda: heard.append(server.post(CHAT, unseeded)))  # noqa: B023
            ask.start()
            until(lambda: bool(server.queue.running))
            time.sleep(0.1)
            os.kill(server.host.pid or 0, signal.SIGKILL)
            ask.join()
            assert heard[0].json()["error"]["code"] == "engine_died"
            assert heard[0].headers["x-should-retry"] == "false"
            assert server.post(CHAT, HELLO).status_code == 200
        assert server.queue.restarts == 2
        refused = server.post(CHAT, unseeded)
        assert refused.status_code == 500
        assert refused.headers["x-should-retry"] == "false"
        assert "did not survive" in refused.json()["error"]["message"]
        assert server.post(CHAT, {**LONG, "max_tokens": 9}).status_code == 200


@contextmanager
def commanded(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``specllama serve`` in a process of its own, and its address."""
    table(folder)
    command = [sys.executable, str(TABLE_CLI), "serve", "-m", str(folder / "target.table")]
    process = subprocess.Popen(
        [*command, "-d", "none", "--port", "0", "-q", *flags], stderr=subprocess.PIPE, text=True
    )
    try:
        yield process, process.stderr.readline().split()[-1]
    finally:
        with process:  # closes its pipe
            process.kill()


def _children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(one) for thread in threads for one in (thread / "children").read_text().split()]


def _runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")


@needs_proc
def test_a_killed_server_takes_its_engine_along(tmp_path: Path) -> None:
    with commanded(tmp_path) as (process, url):
        assert httpx2.post(url + CHAT, json=HELLO).status_code == 200
        children = _children(process.pid)
        assert children
        process.kill()
        process.wait()
        until(lambda: not any(map(_runs, children)))


def test_a_server_that_is_to_end_lets_replies_end(tmp_path: Path) -> None:
    long = {**LONG, "max_tokens": 3000, "stream": True}  # a second or more
    with (
        commanded(tmp_path, "-c", "16384") as (process, url),
        httpx2.Client(base_url=url, timeout=60) as http,
    ):
        with http.stream("POST", CHAT, json=long) as answer:
            parts = answer.iter_bytes()
            next(parts)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            refused = httpx2.post(url + CHAT, json=HELLO)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert b"".join(parts).endswith(b"data: [DONE]\n\n")
        assert process.wait(20) in (0, 130, 143)


def test_an_address_of_the_next_protocol(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with commanded(tmp_path, "--host", "::1") as (_, url):
        assert url.startswith("http://[::1]:")
        assert httpx2.get(url + "/health").status_code == 200
        assert httpx2.get(url + "/v1/models").status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_both_loopback_addresses_lead_to_a_server(host: str) -> None:
    with bind(f"[{host}]" if ":" in host else host, 0) as one:
        (other,) = _beside(one)
        with other:
            there = {one.getsockname()[:2], other.getsockname()[:2]}
            port = one.getsockname()[1]
            assert there == {("127.0.0.1", port), ("::1", port)}
            assert _beside(one) == [], "somebody listens there"


@pytest.mark.parametrize(
    ("host", "failure", "hint"),
    [
        ("127.0.0.1", PermissionError(13, "Permission denied"), "1024"),
        ("127.0.0.1", OSError(98, "Address already in use"), "another --port"),
        ("192.0.2.1", OSError(99, "Cannot assign requested address"), "of this machine"),
        ("no-such-name.invalid", socket.gaierror(-2, "Name or service not known"), "this machine"),
    ],
)
def test_an_address_that_cannot_be_had(
    host: str, failure: OSError, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **more: Any) -> Any:
        raise failure

    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: [(2, 1, 6, "", (host, 80))])
    monkeypatch.setattr(socket, "create_server", fails)
    with pytest.raises(UsageError, match=f"cannot listen at {host}:80") as error:
        bind(host, 80)
    assert hint in (error.value.hint or "")

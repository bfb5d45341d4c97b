"""What operators do and meet: slow networks, plain checks, signals, engines that die at rest."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from servers import Serving, line_to, rest, serving, table, until

from specllama.cli.serve import _keys
from specllama.server import guard, request_queue, routes, server_process
from specllama.server.guard import Access
from specllama.server.routes import make_app

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "the rain"}], "max_tokens": 4, "seed": 1}
LONG = {**HELLO, "max_tokens": 1800, "logit_bias": {"0": -100}, "stream": True}
PAGE = "https://page.example"


def posting(path: str, body: bytes, more: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def status_of(said: bytes) -> int:
    return int(said.split(b" ", 2)[1])


# -- bodies that come slowly --


def test_a_body_that_comes_slowly_is_answered_as_one_that_comes_at_once(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "HEAD_S", 0.02)
    found = {route.path: route for route in make_app(server.service).routes}  # type: ignore[attr-defined]
    bodies = {CHAT: HELLO, "/v1/messages": HELLO, "/completion": {"prompt": "a", "n_predict": 2},
              "/tokenize": {"content": "a"}, "/api/show": {"model": "table"}}  # fmt: skip
    asked = [path for path, route in found.items() if "POST" in (route.methods or ())]  # type: ignore[attr-defined]
    assert len(asked) > 20

    def both(path: str, stream: bool) -> tuple[str, int, int]:
        body = json.dumps({**bodies.get(path, {}), "stream": stream}).encode()
        whole = posting(path, body, "Connection: close\r\n")
        with line_to(server) as line:
            line.sendall(whole)
            at_once = status_of(rest(line))
        with line_to(server) as line:
            line.sendall(whole[:-5])
            time.sleep(0.1)  # several times as long as the server waits before it looks
            line.sendall(whole[-5:])
            return path, at_once, status_of(rest(line))

    with ThreadPoolExecutor(6) as pool:
        found_by = list(pool.map(both, asked * 2, [False] * len(asked) + [True] * len(asked)))
    for path, at_once, slowly in found_by:
        assert slowly == at_once != 500, path


def test_an_engine_that_answers_late_is_waited_for(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "HEAD_S", 0.02)
    os.kill(server.host.pid or 0, signal.SIGSTOP)
    try:
        with line_to(server) as line:
            line.sendall(b"GET /props HTTP/1.0\r\nHost: localhost\r\n\r\n")
            time.sleep(0.2)
            os.kill(server.host.pid or 0, signal.SIGCONT)
            assert status_of(rest(line)) == 200
    finally:
        os.kill(server.host.pid or 0, signal.SIGCONT)


def test_a_body_has_as_long_as_it_makes_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "BODY_S", 1.0)
    body = json.dumps(HELLO).encode()
    with serving(table(tmp_path)) as server:
        with line_to(server) as line:
            whole = posting(CHAT, body)
            line.sendall(whole[: -len(body)])
            for i in range(8):
                line.sendall(body[i * 9 : i * 9 + 9])
                time.sleep(0.2)
            line.sendall(body[72:])
            assert status_of(line.recv(1000)) == 200
        with line_to(server) as line:
            line.sendall(posting(CHAT, body)[:-5])
            said = rest(line)
            assert status_of(said) == 408
            assert b"nothing more of the body came for 1 s" in said


# -- probes, and the end of a server --


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/ping"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_plain_checks_name_no_host(server: Serving, path: str, method: str) -> None:
    with line_to(server) as line:
        line.sendall(f"{method} {path} HTTP/1.0\r\n\r\n".encode())
        assert status_of(rest(line)) == 200
    foreign = f"{method} {path} HTTP/1.0\r\nHost: evil.example\r\n\r\n"
    for sent in ("OPTIONS / HTTP/1.0\r\n\r\n", foreign):
        with line_to(server) as line:
            line.sendall(sent.encode())
            assert status_of(rest(line)) == (403 if "evil" in sent else 200)
    with line_to(server) as line:
        line.sendall(f"{method} /v1/models HTTP/1.0\r\n\r\n".encode())
        assert status_of(rest(line)) == 403, "what is not open needs its name"


def test_every_probe_sees_that_the_server_ends(tmp_path: Path) -> None:
    probes = ("/health", "/v1/health", "/ping", "/", "/api/version", "/version", "/v1/models")
    with serving(table(tmp_path), access=Access(origins=(PAGE,))) as server:
        assert {server.http.get(path).status_code for path in probes} == {200}
        with server.http.stream("POST", CHAT, json=LONG) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.service.traffic.closing = True  # as SIGTERM does first
            for path in probes:
                answer = server.http.get(path)
                assert answer.status_code == 503, path
                assert "shutting down" in answer.text
                assert answer.headers["connection"] == "close"
            assert server.http.head("/health").status_code == 503
            assert server.http.options("/").status_code == 503
            assert server.http.options(CHAT, headers={"origin": PAGE}).status_code == 200
            for path in ("/metrics", "/slots", "/api/ps"):
                assert server.http.get(path).status_code == 200, "they show what still runs"
            assert list(lines)[-2] == "data: [DONE]", "who was there is answered"


# -- pages --


def refused_in_all_ways(server: Serving) -> dict[int, dict[str, Any]]:
    """Requests of a page by the status that they get."""
    body, key = json.dumps(HELLO).encode(), {"x-api-key": "first"}
    kind = {"content-type": "application/json", **key}
    return {
        200: {"url": CHAT, "headers": kind, "content": body},
        400: {"url": CHAT, "headers": kind, "content": b"{"},
        401: {"url": CHAT, "headers": {**kind, "x-api-key": "wrong"}, "content": body},
        403: {"url": CHAT, "headers": {**kind, "host": "evil.example"}, "content": body},
        404: {"url": "/nothing", "headers": kind, "content": body},
        405: {"url": "/props", "headers": kind, "content": body},
        413: {"url": CHAT, "headers": kind, "content": b" " * 3000},
        415: {"url": CHAT, "headers": {**key, "content-type": "text/plain"}, "content": body},
        431: {"url": CHAT, "headers": {**kind, **{f"x-{i}": "" for i in range(201)}}},
        501: {"url": "/api/push", "headers": kind, "content": body},
    }


def test_a_trusted_page_reads_every_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    access = Access(keys=("first",), origins=(PAGE,), body=2000)
    with serving(table(tmp_path), access=access) as server:

        def read(answer: httpx2.Response, status: int) -> None:
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == PAGE, status
            assert answer.headers["access-control-expose-headers"] == "*"

        for status, asked in refused_in_all_ways(server).items():
            trusted = {**asked["headers"], "origin": PAGE}
            read(server.http.post(**{**asked, "headers": trusted}), status)
            foreign = {**asked["headers"], "origin": "https://evil.example"}
            answer = server.http.post(**{**asked, "headers": foreign})
            assert answer.status_code in (403, 431)
            assert "access-control-allow-origin" not in answer.headers
        page = {"origin": PAGE, "x-api-key": "first"}
        read(server.http.options(CHAT, headers={"origin": PAGE}), 200)
        monkeypatch.setattr(server.queue, "admit", lambda client: 1 / 0)
        read(server.post(CHAT, HELLO, headers=page), 500)
        monkeypatch.setattr(routes, "Json", lambda *told: 1 / 0)  # where no handler catches it
        read(server.http.get("/nothing", headers=page), 500)
        monkeypatch.undo()
        server.queue.most, server.queue.lanes = 0, 0
        read(server.post(CHAT, HELLO, headers=page), 429)
        server.service.traffic.closing = True
        read(server.post(CHAT, HELLO, headers=page), 503)
        server.service.traffic.closing = False


# -- engines that are stopped or killed --


def killed(server: Serving) -> None:
    os.kill(server.host.pid or 0, signal.SIGKILL)


def test_an_engine_that_is_killed_again_and_again_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(request_queue, "PAUSE_S", 0.05)
    caplog.set_level(logging.INFO, "specllama.server")
    with serving(table(tmp_path)) as server:
        seen = {server.host.pid}
        for times in (1, 2, 3):
            killed(server)
            until(lambda times=times: server.queue.restarts == times and server.queue.ready)
            assert server.host.pid not in seen, "though nothing was asked of it"
            seen.add(server.host.pid)
            assert server.http.get("/health").status_code == 200
        assert server.chat()["usage"]["completion_tokens"] > 0
    said = [record.getMessage() for record in caplog.records]
    deaths = [line for line in said if "SIGKILL" in line]
    assert all("The engine process ended while nothing was asked of it" in line for line in deaths)
    assert [line.rpartition("; ")[2] for line in deaths] == [
        "it starts again now", "it starts again in 0.05 s", "it starts again in 0.1 s"
    ]  # fmt: skip
    assert said.count("table is started again") == 3


def test_an_engine_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(request_queue, "PAUSE_S", 0.05)
    with serving(table(tmp_path)) as server:
        (tmp_path / "target.table").rename(tmp_path / "away")
        killed(server)
        until(lambda: server.queue.restarts > 1)
        assert server.http.get("/health").json()["error"]["code"] == "restarting"
        (tmp_path / "away").rename(tmp_path / "target.table")
        until(lambda: server.http.get("/health").status_code == 200)
        assert server.chat()["usage"]["completion_tokens"] > 0
    assert any("it starts again in" in record.getMessage() for record in caplog.records)


def test_a_request_need_not_wait_for_the_end_of_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_queue, "PAUSE_S", 3600.0)
    monkeypatch.setattr(request_queue, "LONGEST_S", 3600.0)
    with serving(table(tmp_path)) as server:
        for times in (1, 2):
            killed(server)
            until(lambda times=times: server.queue._deaths == times)
            if times == 1:
                until(lambda: server.queue.ready)
        assert server.chat()["usage"]["completion_tokens"] > 0
        killed(server)
        until(lambda: server.queue._deaths == 3)
        assert server.http.get("/props").status_code == 200


def test_an_engine_that_was_stopped_at_rest_is_replaced_and_the_request_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(table(tmp_path)) as server:
        alone = server.chat(seed=1)
        server.host._child._pulse.expect(1.0)  # type: ignore[union-attr]
        first = server.host.pid or 0
        os.kill(first, signal.SIGSTOP)
        again = server.chat(seed=1)
        assert server.host.pid != first
        assert again["choices"] == alone["choices"]
        assert server.http.get("/health").status_code == 200


def test_an_engine_that_goes_on_soon_is_kept(tmp_path: Path) -> None:
    with serving(table(tmp_path)) as server:
        first = server.host.pid or 0
        os.kill(first, signal.SIGSTOP)
        with line_to(server) as line:
            line.sendall(posting(CHAT, json.dumps(HELLO).encode(), "Connection: close\r\n"))
            until(lambda: server.queue.running)
            time.sleep(0.5)
            os.kill(first, signal.SIGCONT)
            assert status_of(rest(line)) == 200
        assert server.host.pid == first


# -- what the log says of an answer that has no end --


def test_the_log_says_why_a_stream_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    with serving(table(tmp_path), log=lines.append) as server:

        def told(path: str, body: Any, dies: bool) -> str:
            lines.clear()
            with server.http.stream("POST", path, json=body) as answer:
                parts = answer.iter_lines()
                next(parts)
                if dies:
                    os.kill(server.host.pid or 0, signal.SIGKILL)
                    assert "SIGKILL" in "".join(parts), "the client hears it, too"
            until(lambda: lines)
            return lines[0]

        ours = {"text": "the rain", "params": {"max_tokens": 1800, "ignore_eos": True}}
        endless = {"num_predict": 1800, "logit_bias": {"0": -100}}
        native = {"messages": HELLO["messages"], "options": endless}
        for path, body in ((CHAT, LONG), ("/v1/messages", LONG), ("/api/chat", native),
                           ("/specllama/generate", ours)):  # fmt: skip
            assert told(path, body, False).endswith(", cut: the client left")
            cut = told(path, body, True)
            assert f"POST {path} 200 " in cut
            assert ", cut: The engine process ended while it was working (SIGKILL" in cut
            until(lambda: server.queue.ready)
        lines.clear()
        server.post(CHAT, HELLO)
        server.post(CHAT, {"messages": 1})
        assert not any("cut" in line for line in lines)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_takes_nothing_is_dropped_and_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    streamed: bool,
) -> None:
    monkeypatch.setattr(server_process, "STALL_S", 0.5)
    caplog.set_level(logging.INFO, "specllama.server")
    lines: list[str] = []
    body = {"prompt": "the rain", "n_predict": 1800, "n_probs": 20, "stream": streamed,
            "logit_bias": {"0": -100}, "ignore_eos": True}  # fmt: skip
    with serving(table(tmp_path), log=lines.append) as server:
        with line_to(server, window=4096) as line:
            line.sendall(posting("/completion", json.dumps(body).encode(), "X-Request-Id: r9\r\n"))
            until(lambda: any("was dropped" in one.getMessage() for one in caplog.records))
            until(lambda: not server.queue.running and lines)
        with line_to(server, window=4096) as line:  # one that reads, however slowly, is not
            line.sendall(posting("/completion", json.dumps(body).encode(), "Connection: close\r\n"))
            said = b""
            while part := line.recv(1 << 15):
                said += part
            assert said.rstrip().endswith((b"}", b"0"))
    [dropped] = [one.getMessage() for one in caplog.records if "dropped" in one.getMessage()]
    assert dropped == "127.0.0.1 was dropped: it took nothing of its answer for 0.5 s, r9"
    assert lines[0].endswith("cut: the client took nothing for 0.5 s") is streamed
    assert not [one for one in caplog.records if one.levelno > logging.INFO]


# -- a client that ends its own side --


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_ends_its_side_is_answered(
    server: Serving, version: str, stream: bool
) -> None:
    body = json.dumps({**HELLO, "max_tokens": 200, "stream": stream}).encode()
    with line_to(server) as line:
        line.sendall(posting(CHAT, body).replace(b"HTTP/1.1", f"HTTP/{version}".encode()))
        line.shutdown(socket.SHUT_WR)
        said = rest(line)
    assert said.startswith(b"HTTP/1.1 200 ")
    assert said.rstrip().endswith((b"0", b"}", b"[DONE]"))
    with line_to(server) as line:  # both, and then the end
        line.sendall(posting(CHAT, body) + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        line.shutdown(socket.SHUT_WR)
        assert rest(line).count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_left_costs_nothing(server: Serving, stream: bool) -> None:
    queue = server.queue
    lanes, queue.lanes = queue.lanes, 0  # it waits, so that nothing would be written to it
    try:
        with line_to(server) as line:
            line.sendall(posting(CHAT, json.dumps({**HELLO, "stream": stream}).encode()))
            until(lambda: queue.n_waiting == 1)
        until(lambda: not queue.n_waiting)
    finally:
        queue.lanes = lanes


# -- Ollama's pull --


@pytest.mark.parametrize("field", ["model", "name"])
@pytest.mark.parametrize("name", ["table", "table:latest"])
def test_a_pull_of_a_model_that_is_here_succeeds(server: Serving, field: str, name: str) -> None:
    answer = server.post("/api/pull", {field: name})
    assert answer.headers["content-type"] == "application/x-ndjson"
    told = [json.loads(line) for line in answer.text.splitlines()]
    assert [one["status"].split()[0] for one in told] == [
        "pulling", "pulling", "verifying", "writing", "success"
    ]  # fmt: skip
    assert told[1]["total"] == told[1]["completed"]
    assert told[1]["digest"].startswith("sha256:" + told[1]["status"].split()[1])
    assert server.post("/api/pull", {field: name, "stream": False}).json() == {"status": "success"}


@pytest.mark.parametrize("body", [{"model": "another"}, {"model": ""}, {}])
def test_a_pull_of_another_model_names_the_command(server: Serving, body: Any) -> None:
    answer = server.post("/api/pull", body)
    assert answer.status_code == 501
    assert "specllama hub" in answer.json()["error"]


# -- the process --


def serve(*flags: str, **how: Any) -> subprocess.Popen[str]:
    program = "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # no nohup
    program += "from specllama.cli import main; sys.exit(main())"
    line = [sys.executable, "-c", program, "serve", "--port", "0", *flags]
    return subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **how
    )


def test_a_hangup_opens_the_log_again_and_ends_nothing(tmp_path: Path) -> None:
    file = tmp_path / "serve.log"
    with serve("-m", "tiny", "-d", "none", "--log-file", str(file), start_new_session=True) as one:
        try:
            until(lambda: file.exists() and "is loaded" in file.read_text("utf-8"))
            file.rename(tmp_path / "serve.log.1")
            os.killpg(one.pid, signal.SIGHUP)  # the engine has to stay, too
            until(lambda: file.exists() and "opened again" in file.read_text("utf-8"))
            assert one.poll() is None
        finally:
            one.send_signal(signal.SIGTERM)
            assert one.wait(60) == 0
    assert "ended" not in file.read_text("utf-8"), "the engine stayed"


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_key_file_that_others_can_read_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: int, warned: bool
) -> None:
    file = tmp_path / "my keys"
    file.write_text("first\n", "utf-8")
    file.chmod(mode)
    assert _keys(file) == ("first",)
    assert (f"chmod 600 '{file}'" in capsys.readouterr().err) is warned

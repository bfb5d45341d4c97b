"""Who is let in, and what is counted: hosts, origins, keys, sizes, failures, /metrics."""

import contextlib
import json
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from fakes import AbortingRecipe
from servers import Serving, line_to, serving, table
from uvicorn.protocols.http.h11_impl import H11Protocol

from specllama.errors import EngineDied
from specllama.remote.address import events_of
from specllama.remote.board import Board
from specllama.server import guard, server_process
from specllama.server.guard import Access
from specllama.server.prometheus import SLICES
from specllama.settings.hardware import is_loopback

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "the rain"}], "max_tokens": 4, "seed": 1}


# names that were made to point here, or only look local
HOSTS = (
    "evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost@evil.example",
    "evil.example#localhost", "localhost:80.evil.example", "localhost evil.example",
    "localhost,evil.example", "[::1].evil.example", "127.0.0.1.nip.io", "2130706433.example",
)  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_a_name_that_is_not_this_machine_is_refused(server: Serving, host: str) -> None:
    answer = server.http.get("/v1/models", headers={"host": host})
    assert answer.status_code in (400, 403)
    assert answer.status_code == 400 or answer.json()["error"]["code"] == "bad_host"
    for scheme in ("http", "https") if host else ():
        page = {"origin": f"{scheme}://{host}"}
        assert server.http.get("/v1/models", headers=page).status_code == 403


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1234", "127.0.0.1", "[::1]:9", "10.0.0.7"]
)
def test_addresses_and_loopback_are_not_names(server: Serving, host: str) -> None:
    assert server.http.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost.evil.example"]
)
def test_pages_of_others_are_refused(server: Serving, origin: str) -> None:
    for answer in (
        server.post(CHAT, HELLO, headers={"origin": origin}),
        server.http.options(CHAT, headers={"origin": origin}),
    ):
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers


def test_pages_of_this_machine_may_ask(server: Serving) -> None:
    page = {"origin": "http://localhost:3000"}
    asked = {**page, "access-control-request-headers": "content-type, x-stainless-os"}
    preflight = server.http.options(CHAT, headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == page["origin"]
    assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]
    answer = server.post(CHAT, HELLO, headers=page)
    assert answer.headers["access-control-allow-origin"] == page["origin"]
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    "origin",
    [
        "app://obsidian.md",
        "file://",
        "tauri://localhost",
        "vscode-webview://1a2b",
        "vscode-file://vscode-app",
    ],
)
def test_programs_with_pages_of_their_own_may_ask(server: Serving, origin: str) -> None:
    answer = server.post(CHAT, HELLO, headers={"origin": origin})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin


def test_an_extension_has_to_be_named(tmp_path: Path) -> None:
    page = {"origin": "chrome-extension://abcdefghijklmnop"}
    with serving(table(tmp_path), access=Access(origins=(page["origin"],))) as server:
        assert server.post(CHAT, HELLO, headers=page).status_code == 200
        other = {"origin": "chrome-extension://ponmlkjihgfedcba"}
        assert server.post(CHAT, HELLO, headers=other).status_code == 403


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/chat/completions", lambda body: body["error"]["code"]),
        ("/v1/messages", lambda body: body["type"] == "error" and body["error"]["message"]),
        ("/api/chat", lambda body: isinstance(body["error"], str) and body["error"]),
        ("/api/nothing", lambda body: isinstance(body["error"], str) and body["error"]),
    ],
)
def test_a_refusal_is_in_the_words_of_its_family(tmp_path: Path, path: str, shape: Any) -> None:
    access = Access(keys=("first",), body=200)
    with serving(table(tmp_path), access=access) as server:
        key = {"x-api-key": "first"}
        for headers, status in (
            ({}, 401),
            ({"host": "evil.example"}, 403),
            ({**key, "content-type": "application/x-www-form-urlencoded"}, 415),
            ({**key, "content-type": "application/json"}, 413),
        ):
            answer = server.http.post(path, content=b" " * 300, headers=headers)
            assert answer.status_code == status
            assert shape(answer.json())


def test_a_refused_form_is_told_the_header_that_helps(server: Serving) -> None:
    kind = {"content-type": "application/x-www-form-urlencoded"}
    answer = server.http.post("/api/chat", content=b"{}", headers=kind)
    assert answer.json()["error"].endswith("Content-Type: application/json")


FORM, PAGE = "application/x-www-form-urlencoded", {"origin": "http://localhost:3000"}
CURL = {"user-agent": "curl/8.1"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        *(
            ({"content-type": kind}, 415)
            for kind in ("text/plain", FORM, "multipart/form-data", "")
        ),
        # some clients of Ollama's do not say; a page could leave it out to be asked no questions
        ({}, 200),
        (PAGE, 415),
        # curl calls every body a form, and so do the examples of everybody's documentation
        ({"content-type": FORM, **CURL}, 200),
        ({"content-type": FORM, **CURL, **PAGE}, 415),
        ({"content-type": "text/plain", **CURL}, 415),
    ],
)
def test_only_programs_need_not_say_that_they_send_json(
    server: Serving, headers: dict[str, str], status: int
) -> None:
    body = json.dumps(HELLO).encode()
    assert server.http.post(CHAT, content=body, headers=headers).status_code == status


@pytest.mark.parametrize("packed", ["gzip", "zstd", "br"])
def test_a_packed_body_is_refused_as_such(server: Serving, packed: str) -> None:
    kind = {"content-type": "application/json", "content-encoding": packed}
    answer = server.http.post("/api/chat", content=b"\x1f\x8b", headers=kind)
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "identity"
    assert packed in answer.json()["error"]
    kind["content-encoding"] = "identity"
    body = json.dumps(HELLO).encode()
    assert server.http.post(CHAT, content=body, headers=kind).status_code == 200


def test_a_request_has_a_name_for_whoever_looks_for_it(server: Serving) -> None:
    for headers in ({}, {"host": "evil.example"}):
        said = server.http.get("/health", headers={**headers, "x-request-id": "abc-1"})
        assert said.headers["x-request-id"] == "abc-1"
        made = {server.http.get("/health", headers=headers).headers["x-request-id"] for _ in "12"}
        assert len(made) == 2
    odd = server.http.get("/health", headers={"x-request-id": "a b"})
    assert odd.headers["x-request-id"] != "a b"


def test_a_body_has_a_limit(tmp_path: Path) -> None:
    with serving(table(tmp_path), access=Access(body=1000)) as server:
        assert server.post(CHAT, HELLO).status_code == 200
        assert server.post(CHAT, {**HELLO, "pad": "x" * 2000}).status_code == 413
        chunks = (b" " * 600 for _ in range(4))  # of no known length
        kind = {"content-type": "application/json"}
        assert server.http.post(CHAT, content=chunks, headers=kind).status_code == 413


def test_keys(tmp_path: Path) -> None:
    with serving(table(tmp_path), access=Access(keys=("first", "sécond"))) as server:
        assert server.http.get("/health").status_code == 200
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "first"},
            {"x-api-key": ""},
        ):
            answer = server.post(CHAT, HELLO, headers=headers)
            assert answer.status_code == 401, headers
            assert answer.json()["error"]["code"] == "invalid_api_key"
        both = {"authorization": "Bearer wrong", "x-api-key": "first"}
        for headers in ({"authorization": "Bearer first"}, {"x-api-key": "first"}, both):
            assert server.post(CHAT, HELLO, headers=headers).status_code == 200
        assert server.http.get("/metrics").status_code == 401


def test_one_key_is_one_client_however_it_is_sent() -> None:
    access = Access(keys=("first", "sécond", "日本"))

    def who(*headers: tuple[str, bytes]) -> str:
        raw = [(name.encode(), value) for name, value in headers]
        return access.client({"type": "http", "headers": raw, "client": ("1.2.3.4", 5)})

    first = {
        who(("authorization", b"Bearer first")),
        who(("authorization", b"bearer  first")),
        who(("x-api-key", b"first")),
        who(("authorization", b"Bearer wrong"), ("x-api-key", b"first")),
    }
    second = {who(("x-api-key", "sécond".encode(kind))) for kind in ("utf-8", "latin-1")}
    third = {who(("x-api-key", "日本".encode()))}
    assert len(first) == len(second) == len(third) == 1
    assert len(first | second | third) == 3
    assert all(name.startswith("key ") for name in first | second | third)
    access.keys = ("another", "first")
    assert {who(("x-api-key", b"first"))} == first, "wherever it stands in the file"
    for nobody in ((), (("x-api-key", b""),), (("authorization", b"Bearer "),)):
        assert who(*nobody) == ""
    assert Access().client({"type": "http", "headers": [], "client": ("1.2.3.4", 5)}) == "1.2.3.4"


@pytest.mark.parametrize("options", [{}, {"parallel": 1}, {"kv_ram": 0}])
def test_what_is_cached_tells_nothing_of_another_keys_prompts(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    said = "My password is hunter2 and the vault is in Porto. "
    guess = "My password is hunter2 and the keys are in Faro. "

    def cached(server: Serving, key: str, text: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "seed": 1}
        chat = server.post(CHAT, body, headers=headers).json()
        assert chat["usage"]["prompt_tokens_details"]["cached_tokens"] == chat["timings"]["cache_n"]
        return int(chat["timings"]["cache_n"])

    access = Access(keys=("first", "second"))
    with serving(table(tmp_path, **options), access=access) as server:
        assert cached(server, "first", said) == 0
        assert cached(server, "first", said) > len("My password"), "it is cached for its own"
        tried = [cached(server, "second", text) for text in (said, guess, said)]
        assert tried[0] == 0
        assert tried[1] > 0, "and the second key has its own"
        raw = {"prompt": "Raw: " + said, "n_predict": 1, "seed": 1}
        headers = [{"x-api-key": key} for key in ("first", "second")]
        assert server.post("/completion", raw, headers=headers[0]).status_code == 200
        assert server.post("/completion", raw, headers=headers[1]).json()["timings"]["cache_n"] == 0


def test_what_is_written_need_not_be_told(tmp_path: Path) -> None:
    with serving(table(tmp_path), slots=False) as server:
        for path in ("/slots", "/specllama/events"):
            answer = server.http.get(path)
            assert answer.status_code == 501
            assert "--no-slots" in answer.json()["error"]["message"]
        assert server.http.get("/props").json()["endpoint_slots"] is False
        assert server.http.get("/metrics").status_code == 200


def test_no_key_is_drafted_from_anothers_text(tmp_path: Path) -> None:
    """Drafts are told; one that is copied from an earlier text tells that text."""
    asked = {"proposer": "suffix", "window": "fixed", "draft_max": 8, "max_tokens": 40, "seed": 1}

    def drafted(server: Serving, key: str, text: str, **sampling: Any) -> list[str]:
        body = {"text": text, "params": {**asked, "sampling": sampling}}
        headers = {"x-api-key": key}
        with server.http.stream(
            "POST", "/specllama/generate", json=body, headers=headers
        ) as answer:
            events = [json.loads(line[6:]) for line in answer.iter_lines() if line[:6] == "data: "]
        return ["".join(e["drafted_text"]) for e in events if e["type"] == "round_done"]

    access = Access(keys=("first", "second"))
    with serving(table(tmp_path, parallel=1), access=access) as server:
        headers = {"x-api-key": "first"}
        (space,) = server.post("/tokenize", {"content": " "}, headers=headers).json()["tokens"]
        forced = {"logit_bias": {str(space): 100.0}}
        said = "the vault password is hunter2 and the vault is in Porto. " * 3
        told = {}
        for key in ("first", "second"):
            drafted(server, "first", said)
            told[key] = drafted(server, key, "the vault password is", **forced)
        assert any(text.startswith("hunt") for text in told["first"]), "its own it may copy"
        assert not any("hunt" in text for text in told["second"])


def test_loopback() -> None:
    names = ("localhost", "LOCALHOST.", "a.localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]")
    assert all(map(is_loopback, names))
    assert not any(map(is_loopback, ("", "0.0.0.0", "localhost.evil.example", "128.0.0.1")))


def test_a_model_that_does_not_load_ends_the_server() -> None:
    with pytest.raises(EngineDied, match="while loading"), serving(AbortingRecipe()):
        pass


def test_labels_of_clients_make_room_for_each_other(tmp_path: Path) -> None:
    with serving(table(tmp_path)) as server:

        def ask(label: str) -> None:
            assert server.post(CHAT, HELLO, headers={"x-specllama-slice": label}).status_code == 200

        def counted() -> dict[str, float]:
            found = re.findall(
                r'^specllama:request_success_total\{.*slice="(.*?)".*\} (\S+)',
                server.http.get("/metrics").text, re.M,
            )  # fmt: skip
            return {label: sum(float(n) for one, n in found if one == label) for label, _ in found}

        ask("mine")
        for i in range(SLICES - 1):
            ask(f"odd {i}")
        ask("mine")
        for i in range(5):
            ask(f"new {i}")
        ask("mine")
        found = counted()
        assert found["mine"] == 3
        assert found["other"] == 5
        assert len(found) == SLICES + 1
        assert sum(found.values()) == SLICES + 7


@pytest.mark.parametrize("shown", [False, True])
def test_others_do_not_see_what_a_request_says(tmp_path: Path, shown: bool) -> None:
    body = {**HELLO, "stop": ["secret"], "seed": 4711, "max_tokens": 1500, "stream": True,
            "logit_bias": {"0": -100}}  # fmt: skip
    with serving(table(tmp_path), expose_text=shown) as server:
        with server.http.stream("POST", CHAT, json=body) as answer:
            next(answer.iter_lines())
            slots = server.http.get("/slots").json()
        told = [slot["params"] for slot in slots if "params" in slot]
        for name in ("stop", "grammar", "seed", "logit_bias"):
            assert (name in told[0]) == shown
        assert ("secret" in json.dumps(slots)) == shown
        assert told[0]["temperature"] >= 0


def test_figures_for_prometheus(tmp_path: Path) -> None:
    with serving(table(tmp_path)) as server:
        reply = server.post(
            CHAT,
            {**HELLO, "max_tokens": 60, "specllama": {"proposer": "draft"}},
            headers={"x-specllama-slice": 'co"de'},
        ).json()
        text = server.http.get("/metrics").text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        found = {re.sub(r"\{.*", "", name): float(value) for name, value in values.items()}
        assert found["specllama:generation_tokens_total"] == reply["usage"]["completion_tokens"]
        assert found["specllama:prompt_tokens_total"] == reply["usage"]["prompt_tokens"]
        drafted = found.get("specllama:spec_decode_num_draft_tokens_total", 0)
        assert drafted == reply["timings"].get("draft_n", 0)
        assert found["specllama:request_success_total"] == 1
        assert found["specllama:e2e_request_latency_seconds_count"] == 1
        assert found["specllama:num_requests_running"] == 0
        assert any(r'slice="co\"de"' in name for name in values)
        # what the engine's process counts
        cells = {s: float(values[f'specllama:kv_cells{{model_name="table",state="{s}"}}'])
                 for s in ("live", "dead", "free")}  # fmt: skip
        assert sum(cells.values()) == server.host.info.target.n_ctx
        assert cells["live"] >= reply["usage"]["prompt_tokens"]
        passes = found["specllama:pass_seconds_count"]
        assert passes == found["specllama:pass_rows_count"] > 1
        assert found["specllama:pass_rows_sum"] >= passes
        assert found["specllama:preemptions_total"] == 0
        pid = server.host.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while server.queue.ready:
            time.sleep(0.01)
        gone = server.http.get("/metrics").text
        assert "kv_cells" not in gone
        assert "n_decode_total" not in gone, "0 would be a restart of the server"


def test_whoever_dawdles_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_process, "HEAD_S", 1.0)  # more than a busy machine makes others wait
    monkeypatch.setattr(guard, "BODY_S", 1.0)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    with serving(table(tmp_path)) as server:
        with line_to(server) as silent, line_to(server) as slow:
            slow.sendall(head)
            for _ in range(14):  # a header now and then does not help
                time.sleep(0.1)
                with contextlib.suppress(OSError):
                    slow.sendall(b"x-more: 1\r\n")
            for line in (silent, slow):
                with contextlib.suppress(ConnectionError):
                    assert line.recv(100) == b""
        with line_to(server) as slow:
            slow.sendall(head + b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{")
            assert b" 408 " in slow.recv(1000)
        with line_to(server) as line:  # an answer may take as long as it likes
            body = b'{"messages":[{"role":"user","content":"the rain"}],"max_tokens":60}'
            line.sendall(head + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                         % len(body) + body)  # fmt: skip
            assert b" 200 " in line.recv(1000)
        with line_to(server) as gone:
            gone.sendall(head + b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{")
        assert server.post(CHAT, HELLO).status_code == 200
        time.sleep(0.1)
        assert not caplog.records


def test_no_answer_waits_for_the_client_to_confirm_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[Any] = []
    made = H11Protocol.connection_made

    def watched(protocol: H11Protocol, transport: Any) -> None:
        lines.append(transport.get_extra_info("socket"))
        made(protocol, transport)

    monkeypatch.setattr(H11Protocol, "connection_made", watched)
    with serving(table(tmp_path)) as server:
        assert server.http.get("/health").status_code == 200
        assert lines[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_address_has_so_many_connections(tmp_path: Path) -> None:
    with serving(table(tmp_path), access=Access(connections=3)) as server:
        server.http.get("/health")  # one, which is kept
        with line_to(server), line_to(server):
            with line_to(server) as more:
                assert b" 429 " in more.recv(1000)
            assert server.post(CHAT, HELLO).status_code == 200
        time.sleep(0.1)
        with line_to(server) as again:
            again.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in again.recv(1000)


def test_an_experiment_splits_conversations(tmp_path: Path) -> None:
    shares = (("draft", 50), ("none", 50))
    with serving(table(tmp_path), experiment=shares) as server:
        arms = [server.chat(f"tell of {i}", max_tokens=9)["timings"]["proposer"] for i in range(20)]
        again = [
            server.chat(f"tell of {i}", max_tokens=9)["timings"]["proposer"] for i in range(20)
        ]
        assert arms == again
        assert 2 < arms.count("none") < 18


def test_every_round_can_be_watched_without_its_text(server: Serving) -> None:
    with server.http.stream("GET", "/specllama/events") as answer:
        events = events_of(answer.iter_bytes())
        board = Board()
        board.take(next(events))
        reply = server.chat(max_tokens=40, specllama={"proposer": "draft"})
        figures = 0
        for event in events:
            figures += event["type"] == "figures" and event["live"] >= 0
            assert "emitted_text" not in event
            assert "text" not in event
            assert "seed" not in event
            board.take(event)
            if event["type"] == "over":
                break
        while figures < 2:
            board.take(event := next(events))
            figures += event["type"] == "figures"
    [lane] = board.seen.values()
    assert lane.tokens == reply["usage"]["completion_tokens"]
    assert lane.drafted == reply["timings"].get("draft_n", 0)
    assert lane.proposer == "draft"
    head, context, _, names, line = board.lines(100)
    assert head.startswith("table: 0 of 4 lanes, 0 waiting, ")
    assert f"of {server.host.info.target.n_ctx} cells in use, " in context
    assert line.split()[1:3] == ["draft", str(lane.tokens)]
    assert line.endswith("done")
    lane.over = False
    *_, line = board.lines(200)
    assert line[: names.index("rows") + 4].split()[-1] == str(lane.rows)
    assert line.endswith(lane.why)
    assert len(board.lines(30, 3)) == 3
    assert max(map(len, board.lines(30))) == 30

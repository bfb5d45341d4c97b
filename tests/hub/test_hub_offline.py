"""After a pull the network may be gone: sockets are blocked, everything still works."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ggufs
import pytest
from fakehub import FakeHub, Fault

from specllama.errors import ModelUnavailable
from specllama.models.hub_client import HubClient

REPO = "maker/small-GGUF"
NAME = "small-Q4_0.gguf"

# a connection anywhere, even to this machine, ends the process with a traceback
BLOCKED = """
import socket, sys
def refuse(*args, **kwargs):
    raise AssertionError(f"network used: {args}")
socket.socket.connect = socket.socket.connect_ex = refuse
socket.getaddrinfo = refuse
from specllama.cli import invoke
sys.exit(invoke(sys.argv[1:]))
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, nobody_else: Path, tmp_path: Path) -> Iterator[FakeHub]:
    with FakeHub() as fake:
        fake.add(REPO, {NAME: ggufs.write_llama(tmp_path / NAME, quant="Q4_0").read_bytes()})
        monkeypatch.setenv("HF_ENDPOINT", fake.url)
        yield fake


def run(*arguments: str, code: str = BLOCKED) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.e2e
def test_everything_works_without_a_network(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECLLAMA_THREADS", "1")
    online = "import sys\nfrom specllama.cli import invoke\nsys.exit(invoke(sys.argv[1:]))"
    pulled = run("hub", "pull", f"{REPO}:Q4_0", code=online)
    assert pulled.returncode == 0, pulled.stderr
    asked = len(hub.requests)
    for arguments in (
        ("hub", "ls"),
        ("hub", "path", REPO),
        ("hub", "verify", REPO),
        ("hub", "pairs"),
        ("pair", REPO),
        ("doctor",),
    ):
        done = run(*arguments)
        assert done.returncode == 0, (arguments, done.stderr)
    done = run("run", "-m", f"{REPO}:Q4_0", "--raw", "--max-tokens", "12", "--json", "hello there")
    assert done.returncode == 0, done.stderr
    finish = json.loads(done.stdout.splitlines()[-1])
    assert finish["type"] == "finish"
    assert len(finish["token_ids"]) > 0
    assert len(hub.requests) == asked


def test_the_guard_guards(hub: FakeHub) -> None:
    done = run("hub", "pull", f"{REPO}:Q4_0")
    assert done.returncode != 0
    assert not hub.requests


def test_a_rate_limited_listing_says_when(hub: FakeHub) -> None:
    hub.faults["api"] = Fault(status=429, headers={"Retry-After": "120"})
    online = "import sys\nfrom specllama.cli import invoke\nsys.exit(invoke(sys.argv[1:]))"
    done = run("hub", "info", REPO, code=online)
    assert done.returncode == 3
    assert "is limiting requests" in done.stderr


def test_search_and_info(hub: FakeHub) -> None:
    online = "import sys\nfrom specllama.cli import invoke\nsys.exit(invoke(sys.argv[1:]))"
    found = run("hub", "search", "small", code=online)
    assert found.returncode == 0, found.stderr
    assert REPO in found.stdout
    assert "Q4_0" in found.stdout
    shown = run("hub", "info", REPO, "--json", code=online)
    (data,) = json.loads(shown.stdout)["repositories"]
    assert data["licence"] == "apache-2.0"
    assert data["models"][0]["quant"] == "Q4_0"
    assert run("hub", "search", "nothing-like-it", code=online).stdout == ""


def test_a_search_without_a_network_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    client = HubClient("http://127.0.0.1:9", insecure=True)
    asked: list[object] = []
    monkeypatch.setattr(client._api, "list_models", lambda **more: asked.append(more) or [])
    with pytest.raises(ModelUnavailable, match="cannot be reached"):
        client.search("qwen")
    assert asked == []

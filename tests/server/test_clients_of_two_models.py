"""Clients that choose between two models of one server, as they are set up and as they ask."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from servers import Serving, served, several, until

from specllama.server.loaded_models import Models
from specllama.server.service import Service

TURNS = [{"role": "user", "content": "the rain"}]
SEED = {"seed": 3, "max_tokens": 12}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with served(Service(Models(several(tmp_path, "large", "small")))) as running:
        yield running


def loaded(server: Serving) -> list[str]:
    return [model["name"] for model in server.http.get("/api/ps").json()["models"]]


def said(frames: list[Any]) -> str:
    deltas = [frame["choices"][0] for frame in frames if isinstance(frame, dict)]
    return "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in deltas)


def test_llm(server: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    models = [
        {"model_id": f"here-{name}", "model_name": name, "api_base": f"{server.url}/v1"}
        for name in ("large", "small")
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models), "utf-8")
    import llm

    texts = {}
    for name in ("large", "small"):
        model = llm.get_model(f"here-{name}")
        model.key = "none"
        texts[name] = model.prompt("the rain", **SEED).text()
        plain = server.chat(model=name, **SEED)["choices"][0]["message"]["content"]
        assert texts[name] == plain != ""
    assert texts["large"] != texts["small"]
    assert loaded(server) == ["large", "small"]


def test_continue(server: Serving) -> None:
    """One model chats, another completes what is typed; both behind one ``apiBase``."""
    listed = [model["id"] for model in server.http.get("/v1/models").json()["data"]]
    assert listed == ["large", "small"]
    key = {"Authorization": "Bearer none", "api-key": "none", "x-api-key": "none"}
    server.http.headers.update(key)
    chat = {"model": "large", "messages": TURNS, "stream": True, **SEED}
    typed = {"model": "small", "prompt": "the rain", "stream": True, "stop": ["\n\n", "/src/"],
             "temperature": 0.01, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0,
             **SEED}  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        chatted = pool.submit(server.frames, "/v1/chat/completions", chat)
        completed = pool.submit(server.frames, "/v1/completions", typed)
        frames = {"large": chatted.result(), "small": completed.result()}
    for name, told in frames.items():
        assert {frame["model"] for frame in told if isinstance(frame, dict)} == {name}
        assert told[-1] == "[DONE]"
        assert said(told)


def test_open_webui_as_openai(server: Serving) -> None:
    """It lists models, asks several of them at once, and then one for a title."""
    listed = server.http.get("/v1/models", headers={"Authorization": "Bearer none"}).json()
    assert all(model["object"] == "model" for model in listed["data"])
    names = [model["id"] for model in listed["data"]]

    def ask(name: str) -> list[Any]:
        options = {"stream_options": {"include_usage": True}, "stream": True}
        return server.frames(
            "/v1/chat/completions", {"model": name, "messages": TURNS, **options, **SEED}
        )

    with ThreadPoolExecutor(2) as pool:
        replies = dict(zip(names, pool.map(ask, names), strict=True))
    for name, frames in replies.items():
        whole = server.chat(model=name, **SEED)["choices"][0]["message"]["content"]
        told = [frame for frame in frames if isinstance(frame, dict)]
        assert said([frame for frame in told if frame["choices"]]) == whole
        assert told[-1]["usage"]["completion_tokens"] > 0
    title = {"model": "small", "messages": TURNS, "stream": False, "max_completion_tokens": 8}
    answer = server.post("/v1/chat/completions", title).json()
    assert answer["usage"]["completion_tokens"] <= 8


def test_open_webui_as_ollama(server: Serving) -> None:
    """It asks for a version, for what is here and what is loaded, chats, and unloads."""
    assert server.http.get("/api/version").json()["version"]
    here = server.http.get("/api/tags").json()["models"]
    assert [model["model"] for model in here] == ["large", "small"]
    assert all({"name", "modified_at", "size", "digest", "details"} <= set(one) for one in here)
    options = {"seed": 3, "num_predict": 12, "temperature": 0.5}
    chat = {"model": "small", "messages": TURNS, "options": options, "stream": True}
    with server.http.stream("POST", "/api/chat", json=chat) as answer:
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert lines[-1]["done"] is True
    assert {line["model"] for line in lines} == {"small"}
    running = server.http.get("/api/ps").json()["models"]
    assert [model["model"] for model in running] == ["large", "small"]
    assert all({"expires_at", "size_vram", "digest", "details"} <= set(one) for one in running)
    for name in ("large", "small"):
        gone = {"model": name, "prompt": "", "keep_alive": 0, "stream": False}
        assert server.post("/api/generate", gone).json()["done_reason"] == "unload"
    until(lambda: loaded(server) == [])


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_ollamas_examples_are_curls(server: Serving) -> None:
    """Load, list, unload, as its documentation shows them: without a word on the body's kind."""

    def curl(path: str, *more: str) -> Any:
        words = ["curl", "-s", "--noproxy", "*", f"{server.url}{path}", *more]
        return json.loads(subprocess.run(words, capture_output=True, timeout=60).stdout)

    begun = curl("/api/generate", "-d", '{"model": "small"}')
    assert (begun["done"], begun["response"]) == (True, "")
    begun = curl("/api/chat", "-d", '{"model": "small", "messages": []}')
    assert (begun["done_reason"], begun["message"]["content"]) == ("load", "")
    [_, small] = curl("/api/ps")["models"]
    assert small["name"] == small["model"] == "small"
    assert {"parent_model", "format", "family", "families", "parameter_size",
            "quantization_level"} <= set(small["details"])  # fmt: skip
    gone = curl("/api/chat", "-d", '{"model": "small", "messages": [], "keep_alive": 0}')
    assert (gone["done_reason"], gone["done"]) == ("unload", True)
    until(lambda: loaded(server) == ["large"])

"""Anthropic's, llama-server's and Ollama's routes say what OpenAI's say."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import Serving, served, several, until

from specllama.server.loaded_models import Models
from specllama.server.service import Service

TURNS = [{"role": "user", "content": "the rain"}]
OPTIONS = {"seed": 3, "temperature": 0.7, "logit_bias": {"0": -100}}
N = 24


@pytest.fixture(scope="module")
def text(server: Serving) -> str:
    """What they all have to say."""
    return str(server.chat(**OPTIONS, max_tokens=N)["choices"][0]["message"]["content"])


def lines(server: Serving, path: str, body: Any) -> list[dict[str, Any]]:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_anthropic(server: Serving, text: str) -> None:
    asked = {"messages": TURNS, "max_tokens": N, "model": "claude", **OPTIONS}
    reply = server.post("/v1/messages", asked).json()
    assert reply["type"] == "message"
    assert reply["content"] == [{"type": "text", "text": text}]
    assert reply["stop_reason"] in ("end_turn", "max_tokens")
    used = reply["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == 8
    counted = server.post("/v1/messages/count_tokens", {"messages": TURNS}).json()
    assert counted == {"input_tokens": 8}
    events = server.frames("/v1/messages", {**asked, "stream": True})
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == text
    assert events[-2]["delta"]["stop_reason"] == reply["stop_reason"]
    assert events[-2]["usage"]["output_tokens"] == used["output_tokens"]


def test_anthropic_says_the_same_of_a_prompt_first_and_last(server: Serving) -> None:
    turns = [{"role": "user", "content": "a prompt that is read once and then taken again"}]
    asked = {"messages": turns, "max_tokens": 4, "stream": True, **OPTIONS}
    for cached in (False, True):
        start, *_, end, _ = server.frames("/v1/messages", asked)
        first, last = start["message"]["usage"], end["usage"]
        assert {**first, "output_tokens": last["output_tokens"]} == last
        assert (first["cache_read_input_tokens"] > 0) == cached


def test_anthropic_stop_sequences_and_blocks(server: Serving, text: str) -> None:
    asked = {
        "system": [{"type": "text", "text": "Be short."}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "the rain"}]}],
        "max_tokens": N,
        **OPTIONS,
    }
    whole = server.post("/v1/messages", asked).json()["content"][0]["text"]
    assert whole
    cut = server.post("/v1/messages", {**asked, "stop_sequences": [whole[3:5]]}).json()
    assert cut["stop_reason"] == "stop_sequence"
    assert cut["stop_sequence"] == whole[3:5]
    assert cut["content"][0]["text"] == whole[: whole.index(whole[3:5])]


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 501, "api_error"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "invalid_request_error"),
    ],
)
def test_anthropic_errors(server: Serving, fields: Any, status: int, kind: str) -> None:
    answer = server.post("/v1/messages", {"messages": TURNS, "max_tokens": 5, **fields})
    assert answer.status_code == status
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == kind


def test_llama_server(server: Serving) -> None:
    asked = {"prompt": "the rain", "n_predict": N, **OPTIONS}
    whole = server.post("/completion", {**asked, "n_probs": 2, "return_tokens": True}).json()
    done = server.post("/v1/completions", {"prompt": "the rain", "max_tokens": N, **OPTIONS}).json()
    assert whole["content"] == done["choices"][0]["text"]
    assert whole["stop"] is True
    assert whole["stop_type"] in ("eos", "limit")
    assert whole["tokens_predicted"] == len(whole["tokens"]) == whole["timings"]["predicted_n"]
    assert len(whole["completion_probabilities"]) == whole["tokens_predicted"]
    assert whole["generation_settings"]["temperature"] == 0.7
    frames = server.frames("/completion", {**asked, "stream": True})
    assert "".join(frame["content"] for frame in frames) == whole["content"]
    assert [frame["stop"] for frame in frames] == [False] * (len(frames) - 1) + [True]
    many = server.post("/completion", {**asked, "prompt": ["the rain", "a ship"]}).json()
    assert many[0]["content"] == whole["content"]
    endless = server.post("/completion", {**asked, "n_predict": -1, "logit_bias": []}).json()
    assert endless["stop_type"] == "eos"


def test_llama_server_tokens_and_properties(server: Serving) -> None:
    ids = server.post("/tokenize", {"content": "the rain"}).json()["tokens"]
    assert ids == [2, 9, 1, 7, 10, 3, 5, 6]
    pieces = server.post("/tokenize", {"content": "the", "with_pieces": True}).json()["tokens"]
    assert [piece["piece"] for piece in pieces] == ["t", "h", "e"]
    assert server.post("/detokenize", {"tokens": ids}).json() == {
        "content": "the rain",
        "prompt": "the rain",
    }
    assert server.post("/detokenize", {"tokens": [10**6]}).status_code == 400
    assert server.post("/apply-template", {"messages": TURNS}).json() == {"prompt": "the rain"}
    props = server.http.get("/props").json()
    assert props["chat_template"] == ""
    assert props["total_slots"] == 4
    assert props["default_generation_settings"]["n_ctx"] == 2048
    slots = server.http.get("/slots").json()
    assert [slot["is_processing"] for slot in slots] == [False] * 4


def test_ollama(server: Serving, text: str) -> None:
    asked = {"model": "any", "messages": TURNS, "options": {**OPTIONS, "num_predict": N}}
    *parts, end = lines(server, "/api/chat", asked)
    assert "".join(part["message"]["content"] for part in parts) == text
    assert not any(part["done"] for part in parts)
    assert end["done"]
    assert end["done_reason"] in ("stop", "length")
    whole = server.post("/api/chat", {**asked, "stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": text}
    assert whole["eval_count"] == end["eval_count"]
    prompt = {"model": "any", "prompt": "the rain", "options": asked["options"]}
    *parts, end = lines(server, "/api/generate", prompt)
    assert "".join(part["response"] for part in parts) == text
    assert server.post("/api/generate", {**prompt, "stream": False}).json()["response"] == text


def test_ollama_models(server: Serving) -> None:
    assert server.http.get("/api/version").json()["version"][0].isdigit()
    [model] = server.http.get("/api/tags").json()["models"]
    assert model["name"] == model["model"] == "table"
    [model] = server.http.get("/api/ps").json()["models"]
    assert model["context_length"] == 2048
    shown = server.post("/api/show", {"model": "table"}).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert "temperature" in shown["parameters"]
    assert shown["modelfile"].startswith("FROM table\nTEMPLATE ")
    assert server.post("/api/pull", {"model": "x"}).status_code == 501
    wrong = server.post("/api/chat", {"messages": [{"role": "king", "content": ""}]})
    assert wrong.status_code == 400
    assert "king" in wrong.json()["error"]


def test_ollama_asks_a_model_without_thoughts_to_think(server: Serving) -> None:
    for path, asked in (("chat", {"messages": TURNS}), ("generate", {"prompt": "the rain"})):
        for think, status in ((False, 200), (None, 200), (True, 400), ("high", 400)):
            body = {**asked, "stream": False, "think": think, "options": {"num_predict": 2}}
            answer = server.post(f"/api/{path}", body)
            assert answer.status_code == status
            assert status == 200 or "does not support thinking" in answer.json()["error"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_with_every_piece(server: Serving, path: str) -> None:
    """vLLM's way. What is written within some milliseconds is one piece: hence many tokens."""
    n = 400
    asked = {"messages": TURNS, "prompt": "the rain", "max_tokens": n, "stream": True, **OPTIONS}
    stats = {"include_usage": True, "continuous_usage_stats": True}
    frames = server.frames(path, {**asked, "stream_options": stats})[:-1]
    told = [frame["usage"] for frame in frames if "usage" in frame]
    assert len(told) >= 2
    written = [usage["completion_tokens"] for usage in told]
    assert written == sorted(written)
    assert written[0] < written[-1] == n
    assert {usage["prompt_tokens"] for usage in told} == {8}
    for options in ({"include_usage": True}, {"continuous_usage_stats": True}):
        frames = server.frames(path, {**asked, "stream_options": options})
        assert sum("usage" in frame for frame in frames) == bool(options.get("include_usage"))


def test_vllms_way_to_ask_for_life(server: Serving) -> None:
    assert server.http.get("/ping").status_code == server.http.post("/ping").status_code == 200


# -- clients that choose between two models of one server --


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Serving]:
    with served(Service(Models(several(tmp_path, "large", "small")))) as running:
        yield running


def loaded(two: Serving) -> list[str]:
    return [model["name"] for model in two.http.get("/api/ps").json()["models"]]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_ollamas_examples_are_curls(two: Serving) -> None:
    """Load, list, unload, as its documentation shows them: without a word on the body's kind."""

    def curl(path: str, *more: str) -> Any:
        words = ["curl", "-s", "--noproxy", "*", f"{two.url}{path}", *more]
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
    until(lambda: loaded(two) == ["large"])

"""``/v1/completions``, and log probabilities of both kinds of completions."""

from __future__ import annotations

import math
from typing import Any

import pytest
from servers import Serving


def ask(server: Serving, **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/completions", {"prompt": "the rain", "seed": 1, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_completion(server: Serving) -> None:
    done = ask(server)
    assert done["object"] == "text_completion"
    assert 0 < done["usage"]["completion_tokens"] <= 16
    assert done["choices"][0]["text"]
    assert done["timings"]["seed"] == 1


def test_prompts_of_every_kind(server: Serving) -> None:
    text = ask(server, prompt="the rain")["choices"]
    ids = [2, 9, 1, 7, 10, 3, 5, 6]  # the same in tokens
    assert ask(server, prompt=ids)["choices"] == text
    two = ask(server, prompt=["the rain", "a ship"], n=2)
    assert [choice["index"] for choice in two["choices"]] == [0, 1, 2, 3]
    assert two["choices"][0]["text"] == text[0]["text"]
    assert two["usage"]["prompt_tokens"] == 14
    assert ask(server, echo=True)["choices"][0]["text"] == "the rain" + text[0]["text"]


def test_a_streamed_completion(server: Serving) -> None:
    whole = ask(server, logprobs=2, max_tokens=40)["choices"][0]
    asked = {"prompt": "the rain", "seed": 1, "max_tokens": 40, "logprobs": 2}
    *chunks, done = server.frames("/v1/completions", {**asked, "stream": True})
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    told = [chunk["choices"][0].get("logprobs") for chunk in chunks]
    logprobs = [x for one in told if one for x in one["token_logprobs"]]
    assert logprobs == whole["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("proposer", ["none", "draft"])
def test_every_token_has_its_probability_accepted_drafts_too(
    server: Serving, proposer: str
) -> None:
    asked = {
        "logprobs": True,
        "top_logprobs": 3,
        "seed": 2,
        "max_tokens": 60,
        "temperature": 0.5,
        "logit_bias": {"0": -100},
        "specllama": {"proposer": proposer, "window": "fixed", "draft_max": 4},
    }
    reply = server.chat(**asked)
    tokens = reply["choices"][0]["logprobs"]["content"]
    assert len(tokens) == reply["usage"]["completion_tokens"] == 60
    assert (reply["timings"].get("draft_n_accepted", 0) > 5) == (proposer == "draft")
    text = "".join(token["token"] for token in tokens)
    assert text == reply["choices"][0]["message"]["content"]
    for token in tokens:
        top = [other["logprob"] for other in token["top_logprobs"]]
        assert top == sorted(top, reverse=True)
        assert len(top) == 3
        assert token["logprob"] <= 0
        assert sum(map(math.exp, top)) <= 1 + 1e-6
        same = [o["logprob"] for o in token["top_logprobs"] if o["id"] == token["id"]]
        assert same in ([], [token["logprob"]])
    plain = server.chat(**{**asked, "specllama": {"proposer": "none"}})
    assert plain["choices"][0]["logprobs"]["content"] == tokens
    streamed = server.frames(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "the rain"}], **asked, "stream": True},
    )
    parts = [c["choices"][0].get("logprobs") for c in streamed if isinstance(c, dict)]
    assert [t for part in parts if part for t in part["content"]] == tokens


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": 5}, 400, "prompt"),
        ({"prompt": [1, 99999]}, 400, None),
        ({"prompt": ""}, 400, None),
        ({"n": 99}, 400, "n"),
        ({"logprobs": 1000}, 400, "logprobs"),
        ({"stream_options": {}}, 400, "stream_options"),
        ({"suffix": "end"}, 501, "suffix"),
        ({"best_of": 3}, 501, "best_of"),
        ({"echo": True, "prompt": [5]}, 501, "echo"),
    ],
)
def test_refusals(server: Serving, fields: dict[str, Any], status: int, param: str | None) -> None:
    answer = server.post("/v1/completions", {"prompt": "x", **fields})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


def test_further_replies_go_on_from_where_the_first_has_read(server: Serving) -> None:
    prompt = "it rained on the harbour " * 12
    body = {"prompt": prompt, "n": 3, "max_tokens": 12, "temperature": 1.0, "seed": 5}
    three = server.post("/v1/completions", body).json()
    read = three["usage"]["prompt_tokens"]
    cached = three["timings"]["cache_n"]
    assert read > 100
    assert cached >= 2 * (read - 1)
    again = server.post("/v1/completions", body).json()
    assert [c["text"] for c in again["choices"]] == [c["text"] for c in three["choices"]]
    one = server.post("/v1/completions", {**body, "n": 1}).json()
    assert one["choices"][0]["text"] == three["choices"][0]["text"]

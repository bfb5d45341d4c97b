"""``/v1/chat/completions``: whole, streamed, several at once, refused."""

from typing import Any

import httpx2
import pytest
from servers import LANES, Serving, until


def body(text: str = "the rain", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "seed": 1, **fields}


def test_a_reply(server: Serving) -> None:
    reply = server.chat(seed=7)
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "table"
    [choice] = reply["choices"]
    assert choice["index"] == 0
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert choice["finish_reason"] in ("stop", "length")
    used, took = reply["usage"], reply["timings"]
    assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
    assert took["predicted_n"] == used["completion_tokens"]
    assert took["cache_n"] + took["prompt_n"] == used["prompt_tokens"]
    assert took["seed"] == 7
    assert took["rounds"] + took.get("draft_n_accepted", 0) >= took["predicted_n"]


def test_a_stream_says_what_the_whole_says(server: Serving) -> None:
    asked = body(specllama={"proposer": "draft"})
    whole = server.post("/v1/chat/completions", asked).json()
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, done = server.frames("/v1/chat/completions", streamed)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    *chunks, last = chunks
    assert last["choices"] == []
    for field in ("completion_tokens", "prompt_tokens"):
        assert last["usage"][field] == whole["usage"][field]
    assert "usage" not in chunks[-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    text = "".join(delta.get("content", "") for delta in deltas)
    assert text == whole["choices"][0]["message"]["content"]
    ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert ends[:-1] == [None] * (len(ends) - 1)
    assert ends[-1] == whole["choices"][0]["finish_reason"]
    assert chunks[-1]["timings"]["seed"] == 1
    assert all(c["system_fingerprint"].startswith("specllama-") for c in chunks)
    assert "speculative_decoding" in chunks[-1]["metrics"]


def test_the_seed_is_told_and_gives_the_reply_again(server: Serving) -> None:
    asked = {"temperature": 1.0, "logit_bias": {"0": -100}}
    first = server.chat(**asked)
    again = server.chat(**asked, seed=first["timings"]["seed"])
    other = server.chat(**asked, seed=first["timings"]["seed"] + 1)
    assert again["choices"] == first["choices"]
    assert other["choices"] != first["choices"]


def test_several_replies_and_the_first_of_them_is_the_only_one(server: Serving) -> None:
    alone = server.chat(seed=3, temperature=1.0, logit_bias={"0": -100})
    most = server.chat(seed=3, temperature=1.0, n=16, logit_bias={"0": -100})
    texts = [choice["message"]["content"] for choice in most["choices"]]
    assert texts[0] == alone["choices"][0]["message"]["content"]
    assert len(set(texts)) == 16
    assert [choice["index"] for choice in most["choices"]] == list(range(16))
    assert most["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]


def test_of_several_limits_one_stands_before_the_others(server: Serving) -> None:
    limits = {"n_predict": 3, "max_completion_tokens": 5, "max_tokens": 7}
    for name in list(limits):
        used = server.chat(**limits, logit_bias={"0": -100})["usage"]
        assert used["completion_tokens"] == limits.pop(name)


def test_stop_strings(server: Serving) -> None:
    text = server.chat(seed=5, temperature=1.0)["choices"][0]["message"]["content"]
    stop = text[5:7]
    cut = server.chat(seed=5, temperature=1.0, stop=[stop, "\u2603"])["choices"][0]
    assert cut["message"]["content"] == text[: text.index(stop)]
    assert cut["finish_reason"] == "stop"


def test_samplers_and_biases_reach_the_engine(server: Serving) -> None:
    assert server.chat(temperature=0, logit_bias={"5": 100.0})["choices"][0]["message"][
        "content"
    ] == ("i" * 24)
    assert server.chat(temperature=0, logit_bias=[[5, 100.0], [0, False]])["choices"]


def test_whoever_leaves_frees_the_lane(server: Serving) -> None:
    long = body(max_tokens=1500, logit_bias={"0": -100.0})
    for _ in range(3 * LANES):
        with server.http.stream(
            "POST", "/v1/chat/completions", json={**long, "stream": True}
        ) as answer:
            next(answer.iter_lines())
    with pytest.raises(httpx2.ReadTimeout):
        server.post("/v1/chat/completions", long, timeout=0.05)
    until(lambda: not server.queue.running and not server.queue.n_waiting)
    assert server.chat()["choices"]


CHAT, TEXT, ITEMS = "/v1/chat/completions", "/v1/completions", "/v1/responses"
WRONG: list[tuple[str, dict[str, Any], str | None]] = [
    (CHAT, {"max_tokens": "many"}, "max_tokens"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": -2}, "max_completion_tokens"),
    (CHAT, {"temperature": -1}, "temperature"),
    (CHAT, {"temperature": "hot"}, "temperature"),
    (CHAT, {"top_p": 2}, "top_p"),
    (CHAT, {"logprobs": True, "top_logprobs": 129}, "top_logprobs"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"n": 17}, "n"),
    (CHAT, {"seed": -5}, "seed"),
    (CHAT, {"reasoning_effort": "a lot"}, "reasoning_effort"),
    (CHAT, {"logit_bias": {"5": "hot"}}, "logit_bias[...]"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "king", "content": ""}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"specllama": {"proposer": "magic"}}, "specllama.proposer"),
    (CHAT, {"specllama": {"draft_max": 1000}}, "specllama.draft_max"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True},
     "continue_final_message"),
    (ITEMS, {"max_output_tokens": 0}, "max_output_tokens"),
    (ITEMS, {"max_output_tokens": 10**12}, "max_output_tokens"),
    (ITEMS, {"reasoning": {"effort": "a lot"}}, "reasoning.effort"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": 5}, "prompt"),
    (TEXT, {"prompt": [1, 99999]}, None),
    (TEXT, {"prompt": ""}, None),
    (TEXT, {"n": 99}, "n"),
    (TEXT, {"max_tokens": -2}, "max_tokens"),
    (TEXT, {"top_k": 10**12}, "top_k"),
    (TEXT, {"logprobs": 129}, "logprobs"),
    (TEXT, {"stream_options": {}}, "stream_options"),
    (TEXT, {"suffix": "end"}, "suffix"),
    (TEXT, {"best_of": 3}, "best_of"),
    (TEXT, {"echo": True, "prompt": [5]}, "echo"),
    ("/completion", {"n_predict": 10**12}, "n_predict"),
    ("/completion", {"n_probs": 129}, "n_probs"),
    ("/api/chat", {"options": {"num_predict": 10**12}}, "options.num_predict"),
    ("/api/chat", {"options": {"top_p": 2}}, "options.top_p"),
    ("/api/chat", {"think": "a lot"}, "think"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "field"), WRONG)
def test_a_wrong_value_is_refused_by_name(
    server: Serving, path: str, fields: dict[str, Any], field: str | None
) -> None:
    asked = {**body(), "input": "the rain", "prompt": "the rain", "stream": False, **fields}
    answer = server.post(path, asked)
    assert answer.status_code == (501 if field in ("suffix", "best_of", "echo") else 400)
    error = answer.json()["error"]
    told = error if isinstance(error, str) else error["message"]
    assert " must be " not in told or told.startswith(f"{field} must be ")
    if not isinstance(error, str):
        assert error["param"] == field
        assert answer.status_code == 501 or error["type"] == "invalid_request_error"


def test_unknown_fields_mean_nothing(server: Serving) -> None:
    known = server.chat(seed=1)
    assert server.chat(seed=1, frobnicate=[1], user="me")["choices"] == known["choices"]


def test_images_are_not_offered(server: Serving) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    asked = body()
    asked["messages"][0]["content"] = [{"type": "text", "text": "look"}, picture]
    answer = server.post("/v1/chat/completions", asked)
    assert answer.status_code == 501
    assert "text only" in answer.json()["error"]["message"]


def test_models(server: Serving) -> None:
    [model] = server.http.get("/v1/models").json()["data"]
    assert model["id"] == "table"
    assert model["context_length"] == model["max_model_len"] == 2048
    assert server.http.get("/v1/models/table").json() == model
    assert server.http.get("/v1/models/other").status_code == 404
    assert server.http.get("/models").json()["data"] == [model]


def test_what_is_not_offered_says_why(server: Serving) -> None:
    answer = server.post("/v1/embeddings", {"input": "x"})
    assert answer.status_code == 501
    assert "embed" in answer.json()["error"]["message"]
    assert server.http.get("/v1/nothing").status_code == 404
    assert server.http.get("/v1/chat/completions").status_code == 405

"""``/v1/completions``, and log probabilities of both kinds of completions."""

import math
from dataclasses import replace
from typing import Any

import pytest
from servers import Serving

from specllama.events import Finished, ReasoningDelta, RoundDone, TextDelta, Timings
from specllama.server.dialect import Reply
from specllama.server.ollama_api import OllamaDialect
from specllama.server.usage import usage


def ask(server: Serving, **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/completions", {"prompt": "the rain", "seed": 1, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


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
    assert "".join(token["token"] for token in tokens) == reply["choices"][0]["message"]["content"]
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


# -- a reply, known from its events --


ROUND = RoundDone(
    index=0, t_s=0.0, n_past=1, source="", draft_max=0, window_reason="", drafted=(), parents=(),
    drafted_text=(), confidence=(), p=(), q=(), accepted=0, accepted_path=(), target_token=1,
    target_text="", target_kind="plain", emitted=(1,), emitted_text=("",), cut=0, draft_ms=0.0,
    verify_ms=0.0, other_ms=0.0,
)  # fmt: skip


def wrote(*pieces: str) -> RoundDone:
    return replace(ROUND, emitted=tuple(range(len(pieces))), emitted_text=pieces)


def test_tokens_of_a_thought_are_counted() -> None:
    reply = Reply(0)
    reply.receive([wrote("<think>")])
    assert reply.reasoning_n == 0, "nobody knows yet"
    reply.receive([ReasoningDelta("Rain"), wrote("Ra", "in")])
    reply.receive(
        [ReasoningDelta("."), TextDelta("It rains"), wrote(".", "</think>", "It", " rains")]
    )
    assert reply.reasoning_n == 4
    reply.receive([TextDelta(" here"), wrote(" here")])
    assert reply.reasoning_n == 4
    assert usage([reply])["completion_tokens_details"]["reasoning_tokens"] == 4
    plain = Reply(0)
    plain.receive([TextDelta("It"), wrote("It"), TextDelta(" rains"), wrote(" rains")])
    assert plain.reasoning_n == 0


def test_tokens_of_a_prediction_are_counted() -> None:
    reply = Reply(0)
    copied = ("prediction",) * 4
    drafted = replace(ROUND, drafted=(1, 2, 3, 4), parents=(-1, 0, 1, 2), sources=copied)
    reply.receive([replace(drafted, accepted=2, accepted_path=(0, 1)), wrote("a")])
    others = ("draft", "suffix", "prediction", "draft")
    reply.receive([replace(drafted, sources=others, accepted=3, accepted_path=(0, 1, 2))])
    told = usage([reply])["completion_tokens_details"]
    assert told["accepted_prediction_tokens"] == 3
    assert told["rejected_prediction_tokens"] == 2


def ended(prompt_n: int) -> Finished:
    return Finished(
        reason="length", text="", token_ids=(1, 2), seed=1, rounds=2, draft_n=0,
        draft_n_accepted=0, cut=0, prompt_n=prompt_n, cached_n=prompt_n // 2, n_ctx=99,
        proposer="none", verify="match", exactness="", acceptance_rate=None,
        mean_acceptance_length=None,
    )  # fmt: skip


def test_a_prompt_counts_once_whichever_of_its_replies_was_withdrawn() -> None:
    replies = [Reply(i, finished=ended(10 ** (1 + i // 3))) for i in range(9)]
    assert usage(replies, n=3)["prompt_tokens"] == 1110
    for i in (0, 3, 4):
        replies[i].finished = None
    told = usage(replies, n=3)
    assert told["prompt_tokens"] == 1110
    assert told["prompt_tokens_details"] == {"cached_tokens": 555}
    replies[5].finished = None
    assert usage(replies, n=3)["prompt_tokens"] == 1010


def test_ollama_tells_how_long_a_reply_waited() -> None:
    reply = Reply(0, queue_ms=2.5)
    reply.receive([replace(ended(5), timings=Timings(ttft_ms=1.0, decode_ms=4.0))])
    whole = OllamaDialect("m", chat=True).whole([reply])
    assert (whole["load_duration"], whole["total_duration"]) == (2_500_000, 7_500_000)

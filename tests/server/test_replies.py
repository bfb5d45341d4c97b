"""What is known of a reply from its events."""

from __future__ import annotations

from dataclasses import replace

from specllama.events import Finished, ReasoningDelta, RoundDone, TextDelta
from specllama.server.dialect import Reply
from specllama.server.ollama_api import OllamaDialect
from specllama.server.usage import usage

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
    reply.receive([ended(5)])
    assert OllamaDialect("m", chat=True).whole([reply])["load_duration"] == 2_500_000

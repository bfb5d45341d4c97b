"""Costs of a reply and results of its drafts, under the names of llama-server and of vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from specllama.figures import SpecStats
from specllama.rates import share, speed
from specllama.server.dialect import Reply


def timings(replies: Sequence[Reply]) -> dict[str, Any]:
    """Return llama-server's ``timings`` of one reply or several together, plus our own figures."""
    ends = [reply.finished for reply in replies if reply.finished is not None]
    if not ends:
        return {}
    first, expected = ends[0], expected_of(replies)
    out = _speeds(
        sum(end.cached_n for end in ends),
        sum(end.prompt_n - end.cached_n for end in ends),
        sum(end.timings.prefill_ms for end in ends),
        sum(len(end.token_ids) for end in ends),
        sum(end.timings.decode_ms for end in ends),
        len(ends),
    )
    if drafted := sum(end.draft_n for end in ends):
        out["draft_n"] = drafted
        out["draft_n_accepted"] = sum(end.draft_n_accepted for end in ends)
    elif why := replies[0].undrafted:
        out["undrafted"] = why
    if any(expected):
        out["prediction_n"], out["prediction_n_accepted"] = sum(expected), expected[0]
    accepted = [end.accepted_per_position for end in ends]
    return {
        **out,
        "queue_ms": sum(reply.queue_ms for reply in replies),
        "ttft_ms": first.timings.ttft_ms,
        "rounds": sum(end.rounds for end in ends),
        "seed": first.seed,
        "near_ties": sum(end.near_ties for end in ends),
        "exactness": first.exactness,
        "proposer": first.proposer,
        "verify": first.verify,
        "accepted_per_position": [*map(sum, zip_longest(*accepted, fillvalue=0))],
    }


def so_far(reply: Reply) -> dict[str, Any]:
    """Return ``timings`` of a reply that is being written."""
    cached = 0 if reply.started is None else reply.started.cached_n
    read, read_ms = reply.read[-1] if reply.read else (cached, 0.0)
    return _speeds(cached, read - cached, read_ms, reply.written, reply.predicted_ms, 1)


def _speeds(
    cached: int, prompt: int, prompt_ms: float, predicted: int, predicted_ms: float, replies: int
) -> dict[str, Any]:
    """Return times and speeds; 0 for one that is not defined, as llama-server does."""
    return {
        "cache_n": cached,
        "prompt_n": prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": share(prompt_ms, prompt) or 0.0,
        "prompt_per_second": share(prompt * 1e3, prompt_ms) or 0.0,
        "predicted_n": predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": share(predicted_ms, max(0, predicted - replies)) or 0.0,
        "predicted_per_second": speed(predicted, predicted_ms / 1e3, replies) or 0.0,
    }


def metrics(replies: Sequence[Reply]) -> dict[str, Any]:
    """Return vLLM's per-request metrics: rounds with a draft, by its accepted length."""
    drafted = [r for reply in replies for r in reply.rounds if r.drafted]
    stats, by_length = SpecStats.of(drafted), dict[int, Counter[int]]()
    for r in drafted:
        by_length.setdefault(len(r.drafted), Counter())[r.accepted] += 1
    longest = max(by_length, default=0)
    by_accepted = sum(by_length.values(), Counter[int]())
    return {
        "speculative_decoding": {
            "mean_acceptance_length": stats.mean_acceptance_length,
            "draft_acceptance_rate": stats.acceptance_rate,
            "acceptance_histogram": [by_accepted[i] for i in range(longest + 1)],
            "acceptance_histogram_by_draft_length": {
                str(n): [counts[i] for i in range(n + 1)] for n, counts in sorted(by_length.items())
            },
            "num_spec_steps": stats.rounds,
            "num_draft_tokens": stats.drafted,
            "num_accepted_draft_tokens": stats.accepted,
            "num_spec_tokens": longest,
        }
    }


def costs(replies: Sequence[Reply]) -> dict[str, Any]:
    """Return both, as every family's answer ends with them."""
    return {"timings": timings(replies), "metrics": metrics(replies)}


def expected_of(replies: Sequence[Reply]) -> tuple[int, int]:
    """Count the tokens proposed from ``prediction``: accepted ones, and rejected ones."""
    accepted = rejected = 0
    for done in (done for reply in replies for done in reply.rounds):
        taken = sum(done.sources[node] == "prediction" for node in done.accepted_path)
        accepted += taken
        rejected += done.sources.count("prediction") - taken
    return accepted, rejected


def usage(replies: Sequence[Reply], *, n: int = 1) -> dict[str, Any]:
    """Return OpenAI's ``usage``; a prompt counts once for all its ``n`` replies."""
    ends = [reply.finished for reply in replies if reply.finished is not None]
    firsts = {i // n: reply.finished for i, reply in [*enumerate(replies)][::-1] if reply.finished}
    prompt = sum(end.prompt_n for end in firsts.values())
    written = sum(len(end.token_ids) for end in ends)
    accepted, rejected = expected_of(replies)
    return {
        **_tokens(prompt, written),
        "completion_tokens_details": {
            "reasoning_tokens": sum(r.reasoning_n for r in replies),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_n for end in firsts.values())},
    }


def usage_so_far(reply: Reply) -> dict[str, Any]:
    """Return OpenAI's ``usage`` of a reply that is being written."""
    prompt = 0 if reply.started is None else reply.started.prompt_n
    return _tokens(prompt, reply.written)


def _tokens(prompt: int, written: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def finish_reason(reply: Reply) -> str:
    """Return OpenAI's word for the end; a reply that was cut is "length" even if it has calls."""
    reason = reply.ending.openai
    return "tool_calls" if reply.calls and reason != "length" else reason


def short(n: int) -> str:
    """Spell a number of parameters as Ollama does."""
    size, unit = (1e9, "B") if n >= 1e9 else (1e6, "M") if n >= 1e6 else (1e3, "K")
    return f"{n / size:.1f}{unit}"

"""vLLM: acceptance per reply with ``--per-request-spec-decode-metrics``, else by its counters."""

from __future__ import annotations

from specllama.remote.figures import Drafted, Json, each, number, of, text, whole
from specllama.remote.kinds import openai
from specllama.remote.kinds.kind import Found, Heard, Kind, Question
from specllama.remote.wire import Look


def _recognise(look: Look) -> Found | None:
    models = openai.models(look, "vllm")
    version = text(look.object("/version").get("version"))
    if not models and not (version and "vllm:" in (look.text("/metrics") or "")):
        return None
    return Found(version, models=models)


def _body(kind: Kind, asked: Question) -> Json:
    out = openai.body(kind, asked)
    params = asked.params
    if params.regex is not None:
        out["structured_outputs"] = {"regex": params.regex}
    if params.grammar is not None:
        out["structured_outputs"] = {"grammar": params.grammar}
    return out


def _read(chunk: Json, heard: Heard) -> tuple[str, str]:
    told = of(of(chunk.get("metrics")).get("speculative_decoding"))
    heard.draft = drafted(told) or heard.draft
    return openai.read(chunk, heard)


def drafted(told: Json) -> Drafted | None:
    """Read the drafts in ``metrics.speculative_decoding``."""
    n, kept = whole(told.get("num_draft_tokens")), whole(told.get("num_accepted_draft_tokens"))
    if n is None or kept is None:
        return None
    steps, most = whole(told.get("num_spec_steps")), whole(told.get("num_spec_tokens"))
    # how many steps kept 0, 1, ... of their draft
    kept_in = [whole(one) or 0 for one in each(told.get("acceptance_histogram"))]
    kept_at = tuple(sum(kept_in[depth:]) for depth in range(1, len(kept_in)))
    lengths = [whole(one) or 0 for one in each(told.get("per_step_drafted"))]
    if not lengths and steps and most and n == steps * most:
        lengths = [most] * steps
    at = tuple(sum(length >= depth for length in lengths) for depth in range(1, len(kept_in)))
    per_round = number(told.get("mean_acceptance_length"))
    if not lengths:
        return Drafted(n, kept, per_round=per_round)
    return Drafted(n, kept, per_round=per_round, accepted_at=kept_at, drafted_at=at)


KIND = Kind(
    name="vllm",
    title="vLLM",
    recognise=_recognise,
    body=_body,
    read=_read,
    fields=openai.MORE_FIELDS,
    constraints=frozenset({"json_schema", "grammar", "regex"}),
    continues=openai.CONTINUES,
    counters=openai.counters_of(
        "vllm", "generation_tokens_total", "num_requests_running", "num_requests_waiting"
    ),
    refuses=("min_p", "logit_bias"),
    thinks=True,
)

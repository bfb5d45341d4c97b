"""vLLM and SGLang: acceptance per reply, or by their counters.

vLLM reports it with ``--per-request-spec-decode-metrics``; SGLang in ``sglext``, where what was
drafted is a bound, not a count.
"""

from __future__ import annotations

from specllama.remote.address import Look
from specllama.remote.answers import (
    Counters,
    Drafted,
    Json,
    MetricsPage,
    each,
    number,
    of,
    text,
    whole,
)
from specllama.remote.kinds import openai
from specllama.remote.kinds.kind import Found, Heard

_FLAGS = ("speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps",
          "speculative_eagle_topk", "speculative_num_draft_tokens", "tp_size", "dp_size",
          "enable_deterministic_inference")  # fmt: skip


def _is_vllm(look: Look) -> Found | None:
    models = openai.models(look, "vllm")
    version = text(look.object("/version").get("version"))
    if not models and not (version and "vllm:" in (look.text("/metrics") or "")):
        return None
    return Found(version, models=models)


def _from_vllm(chunk: Json, heard: Heard) -> tuple[str, str]:
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


VLLM = openai.alike(
    name="vllm",
    title="vLLM",
    recognise=_is_vllm,
    read=_from_vllm,
    fields=openai.MORE_FIELDS,
    constraints={
        "json_schema": "",
        "grammar": "structured_outputs.grammar",
        "regex": "structured_outputs.regex",
    },
    continues=openai.CONTINUES,
    counters=openai.counters_of(
        "vllm", "generation_tokens_total", "num_requests_running", "num_requests_waiting"
    ),
    refuses=("min_p", "logit_bias"),
    thinks=True,
)


def _is_sglang(look: Look) -> Found | None:
    info = look.object("/server_info") or look.object("/get_server_info")
    models = openai.models(look, "sglang") if not info else openai.models(look)
    if not ("internal_states" in info or models) or (info and not text(info.get("version"))):
        return None
    told = [f"--{name.replace('_', '-')} {info[name]}" for name in _FLAGS
            if info.get(name) not in (None, "", False, 1)]  # fmt: skip
    speculates = bool(info.get("speculative_algorithm")) if info else None
    return Found(text(info.get("version")), " ".join(told), models, speculates)


def _from_sglang(chunk: Json, heard: Heard) -> tuple[str, str]:
    told = of(of(chunk.get("sglext")).get("spec_tokens_details"))
    n, kept = (whole(told.get(f"spec_num_{name}_drafts")) for name in ("proposed", "correct"))
    if kept is not None:
        # the server reckons what it drafted from its settings: fewer may have been
        heard.draft = Drafted(
            n, kept, at_most=True, per_round=number(told.get("spec_accept_length"))
        )
    return openai.read(chunk, heard)


def _sglang_counters(look: Look) -> Counters | None:
    found = MetricsPage(look.text("/metrics") or "", "sglang:")
    if not found:
        states = each(look.object("/server_info").get("internal_states"))
        per_round = number(of(states[0] if states else {}).get("avg_spec_accept_length"))
        return None if per_round is None else Counters(per_round=per_round)
    return Counters(
        drafts=found.total("sglang:spec_verify_calls_total"),
        generated=found.total("sglang:generation_tokens_total"),
        running=found.total("sglang:num_running_reqs"),
        waiting=found.total("sglang:num_queue_reqs"),
        per_round=found.mean("sglang:spec_accept_length"),
    )


SGLANG = openai.alike(
    name="sglang",
    title="SGLang",
    recognise=_is_sglang,
    read=_from_sglang,
    fields=openai.MORE_FIELDS,
    constraints={"json_schema": "", "grammar": "ebnf", "regex": "regex"},
    always={"return_spec_tokens_details": True},
    continues={"continue_final_message": True},
    counters=_sglang_counters,
    figures_hint="start it with --enable-metrics",
    thinks=True,
)

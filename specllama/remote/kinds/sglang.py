"""SGLang: acceptance per reply in ``sglext``, where what was drafted is a bound, not a count."""

from __future__ import annotations

from specllama.remote.figures import (
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
from specllama.remote.kinds.kind import Found, Heard, Kind, Question
from specllama.remote.wire import Look

_FLAGS = ("speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps",
          "speculative_eagle_topk", "speculative_num_draft_tokens", "tp_size", "dp_size",
          "enable_deterministic_inference")  # fmt: skip


def _recognise(look: Look) -> Found | None:
    info = look.object("/server_info") or look.object("/get_server_info")
    models = openai.models(look, "sglang") if not info else openai.models(look)
    if not ("internal_states" in info or models) or (info and not text(info.get("version"))):
        return None
    told = [f"--{name.replace('_', '-')} {info[name]}" for name in _FLAGS
            if info.get(name) not in (None, "", False, 1)]  # fmt: skip
    speculates = bool(info.get("speculative_algorithm")) if info else None
    return Found(text(info.get("version")), " ".join(told), models, speculates)


def _body(kind: Kind, asked: Question) -> Json:
    out = openai.body(kind, asked)
    if asked.params.regex is not None:
        out["regex"] = asked.params.regex
    if asked.params.grammar is not None:
        out["ebnf"] = asked.params.grammar
    return {**out, "return_spec_tokens_details": True}


def _read(chunk: Json, heard: Heard) -> tuple[str, str]:
    told = of(of(chunk.get("sglext")).get("spec_tokens_details"))
    n, kept = (whole(told.get(f"spec_num_{name}_drafts")) for name in ("proposed", "correct"))
    if kept is not None:
        # the server reckons what it drafted from its settings: fewer may have been
        heard.draft = Drafted(
            n, kept, at_most=True, per_round=number(told.get("spec_accept_length"))
        )
    return openai.read(chunk, heard)


def _counters(look: Look) -> Counters | None:
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


KIND = Kind(
    name="sglang",
    title="SGLang",
    recognise=_recognise,
    body=_body,
    read=_read,
    fields=openai.MORE_FIELDS,
    constraints=frozenset({"json_schema", "grammar", "regex"}),
    continues={"continue_final_message": True},
    counters=_counters,
    figures_hint="start it with --enable-metrics",
    thinks=True,
)

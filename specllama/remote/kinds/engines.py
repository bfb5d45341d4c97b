"""The engines with figures of their own: vLLM, SGLang, llama-server, our own server, Ollama.

vLLM           reports acceptance per reply with ``--per-request-spec-decode-metrics``, else by its
               counters
SGLang         reports it in ``sglext``, where what was drafted is a bound, not a count
llama-server   reports it in ``timings``, as our own server does when other clients ask it; runs
               alone or as a router. With our own, ``remote_engine`` speaks our own language
Ollama         lines of JSON; it drafts by the model's file and does not report it
"""

from __future__ import annotations

import json
from dataclasses import replace

from specllama.remote.address import Look
from specllama.remote.answers import (
    Counters,
    Drafted,
    Json,
    MetricsPage,
    each,
    likely_of,
    number,
    of,
    text,
    whole,
)
from specllama.remote.kinds import openai
from specllama.remote.kinds.kind import Found, Heard, Kind, Question, Served, same
from specllama.settings.params import EFFORTS

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


_LLAMA_FIELDS = {
    **openai.MORE_FIELDS,
    **same("repeat_penalty", "typical_p", "repeat_last_n", "dry_multiplier", "dry_base"),
    **same("dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    **same("xtc_probability", "xtc_threshold"),
}


def _is_llama_server(look: Look) -> Found | None:
    props = look.object("/props")
    build, router = text(props.get("build_info")), props.get("role") == "router"
    if not build and not router:
        if models := openai.models(look, "llamacpp"):  # /props may want a key
            return Found(models=models)
        return None
    if router:
        listed = [of(one) for one in each(look.object("/models").get("data"))]
        return Found(build, "router", tuple(
            Served(text(one.get("id")), 0, of(one.get("status")).get("value") == "loaded")
            for one in listed if text(one.get("id"))
        ))  # fmt: skip
    n_ctx = whole(of(props.get("default_generation_settings")).get("n_ctx")) or 0
    slots = whole(props.get("total_slots"))
    told = [f"-c {n_ctx * (slots or 1)}" if n_ctx else "", f"-np {slots}" if slots else "",
            "--metrics" if props.get("endpoint_metrics") else ""]  # fmt: skip
    name = text(props.get("model_alias"))
    served = (Served(name, n_ctx),) if name else openai.models(look)
    return Found(build, " ".join(filter(None, told)), served)


def _to_llama_server(kind: Kind, asked: Question) -> Json:
    out = openai.body(kind, asked)
    if asked.messages is None and asked.params.json_schema is not None:
        del out["response_format"]
        out["json_schema"] = json.loads(asked.params.json_schema)
    if kind is SPECLLAMA and asked.speculate is not None:
        out["specllama"] = {"proposer": asked.params.proposer if asked.speculate else "none"}
    return out


def _from_llama_server(chunk: Json, heard: Heard) -> tuple[str, str]:
    told = of(chunk.get("timings"))
    openai.drafted(heard, told, "draft_n", "draft_n_accepted")
    if told:
        heard.cached_n = whole(told.get("cache_n"))
        heard.tokens = whole(told.get("predicted_n"))
    return openai.read(chunk, heard)


_counters = openai.counters_of(
    "llamacpp", "tokens_predicted_total", "requests_processing", "requests_deferred"
)


def _is_ours(look: Look) -> Found | None:
    target = of(look.object("/specllama/info").get("target"))
    if name := text(target.get("name")):
        return Found(models=(Served(name),))
    return Found() if _turns_away(look) else None


def _turns_away(look: Look) -> bool:
    """True if it is our server, but loads its model or needs a key."""
    status, _, answer = look.get("/specllama/info")
    try:
        error = of(of(json.loads(answer)).get("error")) if status in (401, 503) else {}
    except (ValueError, RecursionError):
        return False
    return error.get("code") in ("loading", "invalid_api_key")


LLAMA_SERVER = Kind(
    name="llama-server",
    title="llama-server",
    recognise=_is_llama_server,
    body=_to_llama_server,
    read=_from_llama_server,
    fields=_LLAMA_FIELDS,
    constraints={"json_schema": "", "grammar": "grammar"},
    continues={},
    counters=_counters,
    figures_hint="start it with --metrics",
    thinks=True,
)
SPECLLAMA = replace(
    LLAMA_SERVER,
    name="specllama",
    title="specllama",
    recognise=_is_ours,
    constraints={"json_schema": "", "grammar": "grammar", "regex": "structured_outputs.regex"},
    switches=True,
    figures_hint="",
)


_OLLAMA_FIELDS = {
    **same("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty"),
    **same("repeat_last_n", "presence_penalty", "frequency_penalty"),
}


def _is_ollama(look: Look) -> Found | None:
    version = text(look.object("/api/version").get("version"))
    if not version:
        return None
    listed = [of(one) for one in each(look.object("/api/tags").get("models"))]
    names = [text(one.get("name")) or text(one.get("model")) for one in listed]
    return Found(version, models=tuple(Served(name) for name in names if name))


def _to_ollama(kind: Kind, asked: Question) -> Json:
    params = asked.params
    options = kind.settings(params)
    if params.max_tokens is not None:
        options["num_predict"] = params.max_tokens
    if params.seed is not None:
        options["seed"] = params.seed % openai.SEEDS
    if params.stop:
        options["stop"] = list(params.stop)
    if asked.speculate is False:
        options["draft_num_predict"] = 0  # it loads the model anew for that
    out: Json = {"model": asked.model, "stream": asked.stream, "options": options}
    if asked.messages is None:
        out |= {"prompt": asked.text, "raw": True}
    else:
        out["messages"] = asked.messages
        if params.think != "auto":
            out["think"] = params.think if params.think in EFFORTS else params.think == "on"
    if params.json_schema is not None:
        out["format"] = json.loads(params.json_schema)
    if params.chances is not None:
        out |= {"logprobs": True, "top_logprobs": params.chances}
    return out


def _from_ollama(chunk: Json, heard: Heard) -> tuple[str, str]:
    message = of(chunk.get("message")) or chunk
    said = text(message.get("content")) or text(message.get("response"))
    heard.logprobs += likely_of({"content": chunk.get("logprobs")})
    if chunk.get("done") is True:
        heard.finish = text(chunk.get("done_reason")) or "stop"
        heard.tokens = whole(chunk.get("eval_count"))
        heard.prompt_n = whole(chunk.get("prompt_eval_count"))
    return text(message.get("thinking")), said


OLLAMA = Kind(
    name="ollama",
    title="Ollama",
    recognise=_is_ollama,
    body=_to_ollama,
    read=_from_ollama,
    chat="/api/chat",
    raw="/api/generate",
    fields=_OLLAMA_FIELDS,
    continues={},
    switches=True,
    thinks=True,
)

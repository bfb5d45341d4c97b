"""The engines, each with a row; most share OpenAI's dialect.

vLLM           reports acceptance per reply with ``--per-request-spec-decode-metrics``, else by its
               counters
SGLang         reports it in ``sglext``, where what was drafted is a bound, not a count
llama-server   reports it in ``timings``, as our own server does when other clients ask it; runs
               alone or as a router. With our own, ``remote_engine`` speaks our own language
LM Studio      reports it where it is asked at ``/api/v0``
Ollama         lines of JSON; it drafts by the model's file and does not report it
mlx-lm         takes the draft's length in a request; it reports no drafting
transformers   ``transformers serve`` takes sampling as a text of JSON, and prompt lookup in the
               request
TensorRT-LLM   reports nothing of one reply, and reading its ``/metrics`` empties it
TGI            is archived: it is recognised, and good for a chat
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

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
from specllama.remote.kinds.kind import Found, Heard, Kind, Question, Served, same
from specllama.settings.params import EFFORTS, GenerateParams, template_arguments

FIELDS = same("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias")
MORE_FIELDS = FIELDS | same("top_k", "min_p", "ignore_eos", repeat_penalty="repetition_penalty")
CONTINUES: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
SEEDS = 2**31  # engines take no larger ones alike
LOOKUP = 4  # tokens that prompt lookup drafts, where a caller turns it on
_LONGEST = 32768  # tokens
_VERSION = re.compile(r"(\d+\.\d+\.\d+)-\d+\.\d+")  # of mlx-lm, then of mlx
_IN_CONFIG = ("top_k", "min_p", "typical_p", "repetition_penalty")  # of transformers
_REFUSED = ("stream_options", "logprobs", "top_logprobs")


def body(kind: Kind, asked: Question) -> Json:
    """Build a request, with the fields that an engine's row names."""
    params = asked.params
    out: Json = {"stream": asked.stream, **kind.settings(params), **kind.always}
    if asked.model:
        out["model"] = asked.model
    if asked.messages is None:
        out["prompt"] = asked.text
    else:
        out["messages"] = asked.messages
        out |= (kind.continues or {}) if asked.continues else {}
        if kind.thinks:
            out |= _thinking(params.think, params.template_args)
    if asked.stream:
        out["stream_options"] = {"include_usage": True}
    most = kind.longest if params.max_tokens is None else params.max_tokens
    if most is not None:
        out["max_tokens"] = most
    out |= _seed_and_stop(params)
    if params.ignore_eos and "ignore_eos" in kind.fields:
        out["ignore_eos"] = True
    if params.json_schema is not None:
        schema = {"name": "reply", "schema": json.loads(params.json_schema), "strict": True}
        out["response_format"] = {"type": "json_schema", "json_schema": schema}
    for name, place in kind.constraints.items():
        if place and (value := getattr(params, name)) is not None:
            field, _, inner = place.partition(".")
            out[field] = {inner: value} if inner else value
    if asked.speculate is False:
        out |= kind.off
    if params.chances is not None:
        if asked.messages is None:
            out["logprobs"] = params.chances
        else:
            out |= {"logprobs": True, "top_logprobs": params.chances}
    return out


def _seed_and_stop(params: GenerateParams) -> Json:
    seed: Json = {} if params.seed is None else {"seed": params.seed % SEEDS}
    return {**seed, "stop": list(params.stop)} if params.stop else seed


def _thinking(think: str, template_args: tuple[str, ...]) -> Json:
    told = template_arguments(template_args)
    if think in ("on", "off"):
        told["enable_thinking"] = think == "on"
    out: Json = {"chat_template_kwargs": told} if told else {}
    return {**out, "reasoning_effort": think} if think in EFFORTS else out


def read(chunk: Json, heard: Heard) -> tuple[str, str]:
    """Add one object of an answer, streamed or whole; the new (thought, text)."""
    usage = of(chunk.get("usage"))
    if (n := whole(usage.get("completion_tokens"))) is not None:
        heard.tokens = n
    if (n := whole(usage.get("prompt_tokens"))) is not None:
        heard.prompt_n = n
    if (n := whole(of(usage.get("prompt_tokens_details")).get("cached_tokens"))) is not None:
        heard.cached_n = n
    heard.fingerprint = text(chunk.get("system_fingerprint")) or heard.fingerprint
    thought = said = ""
    for choice in each(chunk.get("choices"))[:1]:
        choice = of(choice)
        new = of(choice.get("delta")) or of(choice.get("message"))
        thought += text(new.get("reasoning")) or text(new.get("reasoning_content"))
        said += spoken(new.get("content")) or text(choice.get("text"))
        heard.logprobs += likely_of(choice.get("logprobs"))
        if finish := text(choice.get("finish_reason")):
            heard.finish = finish
            heard.stop = text(choice.get("stop_reason")) or heard.stop
    return thought, said


def drafted(heard: Heard, told: Json, proposed: str, accepted: str) -> None:
    """Note what was drafted for a reply, if the report of it holds both counts."""
    n, kept = whole(told.get(proposed)), whole(told.get(accepted))
    if n is not None and kept is not None:
        heard.draft = Drafted(n, kept)


def spoken(content: object) -> str:
    """Return a text, or the texts of its parts."""
    return text(content) or "".join(text(of(part).get("text")) for part in each(content))


def models(look: Look, owner: str = "") -> tuple[Served, ...]:
    """List the models of ``/v1/models``, without others' adapters; only those of ``owner`` if
    given."""
    listed = [of(one) for one in each(look.object("/v1/models").get("data"))]
    return tuple(
        Served(text(one.get("id")), whole(one.get("max_model_len")) or 0)
        for one in listed
        if text(one.get("id"))
        and not one.get("parent")
        and (not owner or one.get("owned_by") == owner)
    )


def counters_of(
    engine: str, generated: str, running: str, waiting: str
) -> Callable[[Look], Counters | None]:
    """Return a reader of the counters of an engine that names them as vLLM does."""

    def counters(look: Look) -> Counters | None:
        found = MetricsPage(look.text("/metrics") or "", f"{engine}:")
        spec = f"{engine}:spec_decode_num_"
        if not found:
            return None
        return Counters(
            drafts=found.total(f"{spec}drafts_total"),
            drafted=found.total(f"{spec}draft_tokens_total"),
            accepted=found.total(f"{spec}accepted_tokens_total"),
            accepted_at=found.by(f"{spec}accepted_tokens_per_pos_total", "position"),
            generated=found.total(f"{engine}:{generated}"),
            running=found.total(f"{engine}:{running}"),
            waiting=found.total(f"{engine}:{waiting}"),
        )

    return counters


alike = partial(Kind, body=body, read=read)
"""A row for an engine of this dialect."""


_FLAGS = ("speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps",
          "speculative_eagle_topk", "speculative_num_draft_tokens", "tp_size", "dp_size",
          "enable_deterministic_inference")  # fmt: skip


def _is_vllm(look: Look) -> Found | None:
    served = models(look, "vllm")
    version = text(look.object("/version").get("version"))
    if not served and not (version and "vllm:" in (look.text("/metrics") or "")):
        return None
    return Found(version, models=served)


def _from_vllm(chunk: Json, heard: Heard) -> tuple[str, str]:
    told = of(of(chunk.get("metrics")).get("speculative_decoding"))
    heard.draft = _steps(told) or heard.draft
    return read(chunk, heard)


def _steps(told: Json) -> Drafted | None:
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


VLLM = alike(
    name="vllm",
    title="vLLM",
    recognise=_is_vllm,
    read=_from_vllm,
    fields=MORE_FIELDS,
    constraints={
        "json_schema": "",
        "grammar": "structured_outputs.grammar",
        "regex": "structured_outputs.regex",
    },
    continues=CONTINUES,
    counters=counters_of(
        "vllm", "generation_tokens_total", "num_requests_running", "num_requests_waiting"
    ),
    refuses=("min_p", "logit_bias"),
    thinks=True,
)


def _is_sglang(look: Look) -> Found | None:
    info = look.object("/server_info") or look.object("/get_server_info")
    served = models(look, "sglang") if not info else models(look)
    if not ("internal_states" in info or served) or (info and not text(info.get("version"))):
        return None
    told = [f"--{name.replace('_', '-')} {info[name]}" for name in _FLAGS
            if info.get(name) not in (None, "", False, 1)]  # fmt: skip
    speculates = bool(info.get("speculative_algorithm")) if info else None
    return Found(text(info.get("version")), " ".join(told), served, speculates)


def _from_sglang(chunk: Json, heard: Heard) -> tuple[str, str]:
    told = of(of(chunk.get("sglext")).get("spec_tokens_details"))
    n, kept = (whole(told.get(f"spec_num_{name}_drafts")) for name in ("proposed", "correct"))
    if kept is not None:
        # the server reckons what it drafted from its settings: fewer may have been
        heard.draft = Drafted(
            n, kept, at_most=True, per_round=number(told.get("spec_accept_length"))
        )
    return read(chunk, heard)


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


SGLANG = alike(
    name="sglang", title="SGLang", recognise=_is_sglang, read=_from_sglang, fields=MORE_FIELDS,
    constraints={"json_schema": "", "grammar": "ebnf", "regex": "regex"},
    always={"return_spec_tokens_details": True}, continues={"continue_final_message": True},
    counters=_sglang_counters, figures_hint="start it with --enable-metrics", thinks=True,
)  # fmt: skip


_LLAMA_FIELDS = {
    **MORE_FIELDS,
    **same("repeat_penalty", "typical_p", "repeat_last_n", "dry_multiplier", "dry_base"),
    **same("dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    **same("xtc_probability", "xtc_threshold"),
}


def _is_llama_server(look: Look) -> Found | None:
    props = look.object("/props")
    build, router = text(props.get("build_info")), props.get("role") == "router"
    if not build and not router:
        served = models(look, "llamacpp")  # /props may want a key
        return Found(models=served) if served else None
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
    served = (Served(name, n_ctx),) if name else models(look)
    return Found(build, " ".join(filter(None, told)), served)


def _to_llama_server(kind: Kind, asked: Question) -> Json:
    out = body(kind, asked)
    if asked.messages is None and asked.params.json_schema is not None:
        del out["response_format"]
        out["json_schema"] = json.loads(asked.params.json_schema)
    if kind is SPECLLAMA and asked.speculate is not None:
        out["specllama"] = {"proposer": asked.params.proposer if asked.speculate else "none"}
    return out


def _from_llama_server(chunk: Json, heard: Heard) -> tuple[str, str]:
    told = of(chunk.get("timings"))
    drafted(heard, told, "draft_n", "draft_n_accepted")
    if told:
        heard.cached_n = whole(told.get("cache_n"))
        heard.tokens = whole(told.get("predicted_n"))
    return read(chunk, heard)


_counters = counters_of(
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
    name="llama-server", title="llama-server", recognise=_is_llama_server,
    body=_to_llama_server, read=_from_llama_server, fields=_LLAMA_FIELDS,
    constraints={"json_schema": "", "grammar": "grammar"}, continues={}, counters=_counters,
    figures_hint="start it with --metrics", thinks=True,
)  # fmt: skip
SPECLLAMA = replace(
    LLAMA_SERVER, name="specllama", title="specllama", recognise=_is_ours,
    constraints={"json_schema": "", "grammar": "grammar", "regex": "structured_outputs.regex"},
    switches=True, figures_hint="",
)  # fmt: skip


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
    options |= _seed_and_stop(params)
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
    name="ollama", title="Ollama", recognise=_is_ollama, body=_to_ollama, read=_from_ollama,
    chat="/api/chat", raw="/api/generate", fields=_OLLAMA_FIELDS, continues={}, switches=True,
    thinks=True,
)  # fmt: skip


def _is_mlx(look: Look) -> Found | None:
    """Detect it by Python's own web server; its version comes with the first reply."""
    plain = look.server("/health").startswith("BaseHTTP")
    if not plain or look.object("/health").get("status") != "ok":
        return None
    return Found(models=models(look) or (Served("default_model"),))


def _version_of_mlx(fingerprint: str) -> str:
    found = _VERSION.match(fingerprint)
    return "" if found is None else found[1]


def _is_transformers(look: Look) -> Found | None:
    """Detect it; it does not list a model of its command line, and a request need not name it."""
    health = look.object("/health").get("status") == "ok" and look.echoes("/health")
    return Found() if health else None


def _to_transformers(kind: Kind, asked: Question) -> Json:
    out = body(kind, asked)
    config = {name: out.pop(name) for name in _IN_CONFIG if name in out}
    for name in _REFUSED:
        out.pop(name, None)
    if "temperature" in out:
        config["do_sample"] = out["temperature"] > 0
        if not out["temperature"]:
            del out["temperature"]  # it takes none of 0
    if asked.speculate:
        config["prompt_lookup_num_tokens"] = LOOKUP
    return {**out, "generation_config": json.dumps(config)} if config else out


def _is_trtllm(look: Look) -> Found | None:
    version = text(look.object("/version").get("version"))
    owned = models(look, "tensorrt_llm")
    if not owned and (not version or look.text("/prometheus/metrics") is None):
        return None
    return Found(version, models=owned or models(look))


def _is_tgi(look: Look) -> Found | None:
    info = look.object("/info")
    model, version = text(info.get("model_id")), text(info.get("version"))
    if not model or not version:
        return None
    return Found(version, models=(Served(model, whole(info.get("max_total_tokens")) or 0),))


def _is_lmstudio(look: Look) -> Found | None:
    listed = [of(one) for one in each(look.object("/api/v0/models").get("data"))]
    served = tuple(
        Served(
            text(one.get("id")),
            whole(one.get("loaded_context_length")) or whole(one.get("max_context_length")) or 0,
            one.get("state") == "loaded",
        )
        for one in listed
        if text(one.get("id")) and one.get("type") in ("llm", "vlm")
    )
    return Found(models=served) if listed and "state" in listed[0] else None


def _from_lmstudio(chunk: Json, heard: Heard) -> tuple[str, str]:
    counts = (f"{name}_draft_tokens_count" for name in ("total", "accepted"))
    drafted(heard, of(chunk.get("stats")), *counts)
    return read(chunk, heard)


LMSTUDIO = alike(
    name="lmstudio", title="LM Studio", recognise=_is_lmstudio, read=_from_lmstudio,
    chat="/api/v0/chat/completions", raw="/api/v0/completions",
    fields={**FIELDS, **same("top_k", "min_p", "repeat_penalty")}, continues={},
)  # fmt: skip
MLX_LM = alike(
    name="mlx-lm",
    title="mlx-lm",
    recognise=_is_mlx,
    fields={
        **FIELDS,
        **same("top_k", "min_p", "xtc_probability", "xtc_threshold"),
        "repeat_penalty": "repetition_penalty",
    },
    constraints={},
    longest=_LONGEST,  # else it ends at 512
    switches=True,
    off={"num_draft_tokens": 0},
    thinks=True,
    version_of=_version_of_mlx,
)
TRANSFORMERS = alike(
    name="transformers",
    title="transformers",
    recognise=_is_transformers,
    body=_to_transformers,
    fields={
        **same("temperature", "top_p", "frequency_penalty", "logit_bias", "top_k", "min_p"),
        **same("typical_p", repeat_penalty="repetition_penalty"),
    },
    constraints={},
    longest=_LONGEST,
    switches=True,
    pieces=True,
)
TRTLLM = alike(
    name="trtllm", title="TensorRT-LLM", recognise=_is_trtllm, fields=MORE_FIELDS, thinks=True
)
TGI = alike(name="tgi", title="TGI", recognise=_is_tgi, raw="", fields=FIELDS, constraints={})
OPENAI = alike(
    name="openai",
    title="the server",
    recognise=lambda look: Found(models=models(look)),
    fields=FIELDS,
)

"""OpenAI's dialect, which most engines share; the engines that differ from it in little.

LM Studio's ``/api/v0`` reports drafting; a draft model is named in the request. mlx-lm takes a
draft model and its length in a request; it reports no drafting. ``transformers serve`` takes
sampling as a text of JSON, and prompt lookup in the request. TensorRT-LLM reports nothing of one
reply, and reading its ``/metrics`` empties it. Text Generation Inference is archived: it is
recognised, and good for a chat.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
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
    of,
    text,
    whole,
)
from specllama.remote.kinds.kind import Found, Heard, Kind, Question, Served, same
from specllama.settings.params import EFFORTS, template_arguments

FIELDS = same("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias")
MORE_FIELDS = {
    **FIELDS,
    **same("top_k", "min_p", "ignore_eos", repeat_penalty="repetition_penalty"),
}
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
    if params.seed is not None:
        out["seed"] = params.seed % SEEDS
    if params.stop:
        out["stop"] = list(params.stop)
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


def _is_mlx(look: Look) -> Found | None:
    """Detect it by Python's own web server; its version comes with the first reply."""
    if not look.server("/health").startswith("BaseHTTP"):
        return None
    if look.object("/health").get("status") != "ok":
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


alike = partial(Kind, body=body, read=read)
"""A row for an engine of this dialect."""
LMSTUDIO = alike(
    name="lmstudio",
    title="LM Studio",
    recognise=_is_lmstudio,
    read=_from_lmstudio,
    chat="/api/v0/chat/completions",
    raw="/api/v0/completions",
    fields={**FIELDS, **same("top_k", "min_p", "repeat_penalty")},
    continues={},
)
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

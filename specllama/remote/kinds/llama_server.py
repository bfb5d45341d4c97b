"""llama-server of llama.cpp, and our own server as other clients ask it.

Both report acceptance per reply in ``timings``. llama-server runs alone or as a router; with our
own, ``remote_engine`` speaks our own language.
"""

from __future__ import annotations

import json
from dataclasses import replace

from specllama.remote.address import Look
from specllama.remote.answers import Json, each, of, text, whole
from specllama.remote.kinds import openai
from specllama.remote.kinds.kind import Found, Heard, Kind, Question, Served, same

_FIELDS = {
    **openai.MORE_FIELDS,
    **same("repeat_penalty", "typical_p", "repeat_last_n", "dry_multiplier", "dry_base"),
    **same("dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    **same("xtc_probability", "xtc_threshold"),
}


def _recognise(look: Look) -> Found | None:
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


def _body(kind: Kind, asked: Question) -> Json:
    out = openai.body(kind, asked)
    if asked.messages is None and asked.params.json_schema is not None:
        del out["response_format"]
        out["json_schema"] = json.loads(asked.params.json_schema)
    if kind is SPECLLAMA and asked.speculate is not None:
        out["specllama"] = {"proposer": asked.params.proposer if asked.speculate else "none"}
    return out


def _read(chunk: Json, heard: Heard) -> tuple[str, str]:
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
    recognise=_recognise,
    body=_body,
    read=_read,
    fields=_FIELDS,
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

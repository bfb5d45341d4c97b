"""llama-server of llama.cpp, alone or as a router: acceptance per reply in ``timings``."""

from __future__ import annotations

import json

from specllama.remote.figures import Drafted, Json, each, of, text, whole
from specllama.remote.kinds import openai
from specllama.remote.kinds.kind import Found, Heard, Kind, Question, Served
from specllama.remote.wire import Look

FIELDS = {
    **openai.MORE_FIELDS,
    **{
        name: name
        for name in (
            "repeat_penalty",
            "typical_p",
            "repeat_last_n",
            "dry_multiplier",
            "dry_base",
            "dry_allowed_length",
            "dry_penalty_last_n",
            "dry_sequence_breakers",
            "xtc_probability",
            "xtc_threshold",
        )
    },
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


def body(kind: Kind, asked: Question) -> Json:
    out = openai.body(kind, asked)
    params = asked.params
    if params.grammar is not None:
        out["grammar"] = params.grammar
    if asked.messages is None and params.json_schema is not None:
        del out["response_format"]
        out["json_schema"] = json.loads(params.json_schema)
    return out


def read(chunk: Json, heard: Heard) -> tuple[str, str]:
    told = of(chunk.get("timings"))
    n, kept = whole(told.get("draft_n")), whole(told.get("draft_n_accepted"))
    if n is not None and kept is not None:
        heard.draft = Drafted(n, kept)
    if told:
        heard.cached_n = whole(told.get("cache_n"))
        heard.tokens = whole(told.get("predicted_n"))
    return openai.read(chunk, heard)


counters = openai.counters_of(
    "llamacpp", "tokens_predicted_total", "requests_processing", "requests_deferred"
)

KIND = Kind(
    name="llama-server",
    title="llama-server",
    recognise=_recognise,
    body=body,
    read=read,
    fields=FIELDS,
    constraints=frozenset({"json_schema", "grammar"}),
    continues={},
    counters=counters,
    figures_hint="start it with --metrics",
    thinks=True,
)

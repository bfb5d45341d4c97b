"""LM Studio: its ``/api/v0`` reports drafting; a draft model is named in the request."""

from __future__ import annotations

from specllama.remote.figures import Drafted, Json, each, of, text, whole
from specllama.remote.kinds import openai
from specllama.remote.kinds.kind import Found, Heard, Kind, Question, Served
from specllama.remote.wire import Look


def _recognise(look: Look) -> Found | None:
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
    if listed and "state" in listed[0]:
        return Found(models=served)
    # v1 alone: its own chat takes no replies of a conversation, but OpenAI's does
    newer = [of(one) for one in each(look.object("/api/v1/models").get("models"))]
    if not newer or "loaded_instances" not in newer[0]:
        return None
    served = tuple(
        Served(text(one.get("key")), whole(one.get("max_context_length")) or 0,
               bool(one.get("loaded_instances")))
        for one in newer if text(one.get("key")) and one.get("type") == "llm"
    )  # fmt: skip
    return Found(models=served, paths=("/v1/chat/completions", "/v1/completions"))


def _body(kind: Kind, asked: Question) -> Json:
    out = openai.body(kind, asked)
    if asked.draft_model and asked.speculate is not False:
        out["draft_model"] = asked.draft_model
    return out


def _read(chunk: Json, heard: Heard) -> tuple[str, str]:
    told = of(chunk.get("stats"))
    n, kept = (whole(told.get(f"{name}_draft_tokens_count")) for name in ("total", "accepted"))
    if n is not None and kept is not None:
        heard.draft = Drafted(n, kept)
    return openai.read(chunk, heard)


KIND = Kind(
    name="lmstudio",
    title="LM Studio",
    recognise=_recognise,
    body=_body,
    read=_read,
    chat="/api/v0/chat/completions",
    raw="/api/v0/completions",
    fields={
        **openai.FIELDS,
        "top_k": "top_k",
        "min_p": "min_p",
        "repeat_penalty": "repeat_penalty",
    },
    continues={},
    switches=True,
)

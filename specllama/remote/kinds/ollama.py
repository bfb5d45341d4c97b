"""Ollama: lines of JSON; it drafts by the model's file and does not report it."""

from __future__ import annotations

import json

from specllama.remote.address import Look
from specllama.remote.answers import Json, each, likely_of, of, text, whole
from specllama.remote.kinds import openai
from specllama.remote.kinds.kind import Found, Heard, Kind, Question, Served, same
from specllama.settings.params import EFFORTS

_FIELDS = {
    **same("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty"),
    **same("repeat_last_n", "presence_penalty", "frequency_penalty"),
}


def _recognise(look: Look) -> Found | None:
    version = text(look.object("/api/version").get("version"))
    if not version:
        return None
    listed = [of(one) for one in each(look.object("/api/tags").get("models"))]
    names = [text(one.get("name")) or text(one.get("model")) for one in listed]
    return Found(version, models=tuple(Served(name) for name in names if name))


def _body(kind: Kind, asked: Question) -> Json:
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


def _read(chunk: Json, heard: Heard) -> tuple[str, str]:
    message = of(chunk.get("message")) or chunk
    for call in each(message.get("tool_calls")):
        function = of(of(call).get("function"))
        arguments = json.dumps(of(function.get("arguments")))
        heard.calls[len(heard.calls)] = [text(function.get("name")), arguments]
    said = text(message.get("content")) or text(message.get("response"))
    heard.logprobs += likely_of({"content": chunk.get("logprobs")})
    if chunk.get("done") is True:
        heard.finish = text(chunk.get("done_reason")) or "stop"
        heard.tokens = whole(chunk.get("eval_count"))
        heard.prompt_n = whole(chunk.get("prompt_eval_count"))
        said += openai.calls_of(heard)
    return text(message.get("thinking")), said


KIND = Kind(
    name="ollama",
    title="Ollama",
    recognise=_recognise,
    body=_body,
    read=_read,
    chat="/api/chat",
    raw="/api/generate",
    fields=_FIELDS,
    continues={},
    switches=True,
    thinks=True,
)

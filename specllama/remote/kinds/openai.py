"""OpenAI's dialect, which most engines share, and any server that speaks only that."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from specllama.remote.figures import Counters, Json, MetricsPage, each, likely_of, of, text, whole
from specllama.remote.kinds.kind import Found, Heard, Kind, Question, Served
from specllama.remote.wire import Look
from specllama.settings.params import EFFORTS, template_arguments

FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
}
MORE_FIELDS = {
    **FIELDS,
    "top_k": "top_k",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "ignore_eos": "ignore_eos",
}
CONTINUES: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
SEEDS = 2**31  # engines take no larger ones alike


def body(kind: Kind, asked: Question) -> Json:
    """Build a request; an engine's own file adds its own fields."""
    params = asked.params
    out: Json = {"stream": asked.stream, **kind.settings(params)}
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
    if params.max_tokens is not None:
        out["max_tokens"] = params.max_tokens
    if params.seed is not None:
        out["seed"] = params.seed % SEEDS
    if params.stop:
        out["stop"] = list(params.stop)
    if params.ignore_eos and "ignore_eos" in kind.fields:
        out["ignore_eos"] = True
    if params.json_schema is not None:
        schema = {"name": "reply", "schema": json.loads(params.json_schema), "strict": True}
        out["response_format"] = {"type": "json_schema", "json_schema": schema}
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
        for call in each(new.get("tool_calls")):
            _call(of(call), heard)
        heard.logprobs += likely_of(choice.get("logprobs"))
        if finish := text(choice.get("finish_reason")):
            heard.finish = finish
            heard.stop = text(choice.get("stop_reason")) or heard.stop
            said += calls_of(heard)
    return thought, said


def spoken(content: object) -> str:
    """Return a text, or the texts of its parts."""
    return text(content) or "".join(text(of(part).get("text")) for part in each(content))


def _call(call: Json, heard: Heard) -> None:
    function = of(call.get("function"))
    at = whole(call.get("index"))
    held = heard.calls.setdefault(len(heard.calls) if at is None else at, ["", ""])
    held[0] += text(function.get("name"))
    arguments = function.get("arguments")
    held[1] += text(arguments) or (json.dumps(arguments) if isinstance(arguments, dict) else "")


def calls_of(heard: Heard) -> str:
    """Spell tool calls as Hermes and Qwen do, the commonest spelling of local models."""
    calls, heard.calls = heard.calls, {}
    return "".join(
        f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments or "{}"}}}\n'
        "</tool_call>\n"
        for name, arguments in calls.values()
    )


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


def _recognise(look: Look) -> Found | None:
    return Found(models=models(look))


KIND = Kind(
    name="openai",
    title="the server",
    recognise=_recognise,
    body=body,
    read=read,
    fields=FIELDS,
)

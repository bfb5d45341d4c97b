"""Fields that all families share: those that name a model, and those that are refused by name.

A field of a request is one of three kinds. It is *honoured*: it stands in the request's struct, or
in ``NAMING``. It is *refused*: it stands in ``REFUSED``, and a value that requests anything is
answered 501. Or it is *harmless*: no value of it changes the text, and it is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from specllama.errors import UsageError
from specllama.server.refusals import not_offered, wrong
from specllama.settings import duration


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is not offered, and why; ``idle``: values that request nothing, as null does."""

    reason: str
    idle: Callable[[Any], bool] = lambda value: not value


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _below_or_at(most: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (int, float)) and value <= most


_PROMPT = "the chat template is the model's own"
_SAMPLER = "there is no such sampler here"
_CONSTRAINT = "reply formats are response_format, json_schema, guided_regex and grammar"
_ENDS = "replies end at end tokens and at stop strings"
_OLD = "use tools and tool_choice"

REFUSED: Mapping[str, Refused] = {
    # llama-server
    "mirostat": Refused(_SAMPLER),
    "dynatemp_range": Refused(_SAMPLER, _below_or_at(0)),
    "top_n_sigma": Refused(_SAMPLER, _below_or_at(0)),
    "adaptive_target": Refused(_SAMPLER, _is(-1)),
    "tfs_z": Refused(_SAMPLER, _is(1)),
    "min_keep": Refused(_SAMPLER, _below_or_at(1)),
    "lora": Refused("adapters are chosen when the server is started: --lora"),
    "image_data": Refused("models here read text only"),
    "grammar_lazy": Refused(_CONSTRAINT),
    "parse_tool_calls": Refused("calls are read wherever tools are given", _is(True)),
    # vLLM
    "min_tokens": Refused(_ENDS, _below_or_at(0)),
    "stop_token_ids": Refused(_ENDS),
    "include_stop_str_in_output": Refused(_ENDS),
    "allowed_token_ids": Refused(_CONSTRAINT),
    "bad_words": Refused("logit_bias takes words"),
    "structural_tag": Refused(_CONSTRAINT),
    "guided_whitespace_pattern": Refused(_CONSTRAINT),
    "prompt_logprobs": Refused("prompts are read without their rows", _is(False)),
    "truncate_prompt_tokens": Refused("a prompt that is too long is refused, never cut"),
    "use_beam_search": Refused("replies are drawn, not searched for"),
    "length_penalty": Refused("replies are drawn, not searched for", _is(1)),
    "skip_special_tokens": Refused("control tokens are never text", _is(True)),
    "return_tokens_as_token_ids": Refused("tokens are told as text"),
    "chat_template": Refused(_PROMPT),
    "documents": Refused(_PROMPT),
    "logits_processors": Refused(_SAMPLER),
    "vllm_xargs": Refused(_SAMPLER),
    # OpenAI
    "functions": Refused(_OLD),
    "function_call": Refused(_OLD, _is("auto", "none")),
    "audio": Refused("models here write text"),
    "modalities": Refused("models here write text", lambda value: value in ([], ["text"])),
    "web_search_options": Refused("the model has no access to anything"),
    "conversation": Refused("nothing is kept; send the conversation"),
    # Anthropic
    "mcp_servers": Refused("tools are run by the client"),
    "container": Refused("tools are run by the client"),
    # Ollama
    "template": Refused(_PROMPT),
    "context": Refused("send the conversation: what was read is remembered anyway"),
}
"""By name; the same name means the same for every family that has it."""

_Fields = dict[str, msgspec.Raw]


def refuse_known(body: bytes, kind: type) -> Mapping[str, msgspec.Raw]:
    """Return the fields of a body.

    Args:
        kind: the struct that a request of this route is; its fields are honoured.

    Raises:
        Refusal: a field that is known, and not offered here, asks for something.
    """
    fields = msgspec.json.decode(body, type=_Fields)
    _refuse(fields, kind)
    if "options" in fields and "options" in getattr(kind, "__struct_fields__", ()):  # of Ollama
        _refuse(msgspec.json.decode(fields["options"], type=_Fields | None) or {}, kind)
    return fields


def _refuse(fields: _Fields, kind: type) -> None:
    honoured = getattr(kind, "__struct_fields__", ())
    for name in fields:
        if name in REFUSED and name not in honoured:
            value = msgspec.json.decode(fields[name])
            if value is not None and not REFUSED[name].idle(value):
                raise not_offered(name, REFUSED[name].reason, name)


NAMING = frozenset({"model", "keep_alive", "ttl", "draft_model", "stream"})
_OFF = ("none", "")  # no draft model


@dataclass(frozen=True, slots=True)
class Naming:
    """The wishes of a request about its model.

    Attributes:
        model: None if it names none.
        keep_s: seconds that the model may stay loaded unused after this request, which is Ollama's
            ``keep_alive`` and LM Studio's ``ttl``; None if it sets none.
        undrafted: it wants no draft model.
        stream: it wants the text as it comes.
    """

    model: str | None = None
    keep_s: float | None = None
    undrafted: bool = False
    stream: bool = False


def naming_of(fields: Mapping[str, msgspec.Raw]) -> Naming:
    """Read these fields; raise Refusal if a value is wrong."""
    given = {name: msgspec.json.decode(fields[name]) for name in NAMING & fields.keys()}
    model = given.get("model")
    if model is not None and not isinstance(model, str):
        raise wrong("model", "model: a name is wanted")
    keep_s = _seconds("keep_alive", given.get("keep_alive"))
    if keep_s is None:
        keep_s = _seconds("ttl", given.get("ttl"))
    draft = given.get("draft_model")
    undrafted = isinstance(draft, str) and draft.lower() in _OFF
    return Naming(model, keep_s, undrafted, given.get("stream") is True)


def _seconds(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise wrong(name, f'{name}: a duration is wanted, such as "5m" or 300')
    try:
        return duration.seconds(value)
    except UsageError as error:
        raise wrong(name, f"{name}: {error.message}") from None

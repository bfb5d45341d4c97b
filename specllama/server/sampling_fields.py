"""Fields that several API families share: samplers under the names of OpenAI and of llama.cpp."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import msgspec

from specllama.errors import UsageError
from specllama.server.refusals import not_offered, refusal, wrong
from specllama.settings.params import CHANCES_LIMIT, SEED_DRAWN, GenerateParams, SamplingParams

Names = Mapping[str, str] | None  # of fields, by the names of settings
Bias = dict[str, float | bool] | list[tuple[int | str, float | bool]]

SAMPLERS = {
    one.name: type(one.default)
    for one in fields(SamplingParams)
    if type(one.default) in (int, float)
}
"""The samplers that are numbers, with their types: requests have a field for each."""

MOST_WORDS = 1024  # of a logit_bias
MOST_DIGITS = 18


# what switches each sampler off, in the order in which they act
ORDER: dict[str, dict[str, Any]] = {
    "penalties": {"repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "infill": {"infill": False},
    "temperature": {"temperature": 1.0},
}
_OTHER_NAMES = {"typical_p": "typ_p", "temp": "temperature", "top-k": "top_k", "top-p": "top_p",
                "min-p": "min_p", "typical": "typ_p", "typ-p": "typ_p"}  # fmt: skip
_ALWAYS_OFF = ("top_n_sigma", "tfs_z", "adaptive_p")
_LEAST = 2.0**-52  # a share of all probability that the likeliest token alone has


class Speculation(msgspec.Struct, kw_only=True):
    """The field ``specllama`` of every family: how this request is drafted, and whether a reply
    that fills a gap ends before it repeats the text after the gap."""

    proposer: str | None = None
    draft_max: int | None = None
    draft_p_min: float | None = None
    verify: str | None = None
    window: str | None = None
    at_suffix: bool | None = None


class TextPart(msgspec.Struct):
    type: str
    text: str | None = None


class Prediction(msgspec.Struct):
    """OpenAI's predicted output: what the reply is expected to be."""

    type: str
    content: str | list[TextPart]


class Structured(msgspec.Struct, kw_only=True):
    """vLLM's field for the form that a reply has to fit."""

    json: Any = None
    json_object: bool | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    regex: str | None = None
    structural_tag: Any = None


class Thinking(msgspec.Struct):
    """Anthropic's wish about the thought, which others have taken over."""

    type: str | None = None
    budget_tokens: int | None = None


class Reasoning(msgspec.Struct):
    """OpenAI's wish about the thought, with the further fields of OpenRouter."""

    effort: str | None = None
    enabled: bool | None = None
    max_tokens: int | None = None


class Thought(msgspec.Struct, kw_only=True):
    """Wishes about the thought, under every known name."""

    reasoning_effort: str | None = None
    reasoning: Reasoning | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None  # of Qwen
    thinking_budget: int | None = None
    thinking_budget_tokens: int | None = None  # of llama-server, like the following
    reasoning_budget_tokens: int | None = None
    reasoning_budget: int | None = None
    thinking_token_budget: int | None = None  # of vLLM


if TYPE_CHECKING:
    _Samplers = Thought
else:
    _Samplers = msgspec.defstruct(
        "_Samplers",
        [(name, kind | None, None) for name, kind in SAMPLERS.items()],
        bases=(Thought,),
        kw_only=True,
    )


class Sampling(_Samplers, kw_only=True):
    dry_sequence_breakers: list[str] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: Bias | None = None
    ignore_eos: bool | None = None
    grammar: str | None = None
    json_schema: Any = None
    samplers: list[str] | str | None = None  # of llama-server
    repetition_penalty: float | None = None  # of vLLM, like the following
    structured_outputs: Structured | None = None
    guided_json: Any = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_regex: str | None = None
    prediction: Prediction | None = None
    id_slot: int | None = None  # of llama-server, like the following
    cache_prompt: bool | None = None
    n_indent: int | None = None
    t_max_predict_ms: float | None = None
    specllama: Speculation | None = None


class Asked(Sampling, kw_only=True):
    """The fields of every request for a text, but Ollama's."""

    model: str | None = None
    stream: bool | None = None


class Format(msgspec.Struct, omit_defaults=True):
    """The format of a reply, in the words of Anthropic and of OpenAI's responses."""

    type: str
    schema: dict[str, Any] | None = None
    name: str | None = None
    strict: bool | None = None


FIELDS = {
    **{name.replace("_", "-"): name for name in (*SAMPLERS, "dry_sequence_breakers")},
    **{name: name for name in ("seed", "stop", "temperature")},
    "logit-bias": "logit_bias",
    "max-tokens": "max_tokens",
    **{name.replace("_", "-"): f"specllama.{name}" for name in Speculation.__struct_fields__},
    "verification": "specllama.verify",
    "think": "reasoning_effort",
    "chances": "top_logprobs",
}
"""As settings are called in errors, and the fields of requests that give them."""


_LIMITS = ("max_completion_tokens", "max_output_tokens", "n_predict", "num_predict")


def params_of(
    body: Sampling, base: GenerateParams, names: Names = None, *, raw: bool = False, **more: Any
) -> GenerateParams:
    """Return the parameters of a request: the server's own, changed by the request's fields.

    A seed is always chosen, so that the reply can be repeated.

    Args:
        names: of its fields by those of settings, where ``FIELDS`` has others.
        raw: the prompt is no conversation.
        more: further fields of GenerateParams; None leaves them. ``max_tokens`` of -1: no limit.

    Raises:
        Refusal: a value is wrong; names the field.
    """
    changes = _given(more)
    if changes.get("max_tokens") == -1:
        changes["max_tokens"] = None
    think, budgeted, budget = _thought(body)
    if raw and (budget is not None or think not in (None, "off")):
        name = budgeted or "reasoning_effort"
        raise not_offered(name, "thoughts are told from answers in chats, not in raw texts", name)
    changes |= _given({"think": think, "think_budget": budget})
    try:
        given = {n: v for n in SAMPLERS if (v := getattr(body, n)) is not None}
        if body.dry_sequence_breakers is not None:
            given["dry_sequence_breakers"] = tuple(body.dry_sequence_breakers)
        if body.logit_bias is not None:
            given["logit_bias"] = {
                int(t): float("-inf") if value is False else float(value)
                for t, value in _pairs(body.logit_bias)
            }
        if body.repetition_penalty is not None:  # vLLM's looks at the whole text
            given = {"repeat_penalty": body.repetition_penalty, "repeat_last_n": -1, **given}
        if given.get("top_k", 0) < 0:  # so llama-server and vLLM write "all"
            given["top_k"] = 0
        if given.get("top_p") == 0:
            given["top_p"] = _LEAST
        sampling = chosen(replace(base.sampling, **given), body.samplers)
        seed = base.seed if body.seed is None else body.seed
        if seed is None or seed == -1:  # as llama-server and Ollama write "any"
            seed = secrets.randbelow(SEED_DRAWN)
        changes.update(sampling=sampling, seed=seed, slot=body.id_slot)
        changes.update(fresh=body.cache_prompt is False, indent=body.n_indent or 0)
        if body.stop is not None:
            stop = [body.stop] if isinstance(body.stop, str) else body.stop
            changes["stop"] = tuple(filter(None, stop))
        changes["most_ms"] = max(body.t_max_predict_ms or 0, 0)
        schema = None if body.json_schema is None else schema_text(body.json_schema)
        told = {
            "ignore_eos": body.ignore_eos,
            "grammar": (body.grammar or "").removeprefix("\ufeff") or None,
        }
        changes |= _given(told | {"json_schema": schema}) | _structured(body)
        if body.prediction is not None:
            changes["prediction"] = _expected(body.prediction)
        if body.specllama is not None:
            changes |= _given(msgspec.structs.asdict(body.specllama))
        return base.replace(**changes)
    except UsageError as error:
        limit = next((n for n in _LIMITS if getattr(body, n, None) is not None), "max_tokens")
        found = {"max-tokens": limit, "think-budget": budgeted, **(names or {})}
        raise refusal(error, {**FIELDS, **found}) from None


EFFORTS = {"none": "off", "minimal": "low", "xhigh": "high", "max": "high", "ultra": "high"}
BUDGETS = tuple(name for name in Thought.__struct_fields__ if "budget" in name)


def _thought(body: Thought) -> tuple[str | None, str, int | None]:
    """Return how a request wants thoughts, and the field that limits them, with its value."""
    thinking, reasoning = body.thinking or Thinking(), body.reasoning or Reasoning()
    effort, on = reasoning.effort or body.reasoning_effort, body.enable_thinking
    if on is None:
        on = reasoning.enabled if thinking.type is None else thinking.type != "disabled"
    think = EFFORTS.get(effort, effort) if effort else None
    if on is not None:
        think = (think or "on") if on else "off"
    limits = {
        "thinking.budget_tokens": thinking.budget_tokens,
        "reasoning.max_tokens": reasoning.max_tokens,
        **{name: n for name in BUDGETS if (n := getattr(body, name)) != -1},  # no limit
    }
    return think, *next(((n, v) for n, v in limits.items() if v is not None), ("", None))


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _expected(prediction: Prediction) -> str:
    """Return the predicted text; raise Refusal if it is of another type."""
    if prediction.type != "content":
        raise wrong("prediction.type", "prediction: its type is content")
    if isinstance(prediction.content, str):
        return prediction.content
    if any(part.type != "text" or part.text is None for part in prediction.content):
        raise wrong("prediction.content", "prediction: its parts are texts")
    return "".join(part.text or "" for part in prediction.content)


def most_chances(name: str, value: int | None) -> int | None:
    """Check a number of alternatives; raise Refusal if the server returns fewer."""
    if value is not None and not 0 <= value <= CHANCES_LIMIT:
        raise wrong(name, f"{name} must be from 0 to {CHANCES_LIMIT}, got {value}")
    return value


def chosen(sampling: SamplingParams, names: list[str] | str | None) -> SamplingParams:
    """Turn off the samplers that are not named.

    Raises:
        Refusal: they have another order than ours, or one is not known.
    """
    if names is None:
        return sampling
    if isinstance(names, str):
        raise not_offered("samplers", "they are a list of names", "samplers")
    names = [_OTHER_NAMES.get(name, name) for name in names]
    for name in names:
        if name not in ORDER and name not in _ALWAYS_OFF:
            raise wrong("samplers", f"samplers: there is no {name[:80]!r}")
    off = [values for name, values in ORDER.items() if name not in names]
    left = replace(sampling, **{"infill": True, **{k: v for one in off for k, v in one.items()}})
    on = [
        name
        for name in dict.fromkeys(names)
        if any(getattr(left, k) != v for k, v in ORDER.get(name, {}).items())
    ]
    if on != [name for name in ORDER if name in on]:
        raise not_offered("samplers", f"their order is {', '.join(ORDER)}", "samplers")
    return left


def _structured(body: Sampling) -> dict[str, str]:
    """Convert vLLM's constraints to ours.

    Raises:
        Refusal: of a kind that is not offered. UsageError: it cannot be enforced.
    """
    asked = body.structured_outputs or Structured()
    if asked.structural_tag is not None:
        where = "structured_outputs.structural_tag"
        raise not_offered(where, "use a JSON schema, a choice, a pattern or a grammar", where)
    schema = asked.json if asked.json is not None else body.guided_json
    if schema is None and asked.json_object:
        schema = {"type": "object"}
    choice, grammar = asked.choice or body.guided_choice, asked.grammar or body.guided_grammar
    if choice:
        grammar = f"root ::= {' | '.join(map(_literal, choice))}"
    out: dict[str, str] = {}
    if schema is not None:
        out["json_schema"] = schema_text(schema)
    if grammar:
        out["grammar"] = grammar
    if regex := asked.regex or body.guided_regex:
        out["regex"] = regex
    return out


def _literal(text: str) -> str:
    """Quote a text for a grammar."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'.replace("\n", "\\n").replace("\r", "\\r")


def words_of(bias: Bias, n_vocab: int) -> list[str]:
    """Return the tokens that a bias names by words.

    Raises:
        Refusal: it has more entries than there are tokens, or too many words.
    """
    if len(bias) > n_vocab:
        raise wrong(
            "logit_bias", f"logit_bias has {len(bias)} entries, the vocabulary {n_vocab} tokens"
        )
    named = isinstance(bias, dict)  # its keys are texts, also those of ids
    words = [
        key for key, _ in _pairs(bias) if isinstance(key, str) and not (named and key.isdecimal())
    ]
    if len(words) > MOST_WORDS:
        raise wrong("logit_bias", f"logit_bias takes up to {MOST_WORDS} words")
    return words


def _pairs(bias: Bias) -> Iterable[tuple[int | str, float | bool]]:
    return bias.items() if isinstance(bias, dict) else bias


def numbered(bias: Bias, spelled: dict[str, list[int]]) -> Bias:
    """Convert a bias to token ids; a word's bias goes to each of its tokens.

    Raises:
        Refusal: an id has too many digits.
    """
    out: list[tuple[int | str, float | bool]] = []
    for token, value in _pairs(bias):
        if isinstance(token, str) and token in spelled:
            out += [(id, value) for id in spelled[token]]
        elif isinstance(token, str) and len(token) > MOST_DIGITS:
            raise wrong("logit_bias", "logit_bias: a token id has too many digits")
        else:
            out.append((int(token), value))
    return out


def schema_of(asked: Format | None, place: str) -> str | None:
    """Return the JSON schema that a reply has to fit.

    Args:
        place: of the format in the request.

    Raises:
        Refusal: it is of an unknown kind, or has no schema.
    """
    if asked is None or asked.type == "text":
        return None
    if asked.type not in ("json_object", "json_schema"):
        raise wrong(f"{place}.type", f"{place}: unknown type {asked.type[:80]!r}")
    if asked.schema is None and asked.type == "json_schema":
        raise wrong(f"{place}.schema", f"{place}: json_schema has no schema")
    return schema_text(asked.schema or {"type": "object"})


def schema_text(schema: Any) -> str:
    """Return a JSON schema as text, which the engine reads."""
    if isinstance(schema, str):
        return schema.removeprefix("\ufeff")
    return msgspec.json.encode(schema).decode()

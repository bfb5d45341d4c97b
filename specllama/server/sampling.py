"""Fields that several API families share: samplers under the names of OpenAI and of llama.cpp."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec

from specllama.errors import UsageError
from specllama.params import SEED_DRAWN, GenerateParams
from specllama.server.refusals import refusal, wrong

Bias = dict[str, float | bool] | list[tuple[int | str, float | bool]]

# our names of sampling fields that requests may have, as they are called there
SAMPLERS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repeat_penalty",
    "frequency_penalty",
    "presence_penalty",
    "repeat_last_n",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "xtc_probability",
    "xtc_threshold",
)


MOST_WORDS = 1024  # of a logit_bias
MOST_DIGITS = 18


class Speculation(msgspec.Struct, kw_only=True):
    """The field ``specllama`` of every family: how this request is drafted."""

    proposer: str | None = None
    draft_max: int | None = None
    draft_min: int | None = None
    draft_p_min: float | None = None
    verify: str | None = None
    window: str | None = None


class Sampling(msgspec.Struct, kw_only=True):
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repeat_last_n: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: Bias | None = None
    ignore_eos: bool | None = None
    grammar: str | None = None
    json_schema: Any = None
    specllama: Speculation | None = None


class Format(msgspec.Struct):
    """Of a reply, in the words of Anthropic and of OpenAI's responses."""

    type: str
    schema: dict[str, Any] | None = None


FIELDS = {
    **{name.replace("_", "-"): name for name in (*SAMPLERS, "dry_sequence_breakers")},
    **{name: name for name in ("seed", "stop", "temperature")},
    "logit-bias": "logit_bias",
    "max-tokens": "max_tokens",
    "proposer": "specllama.proposer",
    "verification": "specllama.verify",
    "window": "specllama.window",
    "draft-max": "specllama.draft_max",
    "draft-min": "specllama.draft_min",
    "draft-p-min": "specllama.draft_p_min",
    "think": "reasoning_effort",
    "chances": "top_logprobs",
}
"""As settings are called in errors, and the fields of requests that give them."""


def params_of(body: Sampling, base: GenerateParams, **more: Any) -> GenerateParams:
    """The parameters of a request: what the server was started with, and what it says itself.

    A seed is always chosen, so that the reply can be asked for again.

    Args:
        more: further fields of GenerateParams; None leaves them.

    Raises:
        Refusal: a value is wrong; names the field.
    """
    changes = {name: value for name, value in more.items() if value is not None}
    try:
        given = {n: v for n in SAMPLERS if (v := getattr(body, n)) is not None}
        if body.dry_sequence_breakers is not None:
            given["dry_sequence_breakers"] = tuple(body.dry_sequence_breakers)
        if body.logit_bias is not None:
            given["logit_bias"] = _bias(body.logit_bias)
        sampling = replace(base.sampling, **given)
        left = tuple(name for name in base.from_card if name not in given)
        seed = base.seed if body.seed is None else body.seed
        if seed is None or seed == -1:  # as llama-server and Ollama write "any"
            seed = secrets.randbelow(SEED_DRAWN)
        changes.update(sampling=sampling, from_card=left, seed=seed)
        if body.stop is not None:
            stop = [body.stop] if isinstance(body.stop, str) else body.stop
            changes["stop"] = tuple(filter(None, stop))
        if body.ignore_eos is not None:
            changes["ignore_eos"] = body.ignore_eos
        if body.grammar:
            changes["grammar"] = body.grammar
        if body.json_schema is not None:
            changes["json_schema"] = schema_text(body.json_schema)
        if body.specllama is not None:
            asked = msgspec.structs.asdict(body.specllama)
            changes.update({name: value for name, value in asked.items() if value is not None})
        return base.replace(**changes)
    except UsageError as error:
        raise refusal(error, FIELDS) from None


async def numbered(
    bias: Bias, tokens: Callable[[list[str]], Awaitable[list[list[int]]]], n_vocab: int
) -> Bias:
    """A bias by token ids; that of a word is that of each of its tokens.

    Raises:
        Refusal: it has more entries than there are tokens.
    """
    if len(bias) > n_vocab:
        raise wrong(
            "logit_bias", f"logit_bias has {len(bias)} entries, the vocabulary {n_vocab} tokens"
        )
    pairs = list(bias.items() if isinstance(bias, dict) else bias)
    named = isinstance(bias, dict)  # its keys are texts, also those of ids
    words = [t for t, _ in pairs if isinstance(t, str) and not (named and t.isdecimal())]
    if len(words) > MOST_WORDS:
        raise wrong("logit_bias", f"logit_bias takes up to {MOST_WORDS} words")
    spelled = dict(zip(words, await tokens(words), strict=True)) if words else {}
    out: list[tuple[int | str, float | bool]] = []
    for token, value in pairs:
        if isinstance(token, str) and token in spelled:
            out += [(id, value) for id in spelled[token]]
        elif isinstance(token, str) and len(token) > MOST_DIGITS:
            raise wrong("logit_bias", "logit_bias: a token id has too many digits")
        else:
            out.append((int(token), value))
    return out


def _bias(bias: Bias) -> dict[int, float]:
    return {
        int(token): float("-inf") if value is False else float(value)
        for token, value in (bias.items() if isinstance(bias, dict) else bias)
    }


def schema_text(schema: Any) -> str:
    """A JSON schema as text, checked before the engine sees it.

    Raises:
        UsageError: it asks for what cannot be enforced.
    """
    from specllama.grammar.convert import schema_to_gbnf

    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    schema_to_gbnf(text)
    return text

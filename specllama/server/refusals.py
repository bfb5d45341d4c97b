"""The answer to a request that cannot be served: one type, which every API family spells."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specllama.errors import (
    ContextFull,
    DoesNotFit,
    EngineDied,
    PromptTooLong,
    SpecllamaError,
    UsageError,
)
from specllama.text import size

_PROMPTS = {"/chat/": "messages", "/responses": "input"}  # fields of requests, else "prompt"
_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# agents compact on these words alone
_TOO_LONG = "prompt is too long: {n_prompt_tokens} tokens > {n_ctx} maximum"
# clients of OpenAI and of Anthropic would ask again after any 5xx
_NEVER = {"x-should-retry": "false"}
_AT = re.compile(r" - at `\$\.?([^`]*)`$")
_SURROGATE = re.compile("[\ud800-\udfff]")
_FIRST = re.compile(r"^(?:unknown )?([a-z_-]+)")


@dataclass(eq=False)
class Refusal(Exception):
    """An answer that is an error.

    Attributes:
        status: of HTTP.
        kind: what OpenAI calls the type of an error.
        code: for programs.
        param: the field of the request that is wrong.
        details: further fields, for programs.
    """

    status: int
    message: str
    kind: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)


def spelled(path: str, refused: Refusal) -> dict[str, Any]:
    """Spell an error in the words of the family that a path belongs to."""
    if path.startswith("/api/"):
        return {"error": refused.message}
    if path.startswith("/v1/messages"):
        return _as_anthropic(refused)
    prompt = next((field for part, field in _PROMPTS.items() if part in path), "prompt")
    return {
        "error": {
            "message": refused.message,
            "type": refused.kind,
            "code": refused.code,
            "param": prompt if refused.param == "prompt" else refused.param,
            **refused.details,
        }
    }


def _as_anthropic(refused: Refusal) -> dict[str, Any]:
    too_long = refused.code == "context_length_exceeded"
    message = _TOO_LONG.format(**refused.details) if too_long else refused.message
    error: dict[str, Any] = {
        "type": _ANTHROPIC.get(refused.status, "api_error"),
        "message": message,
    }
    if refused.code is not None:
        error["details"] = {"error_code": refused.code}
    return {"type": "error", "error": error}


def busy(message: str, code: str) -> Refusal:
    """Refuse a request of a client that asks for too much at once."""
    return _later(429, message, "rate_limit_error", code, "2")


def _later(status: int, message: str, kind: str, code: str, seconds: str = "1") -> Refusal:
    return Refusal(status, message, kind, code, headers={"Retry-After": seconds})


def wrong(param: str, message: str) -> Refusal:
    """Refuse a field whose value is wrong."""
    return Refusal(400, message, param=param)


def not_offered(what: str, reason: str, param: str | None = None) -> Refusal:
    return Refusal(501, f"{what}: {reason}", "not_supported_error", "not_supported", param, _NEVER)


def text_only(where: str, what: str) -> Refusal:
    """Refuse a picture or the like."""
    return not_offered(f"{where}: {what}", "models here read text only; leave it out", where)


def malformed(message: str) -> Refusal:
    """Convert msgspec's error about a body, which names the place at its end."""
    found = _AT.search(message)
    if found is None:
        return Refusal(400, message)
    place = found[1] or "the body"
    return Refusal(400, f"{place}: {message[: found.start()]}", param=found[1] or None)


def unreadable(body: bytes) -> Refusal | None:
    """Refuse a body that holds something that is no character; None if all of it is text.

    A body in another encoding decodes to the same surrogates that an escape may leave alone.
    """
    if b"\0" in body:
        return Refusal(400, "the body is not UTF-8 but UTF-16 or UTF-32, or has a zero byte")
    text = body.decode("utf-8", "surrogateescape")
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        value = text  # the place is that in the body then
    for place, odd in _odd("", value):
        code = ord(odd[0])
        said = f"`\\u{code:04x}` is half of a character of UTF-16, whose other half is missing"
        if not body.isascii() and 0xDC80 <= code < 0xDD00:
            said = f"byte 0x{code & 0xFF:02X} is not UTF-8"
        where = f"{place or 'the body'}: {said}, at character {odd.start()}"
        return Refusal(400, where, param=place or None)
    return None


def _odd(place: str, value: Any) -> Iterator[tuple[str, re.Match[str]]]:
    """Yield the surrogates that texts in a value hold, with the place of the text."""
    if isinstance(value, str) and (odd := _SURROGATE.search(value)):
        yield place, odd
    listed = enumerate(value) if isinstance(value, list) else ()
    for key, one in value.items() if isinstance(value, dict) else listed:
        yield from _odd(place, key)
        yield from _odd(f"{place}[{key}]" if listed else f"{place}.{key}".lstrip("."), one)


def refusal(error: BaseException, fields: Mapping[str, str] | None = None) -> Refusal:
    """Convert an error of ours to an answer.

    Args:
        fields: the client's names of fields, by the names of settings that begin messages of
            UsageError.
    """
    if isinstance(error, Refusal):
        return error
    if not isinstance(error, SpecllamaError):
        return Refusal(500, "the server failed", "server_error", "internal_error")
    said = error.message if error.hint is None else f"{error.message}; {error.hint}"
    if isinstance(error, PromptTooLong):
        return Refusal(
            400,
            error.message,
            "exceed_context_size_error",  # llama-server's type, and OpenAI's code
            "context_length_exceeded",
            "prompt",
            details={"n_prompt_tokens": error.n_prompt, "n_ctx": error.n_ctx},
        )
    if isinstance(error, UsageError):
        first = _FIRST.match(error.message)
        name = first[1].rstrip("-") if first is not None else ""
        field = (fields or {}).get(name)
        return Refusal(400, error.message.replace(name, field or name, 1), param=field)
    if isinstance(error, DoesNotFit):
        return does_not_fit("", error, {})
    if isinstance(error, EngineDied):
        return ended_engine(error.message)
    if isinstance(error, ContextFull):
        return _later(503, said, "server_error", "context_full")
    return Refusal(500, said, "server_error", "engine_error")


def ended_engine(message: str) -> Refusal:
    """Refuse a request that ended the engine. Its client should not send it again by itself: it
    would end the next engine."""
    return Refusal(500, message, "server_error", "engine_died", headers=_NEVER)


def restarting() -> Refusal:
    return _later(503, "the engine is being started again", "unavailable_error", "restarting")


def shutting_down() -> Refusal:
    return Refusal(503, "the server is shutting down", "unavailable_error", "shutting_down")


def no_such_model(name: str, there: Sequence[str]) -> Refusal:
    said = f"model {name[:128]!r} not found; there are: {', '.join(there[:8])}"
    more = f" and {len(there) - 8} more" if len(there) > 8 else ""
    return Refusal(404, said + more, code="model_not_found", param="model")


def does_not_fit(name: str, error: DoesNotFit, held: Mapping[str, int]) -> Refusal:
    """Refuse a model that has no room.

    Args:
        name: "" where there is one model.
        held: bytes that other models have, by their names.
    """
    said = f"{name}: {error.message}" if name else error.message
    if held:
        told = ", ".join(f"{who} {size(n)}" for who, n in held.items())
        said = f"{said}; held by other models here: {told}"
    said = said if error.hint is None else f"{said}; {error.hint}"
    details = {"needed_bytes": error.needed, "free_bytes": error.free, "held_bytes": dict(held)}
    return Refusal(507, said, "insufficient_memory_error", "does_not_fit", "model", _NEVER, details)


def loading() -> Refusal:
    return _later(503, "Loading model", "unavailable_error", "loading")

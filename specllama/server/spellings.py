"""How families of models write calls of tools: one table, and one reader of it.

Each call is a name and a body; a body is JSON, or values between tags.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

_N = r"(?P<name>[\w./-]+(?::[A-Za-z_][\w./-]*)*)"


@dataclass(frozen=True, slots=True)
class Syntax:
    """Calls of some models.

    Attributes:
        opening: what a reply's first call begins with.
        call: finds ``name`` and ``body`` of each.
    """

    opening: str
    call: re.Pattern[str]


def _syntax(opening: str, call: str) -> Syntax:
    return Syntax(opening, re.compile(call, re.DOTALL))


SYNTAXES = {
    # Qwen 3.5, Qwen3-Coder, Nemotron 3
    "xml": _syntax("<tool_call>", r"<function=(?P<name>[^>\n]+)>(?P<body>.*?)(?:</function>|\Z)"),
    "glm": _syntax(
        "<tool_call>", rf"<tool_call>\s*{_N}\s*(?P<body>(?:<arg_key>.*?)?)(?:</tool_call>|\Z)"
    ),
    "minimax": _syntax(
        "<minimax:tool_call>", r'<invoke name="(?P<name>[^"]+)">(?P<body>.*?)(?:</invoke>|\Z)'
    ),
    "kimi": _syntax(
        "<|tool_calls_section_begin|>",
        rf"<\|tool_call_begin\|>\s*(?:functions\.)?{_N}(?::\d+)?\s*"
        r"<\|tool_call_argument_begin\|>(?P<body>.*?)(?:<\|tool_call_end\|>|\Z)",
    ),
    "deepseek": _syntax(
        "<｜tool▁calls▁begin｜>",
        rf"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?{_N}(?:<｜tool▁sep｜>|\s*```json)"
        r"(?P<body>.*?)(?:\s*```)?(?:<｜tool▁call▁end｜>|\Z)",
    ),
    "mistral": _syntax(
        "[TOOL_CALLS]",
        rf"\[TOOL_CALLS\]\s*{_N}(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?"
        r"(?P<body>\{.*?)(?=\[TOOL_CALLS\]|\Z)",
    ),
    "gemma": _syntax(
        "<|tool_call>", rf"<\|tool_call>call:{_N}(?P<body>\{{.*?\}})(?:<tool_call\|>|\Z)"
    ),
}

# those that write {"name": …, "arguments": …}, or a list of such
JSON_OPENINGS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<|tool_call|>")
OPENINGS = tuple(dict.fromkeys((*JSON_OPENINGS, *(s.opening for s in SYNTAXES.values()))))
CLOSING = "</tool_call>"

_TAGGED = re.compile(
    r"<parameter=(?P<a>[^>\n]+)>\n?(?P<av>.*?)\n?</parameter>"
    r'|<parameter name="(?P<b>[^"]+)">(?P<bv>.*?)</parameter>'
    r"|<arg_key>(?P<c>.*?)</arg_key>\s*<arg_value>(?P<cv>.*?)</arg_value>",
    re.DOTALL,
)
_GEMMA = re.compile(r'<\|"\|>(.*?)<\|"\|>|([{,]\s*)([A-Za-z_]\w*)(?=\s*:)', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Written:
    """A call as it was written: ``arguments`` are an object, or the texts of values by name."""

    name: str
    arguments: Any
    texts: bool = False


def calls_in(text: str) -> list[Written]:
    """The calls in the end of a reply that begins with one; [] if there are none."""
    for syntax in SYNTAXES.values():
        if syntax.opening in text and (found := list(_found(syntax, text))):
            return found
    return list(_json_calls(text))


def _found(syntax: Syntax, text: str) -> Iterator[Written]:
    for call in syntax.call.finditer(text):
        name, body = call["name"].strip(), call["body"].strip()
        if body.startswith("{"):
            if syntax is SYNTAXES["gemma"]:
                body = _GEMMA.sub(_as_json, body)
            value = _decoded(body)
            if value is not None:
                yield Written(name, value)
        else:
            parts = (next(p for p in _pairs(tag)) for tag in _TAGGED.finditer(body))
            yield Written(name, dict(parts), texts=True)


def _pairs(tag: re.Match[str]) -> Iterator[tuple[str, str]]:
    for key in "abc":
        if tag[key] is not None:
            yield tag[key].strip(), tag[f"{key}v"]


def _as_json(found: re.Match[str]) -> str:
    if found[1] is not None:
        return msgspec.json.encode(found[1]).decode()
    return f'{found[2]}"{found[3]}"'


def _json_calls(text: str) -> Iterator[Written]:
    for part in re.split("|".join(map(re.escape, JSON_OPENINGS)), text):
        said = _decoded(part.partition(CLOSING)[0].strip())
        for one in said if isinstance(said, list) else [said]:
            if isinstance(one, dict) and isinstance(one.get("name"), str):
                arguments = one.get("arguments", one.get("parameters", {}))
                if isinstance(arguments, str):
                    arguments = _decoded(arguments)
                yield Written(one["name"], arguments)


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None

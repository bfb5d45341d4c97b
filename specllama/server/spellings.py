"""How families of models write calls of tools: one table, and one reader of it.

Each call is a name and a body; a body is JSON, or values between tags. A body of JSON ends with its
last brace, one of tags with its closing mark: without that end there is no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

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
    "xml": _syntax("<tool_call>", r"<function=(?P<name>[^>\n]+)>(?P<body>.*?)</function>"),
    "glm": _syntax("<tool_call>", rf"<tool_call>\s*{_N}\s*(?P<body>(?:<arg_key>.*?)?)</tool_call>"),
    "minimax": _syntax(
        "<minimax:tool_call>", r'<invoke name="(?P<name>[^"]+)">(?P<body>.*?)</invoke>'
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

_KEYS = ("name", "arguments", "parameters", "type", "id")
_OBJECT = tuple(f'{{"{key}"' for key in _KEYS)  # how a call that is JSON begins, without spaces
_JSON = (*_OBJECT, *(f"[{head}" for head in _OBJECT))


@dataclass(frozen=True, slots=True)
class Opening:
    """What may follow the opening of a reply's first call, and what ends its calls.

    Attributes:
        heads: beginnings of what follows, without spaces; ``{}`` is the name of a tool.
        closing: "" where only the end of the reply is.
    """

    heads: tuple[str, ...]
    closing: str = ""

    def admits(self, text: str, names: Iterable[str]) -> bool:
        """Whether what follows the opening so far can become a call."""
        said = "".join(text[:_LOOK].split())
        if not said:
            return len(text) < _LOOK
        return any(
            said.startswith(head) or head.startswith(said)
            for one in self.heads
            for head in ((one.format(name) for name in names) if "{}" in one else (one,))
        )


_LOOK = 256  # characters after an opening that are looked at; a name has at most 128
_BEHIND = {
    "<tool_call>": Opening(
        (*_JSON, "<function=", "{}<arg_key>", "{}</tool_call>"), closing=CLOSING
    ),
    "[TOOL_CALLS]": Opening((*_JSON, "{}[ARGS]", "{}[CALL_ID]", "{}{{")),
    "<|python_tag|>": Opening(_JSON),
    "<|tool_call|>": Opening(_JSON),
    "<minimax:tool_call>": Opening(("<invokename=",), closing="</minimax:tool_call>"),
    "<|tool_calls_section_begin|>": Opening(
        ("<|tool_call_begin|>",), closing="<|tool_calls_section_end|>"
    ),
    "<｜tool▁calls▁begin｜>": Opening(("<｜tool▁call▁begin｜>",), closing="<｜tool▁calls▁end｜>"),
    "<|tool_call>": Opening(("call:",), closing="<tool_call|>"),
}
BEHIND = {opening: _BEHIND[opening] for opening in OPENINGS}
ALONE = Opening(_OBJECT)
_ENDS = tuple(filter(None, (one.closing for one in BEHIND.values())))
# parts of a call that are begun and ended by tags: more beginnings than ends is an unfinished one
_PAIRED = (("<function=", "</function>"), ("<invoke ", "</invoke>"), ("<arg_key>", "</arg_value>"))

_TAGGED = re.compile(
    r"<parameter=(?P<a>[^>\n]+)>\n?(?P<av>.*?)\n?</parameter>"
    r'|<parameter name="(?P<b>[^"]+)">(?P<bv>.*?)</parameter>'
    r"|<arg_key>(?P<c>.*?)</arg_key>\s*<arg_value>(?P<cv>.*?)</arg_value>",
    re.DOTALL,
)
_OPEN_TAG = re.compile(r"<parameter|<arg_key>|<arg_value>")
_GEMMA = re.compile(r'<\|"\|>(.*?)<\|"\|>|([{,]\s*)([A-Za-z_]\w*)(?=\s*:)', re.DOTALL)


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call as it was written: ``arguments`` are an object, or the texts of values by name;
    ``end``: of it in the text."""

    name: str
    arguments: Any
    texts: bool = False
    end: int = 0


def calls_in(text: str) -> list[WrittenCall]:
    """The calls in a part of a reply that begins with one; [] if there are none."""
    for syntax in SYNTAXES.values():
        if syntax.opening in text and (found := list(_found(syntax, text))):
            return found
    return list(_json_calls(text))


def behind(text: str, calls: list[WrittenCall]) -> str:
    """What follows the last of the calls in a text, without the marks that end them."""
    rest = text[max((call.end for call in calls), default=0) :]
    while ended := next((end for end in _ENDS if rest.lstrip().startswith(end)), None):
        rest = rest.lstrip()[len(ended) :]
    return rest


def unfinished(inner: str) -> bool:
    """Whether a closing after ``inner`` stands inside a value, so that more is to come."""
    if any(inner.count(begin) > inner.count(end) for begin, end in _PAIRED):
        return True
    if inner.count('<|"|>') % 2:
        return True
    try:
        msgspec.json.decode(inner.strip())
    except msgspec.DecodeError as error:
        return inner.lstrip()[:1] in ("{", "[") and "truncated" in str(error)
    except RecursionError:
        return False
    return False


def _found(syntax: Syntax, text: str) -> Iterator[WrittenCall]:
    for call in syntax.call.finditer(text):
        name, body = call["name"].strip(), call["body"].strip()
        if body.startswith("{"):
            if syntax is SYNTAXES["gemma"]:
                body = _GEMMA.sub(_as_json, body)
            value = _decoded(body)
            if value is not None:
                yield WrittenCall(name, value, end=call.end())
        elif not _OPEN_TAG.search(_TAGGED.sub("", body)):  # every value is closed
            parts = (next(p for p in _pairs(tag)) for tag in _TAGGED.finditer(body))
            yield WrittenCall(name, dict(parts), texts=True, end=call.end())


def _pairs(tag: re.Match[str]) -> Iterator[tuple[str, str]]:
    for key in "abc":
        if tag[key] is not None:
            yield tag[key].strip(), tag[f"{key}v"]


def _as_json(found: re.Match[str]) -> str:
    if found[1] is not None:
        return msgspec.json.encode(found[1]).decode()
    return f'{found[2]}"{found[3]}"'


def _json_calls(text: str) -> Iterator[WrittenCall]:
    """Calls that are JSON, after their openings or alone; only the end of a call or of the text
    may follow a value."""
    at: int | None = 0
    while at is not None:
        begin = at + len(text[at:]) - len(text[at:].lstrip())
        try:
            said, end = _READER.raw_decode(text, begin)
        except (ValueError, RecursionError):
            said, end = None, at
        if _AFTER.match(text, end):
            for one in said if isinstance(said, list) else [said]:
                if isinstance(one, dict) and isinstance(one.get("name"), str):
                    arguments = one.get("arguments", one.get("parameters", {}))
                    if isinstance(arguments, str):
                        arguments = _decoded(arguments)
                    yield WrittenCall(one["name"], arguments, end=end)
        found = _NEXT.search(text, end)
        at = None if found is None else found.end()


def _no_number(name: str) -> NoReturn:
    raise ValueError(name)


_READER = json.JSONDecoder(parse_constant=_no_number)
_NEXT = re.compile("|".join(map(re.escape, JSON_OPENINGS)))
_AFTER = re.compile(rf"\s*(?:\Z|{re.escape(CLOSING)}|{_NEXT.pattern})")


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None

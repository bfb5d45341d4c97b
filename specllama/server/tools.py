"""Tools: their description for a model, the grammar that demands a call, the calls in its text.

A template that has a place for tools gets them there, if it writes calls in a way that we know
(see ``ToolSyntax``). For others they stand in the system prompt as JSON, so that any model
that follows instructions can use them. If a call is demanded, a grammar allows nothing else. If
the model decides, its text is searched for calls in any of the ways of ``replies.tool_calls``.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from specllama.events import FinishReason
from specllama.grammar.source import PLACE, schemas
from specllama.interface import Message, ToolSyntax
from specllama.replies.tool_calls import (
    CLOSING,
    FENCE,
    OPENING,
    SYNTAXES,
    Call,
    CallScanner,
    NoCall,
    TooShort,
    respelled,
)
from specllama.server.refusals import wrong
from specllama.server.sampling_fields import schema_text
from specllama.settings.params import GenerateParams

_TOOLS = 1024  # of one request
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_NAMES_HOLD = "it has 1 to 128 letters, digits and _ . : / -"
# where a call may begin: a mark or a fence anywhere, the rest in front of a line
_START = re.compile(r"(?:(?<=\n)|\A)[ \t]*(?P<line>[{`~\[<\w])|[<\[]|`")
_INSIDE = ("{", "[", "(", ",", "}")  # a line behind these goes on with something that is no call
_OPEN = {"additionalProperties", "patternProperties", "anyOf", "oneOf", "$ref"}
_LOOK = 200  # characters before a line
# white space, as much of it as a call needs
_WHITE = ("w: white{0,9}", r"white: /[ \t\r\n]/")
_PART = re.compile(r'"(?:[^"\\]|\\.)*"|\w+')
# of a schema that tags can keep to, and of a text in it
_OF_TAGS = {"type", "properties", "required", "additionalProperties", "title", "description",
            "$schema", PLACE}  # fmt: skip
_OF_TEXT = {"type", "enum", "title", "description", "default", "examples"}
_LONG, _ENDS = 2000, re.compile(r"[\"'>}\])`]")


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str = ""
    schema: dict[str, Any] = field(default_factory=lambda: {"type": "object"})
    place: str = ""  # in the request


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that a request may call: ``choice`` is "auto", "any", or the name of one of them;
    ``parallel``: several in one reply."""

    tools: tuple[Tool, ...]
    choice: str = "auto"
    parallel: bool = True

    @property
    def forced(self) -> bool:
        return self.choice != "auto"

    @property
    def callable(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if tool.name == self.choice) or self.tools


class ToolChoice(msgspec.Struct, omit_defaults=True):
    """A choice of a tool to call, or of those that may be called, in any family's words."""

    type: str | None = None
    name: str | None = None
    namespace: str | None = None
    mode: str | None = None
    tools: list[ToolChoice] | None = None
    function: ToolChoice | None = None  # as OpenAI's chat has it, like the following
    allowed_tools: ToolChoice | None = None
    disable_parallel_tool_use: bool | None = None  # as Anthropic has it

    @property
    def called(self) -> str:
        """The model's name for the tool."""
        one = self.function or self
        return full_name(one.namespace, one.name or "")


def full_name(namespace: str | None, name: str) -> str:
    """Return the model's name for a tool."""
    return f"{namespace}.{name}" if namespace else name


def tool_use(
    tools: Sequence[Tool], choice: str | ToolChoice | None, *, parallel: bool | None = None
) -> ToolUse | None:
    """Return the tools that may be called; None if there are none.

    Raises:
        Refusal: a name is wrong, or the chosen tool is missing.
    """
    if isinstance(choice, ToolChoice):
        some = choice.allowed_tools or choice
        if some is not choice or (choice.type == "allowed_tools" and choice.tools is not None):
            choice, names = some.mode, [one.called for one in some.tools or ()]
            known = {tool.name for tool in tools}
            if missing := [name for name in names if name not in known]:
                raise wrong("tool_choice", f"tool_choice: there is no tool {missing[0][:128]!r}")
            tools = [tool for tool in tools if tool.name in names]
        elif choice.type in (None, "function") and not choice.called:
            raise wrong("tool_choice", "tool_choice names no function")
        else:
            choice = choice.called or choice.type
    if len(tools) > _TOOLS:
        raise wrong("tools", f"tools: at most {_TOOLS}, got {len(tools)}")
    for i, tool in enumerate(tools):
        place = tool.place or f"tools[{i}]"
        kind, properties = tool.schema.get("type", "object"), tool.schema.get("properties", {})
        why = ""
        if not _NAME.fullmatch(tool.name):
            why = f"{tool.name[:80]!r} is no name: {_NAMES_HOLD}"
        elif any(tool.name == other.name for other in tools[:i]):
            why = f"there is another tool {tool.name!r}"
        elif "object" not in (kind if isinstance(kind, list) else [kind]):
            why = f"parameters of {tool.name!r} are an object, their type is {str(kind)[:80]!r}"
        elif not isinstance(properties, dict):
            why = f"parameters of {tool.name!r}: properties must be an object"
        if why:
            raise wrong(place, f"{place}: {why}")
    choice = "any" if choice == "required" else choice or "auto"
    if choice == "any" and not tools:
        raise wrong("tool_choice", "tool_choice: a call is demanded, and there are no tools")
    if choice not in ("auto", "any", "none") and choice not in {tool.name for tool in tools}:
        raise wrong("tool_choice", f"tool_choice: there is no tool {choice[:128]!r}")
    if not tools or choice == "none":
        return None
    return ToolUse(tuple(tools), choice, parallel is not False)


def _described(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.schema}


def given(use: ToolUse) -> str:
    """Write the tools as a variable of the chat template (``GenerateParams.template_args``)."""
    tools = [{"type": "function", "function": _described(tool)} for tool in use.tools]
    return f"tools={msgspec.json.encode(tools).decode()}"


def told(messages: Sequence[Message], use: ToolUse) -> list[Message]:
    """Put a description of the tools in front of the conversation."""
    lines = [msgspec.json.encode(_described(tool)).decode() for tool in use.tools]
    text = "\n".join(
        [
            "These tools can be called, each described by a line of JSON:",
            *lines,
            "To call a tool, write nothing but its name and its arguments in this form:",
            f'{OPENING}\n{{"name": "NAME", "arguments": {{}}}}\n{CLOSING}',
        ]
    )
    if messages and messages[0].role == "system":
        return [replace(messages[0], content=f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [Message("system", text), *messages]


def bound(params: GenerateParams, use: ToolUse, syntax: ToolSyntax = "") -> GenerateParams:
    """Restrict the reply to calls, if the request demands one; where a text has to fit a grammar,
    let it be calls instead.

    Raises:
        UsageError: the schema of a tool cannot be enforced.
    """
    if not use.forced:
        return params.replace(calls=_grammar(use, syntax)) if params.constrained else params
    several = len(use.callable) > 1
    forms = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "arguments": _rooted(
                    tool, f"#{f'/anyOf/{i}' if several else ''}/properties/arguments"
                ),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(use.callable)
    ]
    # one form alone needs no choice, and every grammar begins with an object
    schema = {"type": "object", **forms[0]} if len(forms) == 1 else {"anyOf": forms}
    return params.replace(json_schema=schema_text(schema), grammar=None, regex=None)


def _grammar(use: ToolUse, syntax: ToolSyntax) -> str:
    """Write the calls that a reply may be: rules in Lark, with ``calls`` as their root, and the
    schemas that they name. See ``GenerateParams.calls``."""
    form = SYNTAXES.get(syntax, SYNTAXES["json"])
    rules, schemas, calls = [*_WHITE], {}, []
    for i, tool in enumerate(use.tools):
        name, schema = f'"{tool.name}"', _rooted(tool, "#")
        schemas[f"args{i}"] = schema
        members = rf'"\"name\"" w ":" w "\"{tool.name}\"" w "," w "\"{form.key}\"" w ":" w args{i}'
        rules.append(f'object{i}: "{{" w {members} w "}}"')
        tags = _tags(schema, form.spell[1], f"tag{i}", schemas) if form.spell else ""
        if tags is not None:
            parts = {"NAME": name, "args": f"args{i}", "object": f"object{i}", "tags": tags}
            calls.append(_filled(form.call, parts))
    rules.append(f"object: {' | '.join(f'object{i}' for i in range(len(use.tools)))}")
    if form.spell:
        behind = form.spell[1].rpartition("{}")[2]
        shut = behind.strip().replace("/", r"\/")
        rules.append(f"VALUE: (/(?s:.*)/ & ~/(?s:.*){shut}(?s:.*)/) {json.dumps(behind)}")
    many = f"call ({form.between} call)*" if use.parallel else "call"
    whole = _filled(form.whole, {"calls": f"({many})"})
    rules += [f"calls: {whole} | object", f"call: {' | '.join(calls) or 'object'}"]
    return msgspec.json.encode({"rules": rules, "schemas": schemas}).decode()


def _filled(form: str, parts: Mapping[str, str]) -> str:
    return _PART.sub(lambda part: parts.get(part[0], part[0]), form)


def _tags(schema: dict[str, Any], value: str, name: str, schemas: dict[str, Any]) -> str | None:
    """Write arguments between tags; None if only JSON can keep to their schema."""
    before, between, behind = value.split("{}")
    out, end = [], json.dumps(behind)
    for i, (key, part) in enumerate(schema.get("properties", {}).items()):
        text = isinstance(part, dict) and part.get("type") == "string"
        if "$ref" in json.dumps(part) or (text and part.keys() - _OF_TEXT):
            return None
        if not text:
            schemas[f"{name}_{i}"] = part
            said = f"{name}_{i} {end}"
        elif "enum" in part:
            said = f"({' | '.join(map(json.dumps, part['enum']))}) {end}"
        else:
            said = "VALUE"
        optional = "" if key in schema.get("required", ()) else "?"
        out.append(f"({json.dumps(before + key + between)} {said}){optional}")
    return None if schema.keys() - _OF_TAGS else " ".join(out)


def _rooted(tool: Tool, root: str) -> dict[str, Any]:
    """Move a tool's schema to this place: references still lead to its own parts, and objects have
    only the members that it names, unless it allows more."""
    schema = deepcopy(tool.schema)
    merged = any("allOf" in part for _, part in schemas(schema))
    for path, part in schemas(schema):
        named, needed = part.get("properties"), part.get("required", [])
        alone = not (merged or path.endswith("]") or part.keys() & _OPEN)
        if alone and isinstance(named, dict) and isinstance(needed, list):
            every = all(str(key) in named for key in needed)
            part.update({"additionalProperties": False} if every else {})
        if isinstance(leads := part.get("$ref"), str) and leads.startswith("#"):
            part["$ref"] = f"{root}{leads[1:]}"
    return {**schema, PLACE: f"{tool.place or tool.name}.parameters"}


def equipped(
    messages: Sequence[Message], params: GenerateParams, use: ToolUse, syntax: ToolSyntax
) -> tuple[list[Message], GenerateParams]:
    """Prepare a conversation and its parameters for a model that may or must call tools.

    Args:
        syntax: of calls in the model's template, which then gets the tools.

    Raises:
        UsageError: the schema of a tool cannot be enforced.
    """
    params = bound(params, use, syntax)
    if not syntax:
        return told(messages, use), params
    params = params.replace(template_args=(*params.template_args, given(use)), spelled=True)
    return [respelled(message, syntax) for message in messages], params


class ToolReader:
    """Reader that separates the calls in a text from the part to show.

    Text is held back from where a call may begin, until it is clear that it is none.

    Args:
        alone: a reply is calls or text, never both.
    """

    def __init__(self, use: ToolUse, *, alone: bool = False) -> None:
        self._use = use
        self._alone = alone
        self._tools = {tool.name: tool.schema for tool in use.tools}
        self._held = ""  # what may belong to a call
        self._last = ""  # of what was shown, but for white space; "" behind a call
        self._in_code = False  # in a fence that holds no calls
        self._shown = False
        self.calls: list[Call] = []

    def feed(self, text: str) -> str:
        """Take more text; return the part that certainly belongs to no call."""
        self._held += text
        # of what is long, only ends of values are looked at
        if self._use.forced or (len(self._held) > _LONG and not _ENDS.search(text)):
            return ""
        return self._settled()

    def finish(self, reason: FinishReason = "stop_token", stop: str | None = None) -> str:
        """Return the held text that is no call.

        Args:
            reason: why the reply ended. A call that was cut is none, and is not shown either.
            stop: the string that ended it, which may be the closing of a call.
        """
        closed, end = reason == "stop_token", stop or ""
        if self._use.forced:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                said = json.loads(self._held)
                arguments = msgspec.json.encode(said["arguments"]).decode()
                self.calls.append(Call(said["name"], arguments))
                return ""
        self._held += end
        rest = (self._settled(over=True, closed=closed) + self._held).removesuffix(end)
        if self._use.forced and not closed:
            return ""
        return rest.rstrip() if self.calls else rest

    def _settled(self, *, over: bool = False, closed: bool = False) -> str:
        """Return the part of the held text that can be shown; the rest stays held."""
        shown, end = "", 0
        while end >= 0:
            scanner = CallScanner(self._held, self._tools, over=over, closed=closed)
            behind_calls = bool(self.calls)
            begin, end = self._next(scanner)
            part = scanner.text[:begin].rstrip()  # white space before a call is not shown
            self._held = scanner.text[max(end, len(part)) :]
            if behind_calls and not self._shown:
                part = part.lstrip()
            self._shown |= bool(part)
            self._last = "" if end > 0 else part[-1:] or self._last
            shown += part
        return shown

    def _next(self, scanner: CallScanner) -> tuple[int, int]:
        """Find the beginning and the end of the next call; -1: nothing from there on is settled."""
        text, at = scanner.text, 0
        while found := _START.search(text, at):
            if self._alone and not self.calls and (self._shown or text[: found.start()].strip()):
                break
            line = found["line"] is not None and (found.start() > 0 or not self._last)
            at = found.end() - 1
            fence = FENCE.match(text, at) if line else None
            if self._in_code and fence:
                self._in_code, at = False, fence.end()
                continue
            before = text[max(at - _LOOK, 0) : at].rstrip()[-1:] or self._last
            try:
                bare = not self._in_code and before not in _INSIDE
                calls, end = scanner.unit(at, bare=bare and (line or text[at] == "`"))
                self.calls += calls
                if not self._use.parallel:
                    del self.calls[1:]
                return at, end
            except (NoCall, RecursionError):
                if self.calls and not before and (end := scanner.closing(at)):
                    return at, end
                self._in_code |= fence is not None
            except TooShort:
                if not scanner.over:
                    return at, -1
                if scanner.begun:
                    return at, len(text)
            at += 1
        return len(text), -1

"""Tools: how a model is told of them, is made to call one, and what calls look like in its text.

A template that has a place for tools is given them, if it has calls written in a way that we know
(see ``ToolSyntax``). For others they stand in the system prompt as JSON, so that any model
that follows instructions can use them. Calls and results of earlier turns stand in the conversation
as text, in the way of Hermes and Qwen. Where a call is demanded, a grammar leaves nothing else.
Where it is up to the model, its text is read for the syntaxes of four families:

- ``<tool_call>{"name": …, "arguments": …}</tool_call>``: Hermes, Qwen;
- ``<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>``: Qwen 3.5;
- ``[TOOL_CALLS][{"name": …, "arguments": …}]``: Mistral;
- ``<|python_tag|>{…}``, or nothing but ``{"name": …, "parameters": …}``: Llama 3.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from specllama.interface import Message, ToolSyntax
from specllama.params import GenerateParams
from specllama.server.refusals import wrong
from specllama.server.sampling import schema_text

OPENINGS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
_CLOSING = "</tool_call>"
_WRITTEN = re.compile(rf"{OPENINGS[0]}\n(.*?)\n{_CLOSING}", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str = ""
    schema: dict[str, Any] = field(default_factory=lambda: {"type": "object"})


@dataclass(frozen=True, slots=True)
class Call:
    """One call; ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request may call: ``choice`` is "auto", "any", or the name of one tool."""

    tools: tuple[Tool, ...]
    choice: str = "auto"

    @property
    def forced(self) -> bool:
        return self.choice != "auto"

    @property
    def callable(self) -> tuple[Tool, ...]:
        named = tuple(tool for tool in self.tools if tool.name == self.choice)
        return named or self.tools


def tool_use(tools: Sequence[Tool], choice: str | None) -> ToolUse | None:
    """None where there is nothing to call.

    Raises:
        Refusal: a name is none, or the chosen tool is not there.
    """
    if not tools or choice == "none":
        return None
    for i, tool in enumerate(tools):
        if not _NAME.fullmatch(tool.name):
            raise wrong(f"tools[{i}]", f"tools[{i}]: {tool.name[:80]!r} is no name")
    choice = "any" if choice == "required" else choice or "auto"
    if choice not in ("auto", "any") and choice not in {tool.name for tool in tools}:
        raise wrong("tool_choice", f"tool_choice: there is no tool {choice!r}")
    return ToolUse(tuple(tools), choice)


def given(use: ToolUse) -> str:
    """The tools as a variable of the chat template (see ``GenerateParams.template_args``)."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.schema,
            },
        }
        for tool in use.tools
    ]
    return f"tools={msgspec.json.encode(tools).decode()}"


def respelled(message: Message) -> Message:
    """With its calls in the way of Qwen 3.5."""

    def respell(found: re.Match[str]) -> str:
        try:
            call = msgspec.json.decode(found[1])
            lines = [f"<function={call['name']}>"]
            for name, value in call["arguments"].items():
                text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
                lines.append(f"<parameter={name}>\n{text}\n</parameter>")
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
            return found[0]
        return "\n".join([OPENINGS[0], *lines, "</function>", _CLOSING])

    if message.role != "assistant":
        return message
    return replace(message, content=_WRITTEN.sub(respell, message.content))


def told(messages: Sequence[Message], use: ToolUse) -> list[Message]:
    """The conversation with what the model has to know of its tools in front."""
    lines = [
        msgspec.json.encode(
            {"name": tool.name, "description": tool.description, "parameters": tool.schema}
        ).decode()
        for tool in use.tools
    ]
    text = "\n".join(
        [
            "These tools can be called, each described by a line of JSON:",
            *lines,
            "To call a tool, write nothing but its name and its arguments in this form:",
            f'{OPENINGS[0]}\n{{"name": "NAME", "arguments": {{}}}}\n{_CLOSING}',
        ]
    )
    if messages and messages[0].role == "system":
        first = replace(messages[0], content=f"{messages[0].content}\n\n{text}")
        return [first, *messages[1:]]
    return [Message("system", text), *messages]


def call_text(calls: Sequence[Call]) -> str:
    """Calls of an earlier turn, as the model wrote them."""
    return "\n".join(
        "\n".join(
            (
                OPENINGS[0],
                f'{{"name": "{call.name}", "arguments": {call.arguments or "{}"}}}',
                _CLOSING,
            )
        )
        for call in calls
    )


def result_text(content: str) -> str:
    return f"<tool_response>\n{content}\n</tool_response>"


def bound(params: GenerateParams, use: ToolUse) -> GenerateParams:
    """The parameters of a request that has to call.

    Raises:
        UsageError: the schema of a tool cannot be enforced.
    """
    if not use.forced:
        return params
    forms = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": tool.schema},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in use.callable
    ]
    # one form alone needs no choice, and every grammar begins with an object
    schema = {"type": "object", **forms[0]} if len(forms) == 1 else {"anyOf": forms}
    return params.replace(json_schema=schema_text(schema), grammar=None)


def equipped(
    messages: Sequence[Message], params: GenerateParams, use: ToolUse, syntax: ToolSyntax
) -> tuple[list[Message], GenerateParams]:
    """A conversation and its parameters for a model that may call, or has to.

    Args:
        syntax: of calls in the model's template, which is given the tools then.

    Raises:
        UsageError: the schema of a tool cannot be enforced.
    """
    params = bound(params, use)
    if not syntax:
        return told(messages, use), params
    params = params.replace(template_args=(*params.template_args, given(use)))
    return [respelled(m) if syntax == "xml" else m for m in messages], params


class ToolReader:
    """Tells the calls in a text from what is to be shown."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._names = {tool.name for tool in use.tools}
        self._held = ""  # what may belong to a call
        self._calling = use.forced
        self._begun = False  # something was shown

    def feed(self, text: str) -> str:
        """More text; what of it is certainly none of a call."""
        self._held += text
        if self._calling:
            return ""
        found = [at for opening in OPENINGS if (at := self._held.find(opening)) >= 0]
        if found:
            self._calling = True
            return self._show(min(found))
        if not self._begun and self._held.lstrip()[:1] == "{":
            return ""  # perhaps a call and nothing else
        certain = self._held[: len(self._held) - self._open_end()]
        return self._show(len(certain.rstrip()))  # white space before a call is not shown

    def _open_end(self) -> int:
        """How much at the end may be the beginning of an opening."""
        longest = min(len(self._held), max(map(len, OPENINGS)) - 1)
        for n in range(longest, 0, -1):
            if any(opening.startswith(self._held[-n:]) for opening in OPENINGS):
                return n
        return 0

    def _show(self, n: int) -> str:
        shown, self._held = self._held[:n], self._held[n:]
        if self._calling:
            shown = shown.rstrip()
        self._begun |= bool(shown.strip())
        return shown

    def finish(self) -> tuple[str, list[Call]]:
        """What was held back: text, and calls."""
        held, self._held = self._held, ""
        calls = self._calls(held)
        return ("" if calls else held), calls

    def _calls(self, text: str) -> list[Call]:
        out: list[Call] = []
        decoder = msgspec.json.Decoder()
        for part in re.split("|".join(map(re.escape, OPENINGS)), text):
            body = part.partition(_CLOSING)[0].strip()
            if not body:
                continue
            if (function := _FUNCTION.match(body)) is not None:
                out += filter(None, [self._function(function[1], function[2])])
                continue
            try:
                said = decoder.decode(body)
            except (msgspec.DecodeError, RecursionError):
                continue
            out += [call for one in (said if isinstance(said, list) else [said])
                    if (call := self._call(one)) is not None]  # fmt: skip
        return out

    def _function(self, name: str, body: str) -> Call | None:
        """A call whose values are JSON only where the schema does not ask for a text."""
        tool = next((tool for tool in self._use.tools if tool.name == name.strip()), None)
        if tool is None:
            return None
        kinds = tool.schema.get("properties", {})
        arguments: dict[str, Any] = {}
        for key, text in _PARAMETER.findall(body):
            kind = kinds.get(key)
            arguments[key] = text
            if not (isinstance(kind, dict) and kind.get("type") == "string"):
                with contextlib.suppress(msgspec.DecodeError, RecursionError):
                    arguments[key] = msgspec.json.decode(text)
        return Call(tool.name, msgspec.json.encode(arguments).decode())

    def _call(self, said: Any) -> Call | None:
        if not isinstance(said, dict) or said.get("name") not in self._names:
            return None
        arguments = said.get("arguments", said.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = msgspec.json.decode(arguments)
            except msgspec.DecodeError:
                return None
        if not isinstance(arguments, dict):
            return None
        return Call(said["name"], msgspec.json.encode(arguments).decode())

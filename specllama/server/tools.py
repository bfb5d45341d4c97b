"""Tools: how a model is told of them, is made to call one, and what calls look like in its text.

A template that has a place for tools is given them, if it has calls written in a way that we know
(see ``ToolSyntax``). For others they stand in the system prompt as JSON, so that any model
that follows instructions can use them. Calls and results of earlier turns stand in the conversation
as text, in the way of Hermes and Qwen or, of three families, in their own. Where a call is
demanded, a grammar leaves nothing else. Where it is up to the model, its text is read for calls in
any of the ways of ``spellings``.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from specllama.interface import Message, ToolSyntax
from specllama.params import GenerateParams
from specllama.server.refusals import wrong
from specllama.server.sampling import schema_text
from specllama.server.spellings import CLOSING, OPENINGS, Written, calls_in

_OPENING = "<tool_call>"
_TOOLS = 1024  # of one request
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
    if len(tools) > _TOOLS:
        raise wrong("tools", f"tools: at most {_TOOLS}, got {len(tools)}")
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


def _xml(name: str, arguments: dict[str, str]) -> str:
    values = [f"<parameter={key}>\n{text}\n</parameter>" for key, text in arguments.items()]
    return "\n".join([_OPENING, f"<function={name}>", *values, "</function>", CLOSING])


def _glm(name: str, arguments: dict[str, str]) -> str:
    values = [
        f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>"
        for key, text in arguments.items()
    ]
    return "\n".join([f"{_OPENING}{name}", *values, CLOSING])


def _minimax(name: str, arguments: dict[str, str]) -> str:
    values = [f'<parameter name="{key}">{text}</parameter>' for key, text in arguments.items()]
    call = [f'<invoke name="{name}">', *values, "</invoke>"]
    return "\n".join(["<minimax:tool_call>", *call, "</minimax:tool_call>"])


_SPELLED: dict[str, Callable[[str, dict[str, str]], str]] = {
    "xml": _xml,
    "glm": _glm,
    "minimax": _minimax,
}


def respelled(message: Message, syntax: ToolSyntax) -> Message:
    """With its calls as the model itself writes them, where text can say that."""
    spelled = _SPELLED.get(syntax)
    if message.role != "assistant" or spelled is None:
        return message

    def respell(written: str) -> str:
        try:
            call = msgspec.json.decode(written)
            arguments = {
                name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
                for name, value in call["arguments"].items()
            }
            return spelled(call["name"], arguments)
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError, RecursionError):
            return f"{_OPENING}\n{written}\n{CLOSING}"

    # find by find: an expression would look for each opening's end anew, to the end of the text
    text, parts, at = message.content, [], 0
    opening, closing = f"{_OPENING}\n", f"\n{CLOSING}"
    while (begin := text.find(opening, at)) >= 0:
        end = text.find(closing, begin + len(opening))
        if end < 0:
            break
        parts += [text[at:begin], respell(text[begin + len(opening) : end])]
        at = end + len(closing)
    return replace(message, content="".join((*parts, text[at:])))


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
            f'{_OPENING}\n{{"name": "NAME", "arguments": {{}}}}\n{CLOSING}',
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
                _OPENING,
                f'{{"name": "{call.name}", "arguments": {call.arguments or "{}"}}}',
                CLOSING,
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
    params = params.replace(template_args=(*params.template_args, given(use)), spelled=True)
    return [respelled(message, syntax) for message in messages], params


class ToolReader:
    """Tells the calls in a text from what is to be shown."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
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
        return [call for one in calls_in(text) if (call := self._call(one)) is not None]

    def _call(self, written: Written) -> Call | None:
        tool = next((tool for tool in self._use.tools if tool.name == written.name), None)
        if tool is None or not isinstance(written.arguments, dict):
            return None
        arguments = written.arguments
        if written.texts:
            arguments = {key: _value(tool, key, text) for key, text in arguments.items()}
        return Call(tool.name, msgspec.json.encode(arguments).decode())


def _value(tool: Tool, key: str, text: str) -> Any:
    """JSON, unless the schema asks for a text or it is none."""
    kind = tool.schema.get("properties", {}).get(key)
    if not (isinstance(kind, dict) and kind.get("type") == "string"):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(text)
    return text

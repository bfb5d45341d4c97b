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

from specllama.events import FinishReason
from specllama.interface import Message, ToolSyntax
from specllama.server.refusals import wrong
from specllama.server.sampling import schema_text
from specllama.server.spellings import (
    ALONE,
    BEHIND,
    CLOSING,
    OPENINGS,
    WrittenCall,
    behind,
    calls_in,
    unfinished,
)
from specllama.settings.params import GenerateParams

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
    """What a request may call: ``choice`` is "auto", "any", or the name of one tool; ``parallel``:
    several in one reply."""

    tools: tuple[Tool, ...]
    choice: str = "auto"
    parallel: bool = True

    @property
    def forced(self) -> bool:
        return self.choice != "auto"

    @property
    def callable(self) -> tuple[Tool, ...]:
        named = tuple(tool for tool in self.tools if tool.name == self.choice)
        return named or self.tools


def tool_use(
    tools: Sequence[Tool], choice: str | None, *, parallel: bool | None = None
) -> ToolUse | None:
    """None where there is nothing to call.

    Raises:
        Refusal: a name is none, or the chosen tool is not there.
    """
    if len(tools) > _TOOLS:
        raise wrong("tools", f"tools: at most {_TOOLS}, got {len(tools)}")
    for i, tool in enumerate(tools):
        if not _NAME.fullmatch(tool.name):
            raise wrong(f"tools[{i}]", f"tools[{i}]: {tool.name[:80]!r} is no name")
    choice = "any" if choice == "required" else choice or "auto"
    if choice == "any" and not tools:
        raise wrong("tool_choice", "tool_choice: a call is demanded, and there are no tools")
    if choice not in ("auto", "any", "none") and choice not in {tool.name for tool in tools}:
        raise wrong("tool_choice", f"tool_choice: there is no tool {choice[:128]!r}")
    if not tools or choice == "none":
        return None
    return ToolUse(tuple(tools), choice, parallel is not False)


def allowed(tools: Sequence[Tool], names: Sequence[str]) -> list[Tool]:
    """Those of the tools that a choice lets the model call.

    Raises:
        Refusal: one is not there.
    """
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            raise wrong("tool_choice", f"tool_choice: there is no tool {name[:128]!r}")
    return [tool for tool in tools if tool.name in names]


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
    return params.replace(json_schema=schema_text(schema), grammar=None, regex=None)


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
    """Tells the calls in a text from what is to be shown.

    Text is held back from an opening on, for as long as what follows can become a call.
    """

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._names = [tool.name for tool in use.tools]
        self._held = ""  # what may belong to a call
        self._opening = ""  # of the call that ``_held`` begins with, after white space
        self._closings = 0  # so many of its closings turned out to stand inside of it
        self._begun = False  # something was shown
        self.calls: list[Call] = []

    def feed(self, text: str) -> str:
        """More text; what of it is certainly none of a call."""
        self._held += text
        if self._use.forced:
            return ""
        shown: list[str] = []
        while (part := self._next()) is not None:
            shown.append(part)
        return "".join(shown)

    def finish(self, reason: FinishReason = "stop_token", stop: str | None = None) -> str:
        """What was held back and is text.

        Args:
            reason: why the reply ended. A call that was cut is text, and so is one without its
                required arguments; what the model itself ended is called as it was written.
            stop: the string that ended it, which may be the closing of a call.
        """
        held, self._held = self._held, ""
        if not (self._opening or self._use.forced or self._is_alone(held)):
            return held
        cut = reason != "stop_token"
        calls = calls_in(held + (stop or ""))
        if not self._take(calls, whole=cut):
            return held
        return behind(held, calls).rstrip()

    def _next(self) -> str | None:
        """Settle one part of what is held, as far as it can be: what of it is shown; None: more
        has to come first."""
        if self._opening:
            return self._inside()
        found = [(at, one) for one in OPENINGS if (at := self._held.find(one)) >= 0]
        if found:
            at, self._opening = min(found, key=lambda one: (one[0], -len(one[1])))
            return self._show(len(self._held[:at].rstrip()))
        if self._is_alone(self._held):
            return None
        certain = self._held[: len(self._held) - self._open_end()]
        # white space before a call is not shown
        return self._show(len(certain.rstrip())) or None

    def _is_alone(self, held: str) -> bool:
        """Whether it may be a call and nothing else."""
        return not (self._begun or self.calls) and ALONE.admits(held, self._names)

    def _inside(self) -> str | None:
        """The same, after an opening."""
        kind = BEHIND[self._opening]
        begin = self._held.index(self._opening) + len(self._opening)
        inner = self._held[begin:]
        if not kind.admits(inner, self._names):
            return self._text(begin)
        if not kind.closing or inner.count(kind.closing) <= self._closings:
            return None
        at = begin
        for _ in range(self._closings + 1):
            at = self._held.index(kind.closing, at) + len(kind.closing)
        if self._take(calls_in(self._held[:at]), whole=False):
            self._held, self._opening, self._closings = self._held[at:], "", 0
            return ""
        if unfinished(self._held[begin : at - len(kind.closing)]):
            self._closings += 1
            return ""
        return self._text(at)

    def _text(self, n: int) -> str:
        """It was none of a call."""
        self._opening, self._closings = "", 0
        return self._show(n)

    def _open_end(self) -> int:
        """How much at the end may be the beginning of an opening."""
        longest = min(len(self._held), max(map(len, OPENINGS)) - 1)
        for n in range(longest, 0, -1):
            if any(opening.startswith(self._held[-n:]) for opening in OPENINGS):
                return n
        return 0

    def _show(self, n: int) -> str:
        shown, self._held = self._held[:n], self._held[n:]
        self._begun |= bool(shown.strip())
        return shown

    def _take(self, written: Sequence[WrittenCall], *, whole: bool) -> bool:
        """Keep these calls; whether there are any.

        Args:
            whole: only those with all their required arguments.
        """
        calls = [call for one in written if (call := self._call(one, whole=whole)) is not None]
        self.calls += calls
        if not self._use.parallel:
            del self.calls[1:]
        return bool(calls)

    def _call(self, written: WrittenCall, *, whole: bool) -> Call | None:
        tool = next((tool for tool in self._use.tools if tool.name == written.name), None)
        if tool is None or not isinstance(written.arguments, dict):
            return None
        arguments = written.arguments
        required = tool.schema.get("required")
        if whole and isinstance(required, list) and not all(key in arguments for key in required):
            return None
        if written.texts:
            arguments = {key: _value(tool, key, text) for key, text in arguments.items()}
        return Call(tool.name, msgspec.json.encode(arguments).decode())


def _value(tool: Tool, key: str, text: str) -> Any:
    """JSON, unless the schema asks for a text or it is none."""
    properties = tool.schema.get("properties")
    kind = properties.get(key) if isinstance(properties, dict) else None
    if not (isinstance(kind, dict) and kind.get("type") == "string"):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(text)
    return text

"""Conversations as clients write them: messages with parts, in OpenAI's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from specllama.interface import Message
from specllama.server.refusals import not_offered, wrong
from specllama.server.tools import (
    Call,
    Tool,
    ToolUse,
    allowed,
    call_text,
    result_text,
    tool_use,
)

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
          "tool": "user", "function": "user"}  # fmt: skip


RESPONSE = "<tool_response>"


class ContentPart(msgspec.Struct, omit_defaults=True):
    type: str | None = None
    text: str | None = None
    refusal: str | None = None

    @property
    def words(self) -> str | None:
        return self.refusal if self.text is None else self.text


class Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct):
    function: Function
    id: str | None = None


class FunctionTool(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolSpec(msgspec.Struct):
    """A tool in a request; kinds that we do not know are left out."""

    type: str | None = None
    function: FunctionTool | None = None


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    function: NamedFunction


class AllowedTools(msgspec.Struct):
    mode: str
    tools: list[NamedTool]


class ToolChoice(msgspec.Struct):
    """One tool that has to be called, or those that may be."""

    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


def tools_of(
    specs: Sequence[ToolSpec] | None,
    choice: str | ToolChoice | None = None,
    parallel: bool | None = None,
) -> ToolUse | None:
    """Read the tools; raise Refusal if a name is wrong or the chosen tool is missing."""
    tools = []
    for i, spec in enumerate(specs or ()):
        if (one := spec.function) is not None:
            schema = one.parameters or {"type": "object"}
            tools.append(Tool(one.name, one.description or "", schema, f"tools[{i}]"))
        elif spec.type in (None, "function"):
            raise wrong(f"tools[{i}]", f"tools[{i}]: it has no function")
    if isinstance(choice, str | None):
        return tool_use(tools, choice, parallel=parallel)
    if (some := choice.allowed_tools) is not None:
        names = [tool.function.name for tool in some.tools]
        return tool_use(allowed(tools, names), some.mode, parallel=parallel)
    if choice.function is None:
        raise wrong("tool_choice", "tool_choice names no function")
    return tool_use(tools, choice.function.name, parallel=parallel)


class Turn(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: Function | None = None  # as before there were tools
    tool_call_id: str | None = None
    name: str | None = None


def text_of(content: str | Sequence[ContentPart] | None, where: str) -> str:
    """Return the text of a message.

    Raises:
        Refusal: it holds something else.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.words is None:
            what, field = part.type or "text", where.partition("[")[0]
            raise not_offered(f"{where}: {what}", "models here read text only", field)
    return "\n".join(part.words or "" for part in content)


def messages_of(turns: Sequence[Turn]) -> list[Message]:
    """Read the messages; raise Refusal if a role is unknown or a content cannot be read."""
    if not turns:
        raise wrong("messages", "messages: the conversation is empty")
    out: list[Message] = []
    for i, turn in enumerate(turns):
        where = f"messages[{i}]"
        if turn.role not in _ROLES:
            raise wrong(f"{where}.role", f"{where}: unknown role {turn.role!r}")
        thought = turn.reasoning_content or turn.reasoning or ""
        text = text_of(turn.content, where)
        calls = [one.function for one in turn.tool_calls or ()]
        if calls := [*calls, turn.function_call] if turn.function_call else calls:
            text = "\n".join(filter(None, (text, call_text([_call(one) for one in calls]))))
        if turn.role in ("tool", "function"):  # templates without tools know no such role
            add_result(out, text)
        else:
            out.append(Message(_ROLES[turn.role], text, thought))
    return out


def add_result(out: list[Message], content: str) -> None:
    """Add the result of a tool; the results of one reply are one turn."""
    text = result_text(content)
    if out and out[-1].role == "user" and out[-1].content.startswith(RESPONSE):
        text = f"{out.pop().content}\n{text}"
    out.append(Message("user", text))


def _call(function: Function) -> Call:
    arguments = function.arguments or "{}"
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return Call(function.name, arguments)

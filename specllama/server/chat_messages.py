"""Conversations as clients write them: messages with parts, in OpenAI's words."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from specllama.interface import Message
from specllama.replies.tool_calls import Call
from specllama.server.chat_turns import ChatTurns
from specllama.server.dialect import Job
from specllama.server.refusals import malformed, text_only, wrong
from specllama.server.tools import Tool, ToolChoice, ToolUse, tool_use
from specllama.text import sanitize_line

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
          "tool": "user", "function": "user"}  # fmt: skip


logger = logging.getLogger("specllama.server")
T = TypeVar("T")


Content = str | list[dict[str, Any]] | None
_MEDIA = ("image_url", "video_url", "audio_url", "input_audio", "file", "file_id", "file_url",
          "file_data")  # fmt: skip


def is_nothing(media: Any) -> bool:
    """True if a field for a picture or the like holds none."""
    return not (media.get("url", True) if isinstance(media, dict) else media)


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
    return tool_use(tools, choice, parallel=parallel)


def parts_of(
    given: Sequence[dict[str, Any]], kind: type[T], read: Sequence[Any], at: str
) -> list[T]:
    """Read the parts of a request that stand at this place; of a kind that is left out, only the
    name is kept. A part without a kind is of the first of those that are ``read``.

    Raises:
        Refusal: a part has another shape than its kind.
    """
    known = [
        one if one.get("type", read[0]) in read else {"type": str(one["type"])} for one in given
    ]
    try:
        return msgspec.convert(known, list[kind])  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        raise malformed(str(error).replace("`$", f"`$.{at}")) from None


def log_left_out(where: str, kind: str) -> None:
    """Log that a part is left out, which only another service can read."""
    logger.info("%s: %s is left out", where, sanitize_line(kind)[:80])


class Turn(msgspec.Struct):
    role: str
    content: Content = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: Function | None = None  # as before there were tools
    tool_call_id: str | None = None
    name: str | None = None


def text_of(content: Content, where: str) -> str:
    """Return the text of a content, which stands at this place.

    Raises:
        Refusal: it holds something else.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for i, part in enumerate(content):
        text = next(
            (part[name] for name in ("text", "refusal") if part.get(name) is not None), None
        )
        if text is None:
            held = [part[name] for name in _MEDIA if name in part]
            if not held or not all(map(is_nothing, held)):
                raise text_only(f"{where}[{i}]", str(part.get("type", "text"))[:80])
        elif not isinstance(text, str):
            raise wrong(f"{where}[{i}].text", f"{where}[{i}].text: a text is wanted")
        texts.append(text or "")
    return "\n".join(texts)


def conversation_of(turns: Sequence[Turn], into: ChatTurns | None = None) -> ChatTurns:
    """Read the messages into a conversation.

    Raises:
        Refusal: a role is unknown, a content cannot be read, or a result belongs to no call.
    """
    if not turns:
        raise wrong("messages", "messages: the conversation is empty")
    out = ChatTurns("tool_call_id") if into is None else into
    for i, turn in enumerate(turns):
        where = f"messages[{i}]"
        if turn.role not in _ROLES:
            raise wrong(f"{where}.role", f"{where}: unknown role {turn.role!r}")
        text = text_of(turn.content, f"{where}.content")
        if turn.role in ("tool", "function"):  # templates without tools know no such role
            out.result(text, where, turn.tool_call_id, turn.name, apart=True)
            continue
        out.begin(_ROLES[turn.role], text, turn.reasoning_content or turn.reasoning or "")
        for nth, one in enumerate(turn.tool_calls or ()):
            out.call(_call(one.function), f"{where}.tool_calls[{nth}]", one.id)
        if turn.function_call is not None:
            out.call(_call(turn.function_call), f"{where}.function_call", None)
    return out


def messages_of(turns: Sequence[Turn]) -> Sequence[Message]:
    """Read the messages; raise Refusal as ``conversation_of`` does."""
    return conversation_of(turns).messages()


def _call(function: Function) -> Call:
    arguments = function.arguments or "{}"
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return Call(function.name, arguments)


LEFT_OUT = {
    "Claude Code names itself and a checksum of the request to its vendor's billing":
    r"^x-anthropic-[a-z-]+:(?:[ \t]*(?:[^\s;]+;|[\w.-]+=[^\s;]*))*[ \t]*[\r\n]*",
}  # fmt: skip
"""Lines that clients put into a system prompt for another service, by the reason.

Such a line changes with each request, so nothing behind it would be found in the cache again, and
it has no meaning for a model. What stands behind it, or on it behind its last semicolon, stays;
``steady-prompts`` keeps all of it."""
_PATTERN = re.compile("|".join(LEFT_OUT.values()), re.MULTILINE | re.IGNORECASE)


def steadied(job: Job) -> Job:
    """Leave these lines out of a job's system messages, and messages that held nothing else."""
    prompt, *others = job.prompts
    if isinstance(prompt, str) or not job.params.steady_prompts:
        return job
    found = tuple(part for part in map(_steadied, prompt) if part is not None)
    return replace(job, prompts=(found or prompt, *others))


def _steadied(part: Any) -> Any:
    if not isinstance(part, Message) or part.role != "system":
        return part
    text = _PATTERN.sub("", part.content)
    return replace(part, content=text) if text.strip() or not part.content else None

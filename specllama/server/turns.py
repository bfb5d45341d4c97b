"""Conversations as clients write them: messages with parts, in OpenAI's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from specllama.interface import Message
from specllama.server.refusals import not_offered, wrong

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
          "tool": "tool"}  # fmt: skip


class Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None


class Turn(msgspec.Struct):
    role: str
    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None


def text_of(content: str | Sequence[Part] | None, where: str) -> str:
    """The text of a message.

    Raises:
        Refusal: it holds something else.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.text is None:
            raise not_offered(f"{where}: {part.type}", "models here read text only", "messages")
    return "\n".join(part.text or "" for part in content)


def messages_of(turns: Sequence[Turn]) -> list[Message]:
    """Raises Refusal where a role is unknown, or a content cannot be read."""
    if not turns:
        raise wrong("messages", "messages: the conversation is empty")
    out: list[Message] = []
    for i, turn in enumerate(turns):
        where = f"messages[{i}]"
        if turn.role not in _ROLES:
            raise wrong(f"{where}.role", f"{where}: unknown role {turn.role!r}")
        thought = turn.reasoning_content or turn.reasoning or ""
        out.append(Message(_ROLES[turn.role], text_of(turn.content, where), thought))
    return out

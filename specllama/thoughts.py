"""Replies with thoughts, however a model writes them, read as ``<think>Hm.</think>Yes.``

- gpt-oss answers in channels ("harmony"): a reply is several messages, the last one the answer,
  ``<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.``
- Gemma 4 writes ``<|channel>thought`` and ``<channel|>`` around its thoughts.
- Where the prompt ends in ``<think>``, the reply lacks it.

The templates of the first two get the answers alone; other templates cut replies themselves.
"""

from __future__ import annotations

import re
from typing import Literal, Protocol

THINK, UNTHINK = "<think>", "</think>"
_START, _CHANNEL, _MESSAGE, _END = b"<|start|>", b"<|channel|>", b"<|message|>", b"<|end|>"
_HEADER = re.compile(r"<\|channel\|>[^<]*<\|message\|>")
_OPEN_AT_END = re.compile(rf"{THINK}\s*$")
# what a reply begins with, stands between thoughts and answer, and begins an answer without any
_MARKERS = {
    "harmony": (
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        "<|channel|>final<|message|>",
    ),
    "gemma": ("<|channel>thought\n", "<channel|>", ""),
}


class Reader(Protocol):
    """Takes the bytes of one token at a time and returns those to be shown."""

    def feed(self, piece: bytes) -> bytes: ...

    def finish(self) -> bytes:
        """What was held back."""
        ...


def style(template: str | None) -> Literal["harmony", "gemma"] | None:
    """How a model with this chat template marks thoughts; None: the common way, or not at all."""
    if template is None:
        return None
    if "<|channel|>" in template and "<|message|>" in template:
        return "harmony"
    return "gemma" if "<|channel>" in template and "<channel|>" in template else None


def answer(reply: str) -> str:
    """A reply without its thoughts."""
    if reply.startswith(THINK):
        reply = reply.partition(UNTHINK)[2].lstrip("\n")
    return _HEADER.split(reply)[-1]


def begun(template: str | None, prompt: str, reply: str) -> list[tuple[str, bool]]:
    """A reply to be continued, as the model wrote it after a prompt.

    Returns (text, whether it is the model's own).
    """
    if opened := _OPEN_AT_END.search(prompt):
        if not reply or reply.startswith(THINK):
            return [(reply.removeprefix(opened[0]).removeprefix(THINK), True)]
        return [("" if UNTHINK in reply else f"{UNTHINK}\n\n", False), (reply, True)]
    kind = style(template)
    if kind is None or not reply:
        return [(reply, True)]
    first, between, alone = _MARKERS[kind]
    if not reply.startswith(THINK):
        return [(alone, False), (reply, True)]
    thoughts, closed, _ = reply.removeprefix(THINK).partition(UNTHINK)
    parts = [(first, False), (thoughts, True)]
    return [*parts, (between, False), (answer(reply), True)] if closed else parts


def reader(template: str | None, prompt: str, prefix: str) -> Reader | None:
    """How to read a reply; None if it is shown as it is.

    Args:
        prompt: text of the prompt, or its end.
        prefix: the beginning of the reply, when it is continued.
    """
    kind = style(template)
    if kind == "harmony":
        return Channels(prefix)
    if kind == "gemma":
        return Tagged()
    opened = _OPEN_AT_END.search(prompt)
    return Opened(opened[0].encode()) if opened else None


class Opened:
    """A reply that begins inside its thoughts: the tag comes with the first token."""

    def __init__(self, tag: bytes) -> None:
        self._tag = tag

    def feed(self, piece: bytes) -> bytes:
        tag, self._tag = self._tag, b""
        return tag + piece

    def finish(self) -> bytes:
        return b""


class Tagged:
    """Gemma 4's tags; the rest of the line after the first one names the channel."""

    def __init__(self) -> None:
        self._header: bytes | None = None

    def feed(self, piece: bytes) -> bytes:
        if piece == b"<|channel>":
            self._header = b""
            return THINK.encode()
        if piece == b"<channel|>":
            self._header = None
            return f"{UNTHINK}\n".encode()
        if self._header is None:
            return piece
        name, newline, rest = (self._header + piece).partition(b"\n")
        self._header = None if newline else name
        return rest

    def finish(self) -> bytes:
        return b""


class Channels:
    """gpt-oss's channels.

    Messages to tools count as thoughts; thoughts that come after an answer are left out.

    Args:
        prefix: the beginning of the reply, when it is continued.
    """

    def __init__(self, prefix: str = "") -> None:
        self._thinking = prefix.startswith(THINK) and UNTHINK not in prefix
        self._answered = bool(prefix) and not self._thinking
        self._header: bytes | None = None if prefix else b""  # None inside a message
        self._bare = not prefix  # no message began yet
        self._silent = False

    def feed(self, piece: bytes) -> bytes:
        if piece in (_START, _END):
            self._header = b""
        elif piece == _CHANNEL:
            self._header = (self._header or b"") + piece
        elif piece == _MESSAGE:
            return self._open(self._header or b"")
        elif self._header is not None:
            self._header += piece
        elif not self._silent:
            return piece
        return b""

    def finish(self) -> bytes:
        """The whole of a reply in which no message ever began."""
        return (self._header or b"") if self._bare else b""

    def _open(self, header: bytes) -> bytes:
        """A message begins: what separates it from the one before."""
        thoughts = _CHANNEL + b"analysis" in header or b" to=" in header
        before = self._thinking, self._answered
        self._header, self._bare = None, False
        self._silent = thoughts and self._answered
        if self._silent:
            return b""
        self._thinking, self._answered = thoughts, not thoughts
        if thoughts:
            return b"\n" if before[0] else THINK.encode()
        if before[0]:
            return f"{UNTHINK}\n".encode()
        return b"\n\n" if before[1] else b""

"""gpt-oss's channels ("harmony"): a reply is several messages, and one of them is the answer.

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.

People see it like every other reply with thoughts, ``<think>Hm.</think>`` and the answer below; the
template is given the answers alone.
"""

from __future__ import annotations

import re

THINK, UNTHINK = "<think>", "</think>"
_START, _CHANNEL, _MESSAGE, _END = b"<|start|>", b"<|channel|>", b"<|message|>", b"<|end|>"
_ANALYSIS = "<|channel|>analysis<|message|>"
_FINAL = "<|channel|>final<|message|>"
_NEXT = "<|end|><|start|>assistant"
_HEADER = re.compile(r"<\|channel\|>[^<]*<\|message\|>")


def has_channels(template: str | None) -> bool:
    """Whether a model with this chat template answers in channels."""
    return template is not None and "<|channel|>" in template and "<|message|>" in template


def answer(reply: str) -> str:
    """What a reply says when its thoughts are left out."""
    _, thought, rest = reply.partition(THINK) if reply.startswith(THINK) else ("", "", reply)
    text = rest.partition(UNTHINK)[2].lstrip("\n") if thought else rest
    return _HEADER.split(text)[-1]


def begun(reply: str) -> list[tuple[str, bool]]:
    """A reply to be continued as the model wrote it: (text, whether it is the model's own)."""
    if not reply:
        return []
    if not reply.startswith(THINK):
        return [(_FINAL, False), (reply, True)]
    thoughts, closed, _ = reply.removeprefix(THINK).partition(UNTHINK)
    parts = [(_ANALYSIS, False), (thoughts, True)]
    return [*parts, (_NEXT + _FINAL, False), (answer(reply), True)] if closed else parts


class Channels:
    """Takes the bytes of one token at a time and returns those to be shown.

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
        """What was held back of a reply in which no message ever began."""
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

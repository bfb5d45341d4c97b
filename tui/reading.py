"""Reading a reply as it arrives: thoughts apart from text, and text unfit for Markdown."""

from __future__ import annotations

from markdown_it import MarkdownIt

OPEN, CLOSE = "<think>", "</think>"
NESTING = 12
PLAIN_CHARS = 120_000
PLAIN_LINE = 20_000
PLAIN_PIPES = 900
DEEP_INDENT = " " * 40
DEEP_WEIGHT = 20  # a line indented this deeply costs about as much as this many table cells


def parser() -> MarkdownIt:
    """Markdown as Textual reads it, made safe against bombs: shallow nesting, HTML as text."""
    return MarkdownIt("gfm-like", {"maxNesting": NESTING, "html": False})


class PlainGuard:
    """Says when a reply should be shown as plain text: each table cell becomes a widget, and a
    long list or a text of megabytes would be parsed again and again."""

    def __init__(self) -> None:
        self._chars = self._pipes = self._line = 0

    def feed(self, piece: str) -> bool:
        self._chars += len(piece)
        self._pipes += piece.count("|") + DEEP_WEIGHT * piece.count(DEEP_INDENT)
        head, newline, tail = piece.rpartition("\n")
        if newline:
            longest = max(map(len, head.split("\n")), default=0)
            self._line = max(self._line + longest if longest else 0, len(tail))
        else:
            self._line += len(tail)
        return self._chars > PLAIN_CHARS or self._line > PLAIN_LINE or self._pipes > PLAIN_PIPES


class ThoughtSplitter:
    """Splits a stream into (is_thought, piece). Only a reply that begins with <think> has
    thoughts; tags may arrive in pieces, and a reply that ends inside its thoughts has no text."""

    def __init__(self) -> None:
        self._held = ""
        self._state = "start"

    @property
    def thinking(self) -> bool:
        return self._state == "thinking"

    def feed(self, piece: str) -> list[tuple[bool, str]]:
        self._held += piece
        if self._state == "start":
            lead = self._held.lstrip()
            if OPEN.startswith(lead[: len(OPEN)]) and len(lead) < len(OPEN):
                return []
            if lead.startswith(OPEN):
                self._state = "thinking"
                self._held = lead[len(OPEN) :]
            else:
                self._state = "text"
        out: list[tuple[bool, str]] = []
        if self._state == "thinking":
            at = self._held.find(CLOSE)
            if at < 0:
                keep = _possible_tag(self._held)
                ready = self._held[: len(self._held) - keep]
                self._held = self._held[len(ready) :]
                return [(True, ready)] if ready else []
            if at:
                out.append((True, self._held[:at]))
            self._held = self._held[at + len(CLOSE) :]
            self._state = "between"
        if self._state == "between":
            self._held = self._held.lstrip("\n")
            if self._held:
                self._state = "text"
        if self._state == "text" and self._held:
            out.append((False, self._held))
            self._held = ""
        return out

    def finish(self) -> list[tuple[bool, str]]:
        held, self._held = self._held, ""
        return [(self.thinking, held)] if held else []


def _possible_tag(text: str) -> int:
    """Length of the longest tail of the text that begins the closing tag."""
    for n in range(min(len(CLOSE) - 1, len(text)), 0, -1):
        if CLOSE.startswith(text[-n:]):
            return n
    return 0


def split_thoughts(text: str) -> tuple[str, str]:
    splitter = ThoughtSplitter()
    parts = [*splitter.feed(text), *splitter.finish()]
    thoughts = "".join(piece for is_thought, piece in parts if is_thought)
    return thoughts, "".join(piece for is_thought, piece in parts if not is_thought)


def code_blocks(text: str) -> list[str]:
    """The contents of the fenced blocks, last one first; an open fence counts to the end."""
    blocks = [token.content.rstrip("\n") for token in parser().parse(text) if token.type == "fence"]
    return blocks[::-1]

"""The parser of the Markdown of replies, the test for text that is unfit for it, blocks of code."""

from __future__ import annotations

from functools import cache

from markdown_it import MarkdownIt

NESTING = 12
PLAIN_CHARS = 120_000
PLAIN_LINE = 20_000
PLAIN_PIPES = 900
DEEP_INDENT = " " * 40
DEEP_WEIGHT = 20  # a line indented this deeply costs about as much as this many table cells


@cache
def parser() -> MarkdownIt:
    """Return a parser of Markdown as Textual reads it, made safe against bombs: shallow nesting,
    HTML as text. Only what names its protocol is a link: main.py and README.md are files."""
    made = MarkdownIt("gfm-like", {"maxNesting": NESTING, "html": False})
    assert made.linkify is not None
    made.linkify.set({"fuzzy_link": False, "fuzzy_email": False, "fuzzy_ip": False})
    return made


class PlainGuard:
    """The test for replies to show as plain text: each table cell becomes a widget, and a long list
    or a text of megabytes would be parsed again and again."""

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


def code_blocks(text: str) -> list[str]:
    """Return the contents of the fenced blocks, last one first; an open fence counts to the end."""
    blocks = [token.content.rstrip("\n") for token in parser().parse(text) if token.type == "fence"]
    return blocks[::-1]

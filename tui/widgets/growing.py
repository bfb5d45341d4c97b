"""Markdown of a reply as it arrives: text unfit for it, blocks of code, and lists that grow.

Textual sets a list up anew for each added piece.
"""

from __future__ import annotations

from functools import cache
from itertools import islice
from typing import cast

from markdown_it import MarkdownIt
from textual.widget import Widget
from textual.widgets import Markdown
from textual.widgets._markdown import (
    MarkdownBlock,
    MarkdownBulletList,
    MarkdownListItem,
    MarkdownOrderedList,
    MarkdownParagraph,
)

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


class GrowingBullets(MarkdownBulletList):
    async def _update_from_block(self, block: MarkdownBlock) -> None:
        if not await grown(self, block):
            await super()._update_from_block(block)


class GrowingNumbers(MarkdownOrderedList):
    async def _update_from_block(self, block: MarkdownBlock) -> None:
        if not await grown(self, block):
            await super()._update_from_block(block)


class GrowingMarkdown(Markdown):
    """A widget that is made empty and then appended to."""

    BLOCKS: dict[str, type[MarkdownBlock]] = {  # noqa: RUF012
        **Markdown.BLOCKS,
        "bullet_list_open": GrowingBullets,
        "ordered_list_open": GrowingNumbers,
    }


async def grown(shown: MarkdownBlock, block: MarkdownBlock) -> bool:
    """Show the items of ``block`` in a list that has all but the last of them; return whether that
    was possible without setting it up anew."""
    items = [item for item in block._blocks if isinstance(item, MarkdownListItem)]
    rows = list(shown.children)
    if type(block) is not type(shown) or not rows or len(items) < len(rows):
        return False
    first = items[0].bullet
    if first.isdecimal():  # the room for numbers is that of the longest
        last = [int(first) + n - 1 for n in (len(rows), len(items))]
        if len(str(last[0])) < len(str(last[1])):
            return False
    read = items[len(rows) - 1]._blocks
    body = rows[-1].children[-1]  # behind the bullet
    known = [child for child in body.children if isinstance(child, MarkdownBlock)]
    if len(read) < len(known):
        return False
    if known:
        await follow(known[-1], read[len(known) - 1])
    new = list(islice(block.compose(), len(rows), None))
    await body.mount_all(read[len(known) :])
    await shown.mount_all(new)
    shown._copy_context(block)
    return True


async def follow(shown: MarkdownBlock, block: MarkdownBlock) -> None:
    """Show the content of ``block`` in a block of an item, or put it in its place."""
    if isinstance(shown, MarkdownParagraph) and isinstance(block, MarkdownParagraph):
        await shown._update_from_block(block)
    elif not await grown(shown, block):
        await cast(Widget, shown.parent).mount(block, after=shown)
        await shown.remove()

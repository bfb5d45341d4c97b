"""Markdown that grows at its end and leaves the rest as it is.

It is laid out again only where it takes more room than before. Textual sets up a list anew for each
piece that is added to its last item, and lays the whole conversation out for each word.
"""

from __future__ import annotations

from itertools import islice
from typing import cast

from textual.content import Content
from textual.css.styles import RulesMap
from textual.geometry import Size
from textual.reactive import Reactive
from textual.widget import Widget
from textual.widgets import Markdown
from textual.widgets._markdown import (
    MarkdownBlock,
    MarkdownBulletList,
    MarkdownListItem,
    MarkdownOrderedList,
    MarkdownParagraph,
)

from specllama.tui.reading import parser


class GrowingParagraph(MarkdownParagraph):
    virtual_size = Reactive(Size(0, 0), repaint=False)

    def set_content(self, content: Content) -> None:
        # by what it was given last: asking where it is would lay everything out
        width, height = self.outer_size - self.gutter.totals
        fits = width > 0 and content.get_height(cast(RulesMap, self.styles), width) == height
        self._content = content
        self.update(content, layout=not fits)


class GrowingBullets(MarkdownBulletList):
    virtual_size = Reactive(Size(0, 0), repaint=False)

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        if not await grown(self, block):
            await super()._update_from_block(block)


class GrowingNumbers(MarkdownOrderedList):
    virtual_size = Reactive(Size(0, 0), repaint=False)

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        if not await grown(self, block):
            await super()._update_from_block(block)


class GrowingMarkdown(Markdown):
    """A widget that is made empty and then appended to."""

    virtual_size = Reactive(Size(0, 0), repaint=False)

    BLOCKS: dict[str, type[MarkdownBlock]] = {  # noqa: RUF012
        **Markdown.BLOCKS,
        "paragraph_open": GrowingParagraph,
        "bullet_list_open": GrowingBullets,
        "ordered_list_open": GrowingNumbers,
    }

    def __init__(self) -> None:
        super().__init__(parser_factory=parser, open_links=False)


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
    said = items[len(rows) - 1]._blocks
    body = rows[-1].children[-1]  # behind the bullet
    known = [child for child in body.children if isinstance(child, MarkdownBlock)]
    if len(said) < len(known):
        return False
    if known:
        await follow(known[-1], said[len(known) - 1])
    new = list(islice(block.compose(), len(rows), None))
    await body.mount_all(said[len(known) :])
    await shown.mount_all(new)
    shown._copy_context(block)
    return True


async def follow(shown: MarkdownBlock, block: MarkdownBlock) -> None:
    """Show the content of ``block`` in a block of an item, or put it in its place."""
    if isinstance(shown, GrowingParagraph) and isinstance(block, GrowingParagraph):
        await shown._update_from_block(block)
    elif not await grown(shown, block):
        parent = shown.parent
        assert isinstance(parent, Widget)
        await parent.mount(block, after=shown)
        await shown.remove()

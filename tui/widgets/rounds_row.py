"""The row of rounds: a group of glyphs for each pass of the target, and their meaning.

The newest is at the right of the groups:
ᵈ■■■+ ■□·+ ⁿ■■■■■+ ++        ■ kept  □ refused  · unread  + target
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from textual.content import Content
from textual.widget import Widget

from specllama.events import RoundDone
from specllama.tui.record import glyph_run
from specllama.tui.themes import Glyphs, Ink
from specllama.tui.widgets.inked import Inked

KEEP = 256
RECENT = 32  # rounds whose letters are explained


def legend(glyphs: Glyphs, ink: Ink, sources: Iterable[str]) -> list[tuple[str, str, str]]:
    """List the signs of the row of rounds as it shows these sources: sign, style, meaning."""
    names = dict.fromkeys(part for source in sources for part in source.split("+"))
    return [
        *((glyphs.source(name), ink.source(name), glyphs.label(name)) for name in names),
        (glyphs.accepted, ink.source(next(iter(names), "draft")), "kept"),
        (glyphs.rejected, ink.rejected, "refused"),
        (glyphs.untested, ink.muted, "unread"),
        (glyphs.target, ink.target, "target"),
    ]


def _round_parts(done: RoundDone, before: RoundDone | None, widget: Inked) -> list[tuple[str, str]]:
    """Return (text, style) parts of one round. The source's letter stands where the source
    changes."""
    glyphs, ink = widget.glyphs, widget.ink
    if not done.drafted:
        return [(glyphs.target, ink.target)]
    parts: list[tuple[str, str]] = []
    style = ink.source(done.source)
    styles = {"accepted": style, "rejected": ink.rejected, "target": ink.target}
    if before is None or before.source != done.source:
        parts.append((glyphs.source(done.source), style))
    for kind, run in glyph_run(done, glyphs):
        parts.append((run, styles.get(kind, ink.muted)))
    return parts


class RoundsRow(Inked, Widget):
    DEFAULT_CSS = """
    RoundsRow { height: 1; padding: 0 1; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._rounds: deque[RoundDone] = deque(maxlen=KEEP)

    def clear(self) -> None:
        self._rounds.clear()
        self.refresh()

    def extend(self, rounds: Iterable[RoundDone]) -> None:
        """Add rounds; the next ``refresh`` shows them."""
        self._rounds.extend(rounds)

    def render(self) -> Content:
        width = self.content_size.width
        if not self._rounds or width < 10:
            return Content("")
        meanings = self._legend(width // 2)
        room = width - meanings.cell_length - 2
        groups: list[list[tuple[str, str]]] = []
        used = 0
        rounds = list(self._rounds)
        for i in range(len(rounds) - 1, -1, -1):
            done, before = rounds[i], rounds[i - 1] if i else None
            parts = _round_parts(done, before, self)
            if done.drafted or (before is not None and before.drafted):
                parts.insert(0, (" ", ""))
            need = sum(len(text) for text, _ in parts)
            # Keep two cells: the leftmost group gets its letter when the one before it is cut off.
            if used + need > room - 2:
                break
            groups.append(parts)
            used += need
        if not groups:
            return meanings
        first = rounds[len(rounds) - len(groups)]
        groups[-1] = _round_parts(first, None, self)
        content = Content.assemble(*(part for parts in reversed(groups) for part in parts))
        gap = width - content.cell_length - meanings.cell_length
        return Content.assemble(content, " " * gap, meanings)

    def _legend(self, room: int) -> Content:
        """Return the meaning of the signs: of all if there is room, else of the guesses' signs."""
        sources = [done.source for done in list(self._rounds)[-RECENT:] if done.drafted]
        entries = legend(self.glyphs, self.ink, sources)
        shown = Content("")
        for some, gap in ((entries, "  "), (entries[-4:], "  "), (entries[-4:-1], " ")):
            pairs = [
                ((sign, style), (f" {word}{gap}", self.ink.muted)) for sign, style, word in some
            ]
            shown = Content.assemble(*(part for pair in pairs for part in pair)).rstrip()
            if shown.cell_length <= room:
                break
        return shown

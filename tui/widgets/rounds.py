"""The row of rounds: one group of glyphs per round, newest at the right.

ᵈ■■■+ ■□□+ ⁿ■■■■■+ ++        kept ▃▅▁█▆
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from textual.content import Content
from textual.widget import Widget

from specllama.events import RoundDone
from specllama.tui.record import depth_of, glyph_run
from specllama.tui.widgets.base import Inked

KEEP = 256
LABEL = "kept "  # of the bars: a share


def round_parts(
    done: RoundDone, before: RoundDone | None, widget: Inked, *, lead: bool = False
) -> list[tuple[str, str]]:
    """(text, style) parts of one round. The source's letter stands where the source changes."""
    glyphs, ink = widget.glyphs, widget.ink
    if not done.drafted:
        return [(glyphs.target, ink.target)]
    parts: list[tuple[str, str]] = []
    style = ink.source(done.source)
    if lead or before is None or before.source != done.source:
        parts.append((glyphs.source(done.source), style))
    for kind, run in glyph_run(done, glyphs.accepted, glyphs.rejected, glyphs.target):
        parts.append(
            (run, {"accepted": style, "rejected": ink.rejected, "target": ink.target}[kind])
        )
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
        """Shown with the next ``refresh``."""
        self._rounds.extend(rounds)

    def render(self) -> Content:
        width = self.content_size.width
        if not self._rounds or width < 10:
            return Content("")
        spark = self._spark(min(24, width // 4)) if width >= 70 else ""
        room = width - (len(LABEL) + len(spark) + 2 if spark else 0)
        groups: list[list[tuple[str, str]]] = []
        used = 0
        rounds = list(self._rounds)
        for i in range(len(rounds) - 1, -1, -1):
            done, before = rounds[i], rounds[i - 1] if i else None
            parts = round_parts(done, before, self)
            if done.drafted or (before is not None and before.drafted):
                parts.insert(0, (" ", ""))
            need = sum(len(text) for text, _ in parts)
            # Keep two cells: the leftmost group gets its letter when the one before it is cut off.
            if used + need > room - 2:
                break
            groups.append(parts)
            used += need
        if not groups:
            return Content("")
        first = rounds[len(rounds) - len(groups)]
        groups[-1] = round_parts(first, None, self)
        flat = [part for parts in reversed(groups) for part in parts]
        content = Content.assemble(*flat)
        if spark:
            pad = max(1, width - content.cell_length - len(LABEL) - len(spark))
            label = (LABEL, self.ink.muted)
            content = Content.assemble(content, " " * pad, label, (spark, self.ink.accent))
        return content

    def _spark(self, width: int) -> str:
        """Accepted share of each recent round; plain rounds have none and are left out."""
        shares = [
            done.accepted / max(depth_of(done)) for done in list(self._rounds) if done.drafted
        ]
        return self.glyphs.spark(shares[-width:])

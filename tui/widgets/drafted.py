"""A reply as it was drafted: each token with its source, the refused ones, the target's own.

Accepted tokens are underlined in their source's colour with the source's letter in front, the
target's own tokens are bold, refused drafts are struck out. While the reply streams, ghosts fade
with the rounds; afterwards they are shown on request.

And the row of rounds: a group of glyphs for each pass of the target, and their meaning, the newest
at the right of the groups:
ᵈ■■■+ ■□·+ ⁿ■■■■■+ ++        ■ kept  □ refused  · unread  + target
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from specllama.events import RoundDone
from specllama.text import sanitize, whole
from specllama.tui.record import fate_of, glyph_run, is_special
from specllama.tui.themes import Glyphs, Ink
from specllama.tui.widgets.inked import Inked

BLOCK_ROUNDS = 24
FADE = (2, 5, 9)  # ages in rounds at which a ghost gets fainter, fainter still, and goes


def written(done: RoundDone, ink: Ink, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Draw the tokens of a round: its guesses underlined in their source's color, then the target's
    own token."""
    kept = f"underline {ink.source(done.source)}"
    styles = (kept if i < done.accepted else ink.target for i in range(len(texts)))
    return [
        (sanitize(text), ink.muted if is_special(text) else style)
        for text, style in zip(texts, styles, strict=True)
    ]


class DraftedView(Inked, Vertical):
    """A view of rounds, drawn in blocks; only the last block is drawn again while streaming."""

    def __init__(self, *, ghosts: bool = False) -> None:
        super().__init__()
        self.ghosts = ghosts
        self.live = False
        self._blocks: list[tuple[RoundDone | None, list[RoundDone]]] = [(None, [])]
        """Rounds, and the one before them."""

    def compose(self) -> ComposeResult:
        yield from map(self._drawn, range(len(self._blocks)))

    def load(self, rounds: list[RoundDone]) -> None:
        """Add all rounds so far, before mounting."""
        for done in rounds:
            self._add(done)

    async def extend(self, rounds: list[RoundDone]) -> None:
        known = len(self._blocks)
        for done in rounds:
            self._add(done)
        drawn = list(self.query(Static))
        # Ghosts in the previous block may still have to fade.
        for i in range(max(0, known - 2), known):
            drawn[i].update(self._draw(i))
        await self.mount_all(map(self._drawn, range(known, len(self._blocks))))

    def _add(self, done: RoundDone) -> None:
        _, block = self._blocks[-1]
        # Blocks are separate lines on the screen, so one may only end where the text breaks.
        if len(block) >= BLOCK_ROUNDS and "".join(block[-1].emitted_text).endswith("\n"):
            self._blocks.append((block[-1], [done]))
        else:
            block.append(done)

    def _drawn(self, number: int) -> Static:
        return Static(self._draw(number), markup=False)

    def _draw(self, number: int) -> Content:
        (before, block), (_, last) = self._blocks[number], self._blocks[-1]
        newest = last[-1].index if last else 0
        parts: list[tuple[str, str]] = []
        texts = iter(whole(text for done in block for text in done.emitted_text))
        for done in block:
            own = list(islice(texts, len(done.emitted_text)))
            parts.extend(self._round(done, before, newest - done.index, own))
            before = done
        if block is not last and parts:
            parts[-1] = (parts[-1][0].removesuffix("\n"), parts[-1][1])
        return Content.assemble(*parts)

    def _round(
        self, done: RoundDone, before: RoundDone | None, age: int, texts: Sequence[str]
    ) -> list[tuple[str, str]]:
        parts = written(done, self.ink, texts)
        accepted = parts[: done.accepted]
        ghost = self._ghost_style(age)
        if ghost is not None and (refused := self._refused(done)):
            parts.insert(len(accepted), (refused, ghost))
        if accepted and (before is None or before.source != done.source):
            # The letter stands before a word, not at the end of the line before it.
            words = (i for i, (text, _) in enumerate(accepted) if text.strip("\n"))
            at = next(words, len(accepted) - 1)
            text, style = parts[at]
            rest = text.lstrip("\n")
            letter = self.glyphs.source(done.source), self.ink.source(done.source)
            parts[at : at + 1] = [(text.removesuffix(rest), ""), letter, (rest, style)]
        return parts

    def _ghost_style(self, age: int) -> str | None:
        if not self.live:
            return self.ink.ghosts[1] if self.ghosts else None
        fading = zip(FADE, self.ink.ghosts, strict=True)
        return next((style for limit, style in fading if age < limit), None)

    def _refused(self, done: RoundDone) -> str:
        """Return the first refused token and the untested tail after it, as one ghost, on one
        line."""
        pieces = zip(done.drafted_text, fate_of(done), strict=True)
        text = "".join(whole(piece for piece, fate in pieces if fate != "accepted"))
        return sanitize(text).replace("\n", "⏎")


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
    parts += [(run, styles.get(kind, ink.muted)) for kind, run in glyph_run(done, glyphs)]
    return parts


class RoundsRow(Inked, Widget):
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

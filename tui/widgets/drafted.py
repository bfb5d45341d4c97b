"""A reply as it was drafted: each token with its source, the refused ones, the target's own.

Accepted tokens are underlined in their source's colour with the source's letter in front, the
target's own tokens are bold, refused drafts are struck out. While the reply streams, ghosts fade
with the rounds; afterwards they are shown on request.
"""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from specllama.events import RoundDone
from specllama.text import sanitize
from specllama.tui.record import fate_of, is_special
from specllama.tui.widgets.inked import Inked

BLOCK_ROUNDS = 24
FADE = (2, 5, 9)  # ages in rounds at which a ghost gets fainter, fainter still, and goes


class DraftedView(Inked, Vertical):
    """A view of rounds, drawn in blocks; only the last block is drawn again while streaming."""

    DEFAULT_CSS = """
    DraftedView { height: auto; }
    DraftedView > Static { height: auto; width: 1fr; }
    """

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
        for done in block:
            parts.extend(self._round(done, before, newest - done.index))
            before = done
        if block is not last and parts:
            parts[-1] = (parts[-1][0].removesuffix("\n"), parts[-1][1])
        return Content.assemble(*parts)

    def _round(self, done: RoundDone, before: RoundDone | None, age: int) -> list[tuple[str, str]]:
        ink = self.ink
        parts: list[tuple[str, str]] = []
        style = f"underline {ink.source(done.source)}"
        texts = [sanitize(text) for text in done.emitted_text]
        accepted, target = texts[: done.accepted], texts[done.accepted :]
        if accepted and (before is None or before.source != done.source):
            # The letter stands before a word, not at the end of the line before it.
            while len(accepted) > 1 and not accepted[0].strip("\n"):
                parts.append((accepted.pop(0), ""))
            rest = accepted[0].lstrip("\n")
            parts.append((accepted[0][: len(accepted[0]) - len(rest)], ""))
            parts.append((self.glyphs.source(done.source), ink.source(done.source)))
            accepted[0] = rest
        parts += [(text, ink.muted if is_special(text) else style) for text in accepted]
        ghost = self._ghost_style(age)
        if ghost is not None and (refused := self._refused(done)):
            parts.append((refused, ghost))
        parts += [(text, ink.muted if is_special(text) else ink.target) for text in target]
        return parts

    def _ghost_style(self, age: int) -> str | None:
        if self.ghosts and not self.live:
            return self.ink.ghosts[1]
        if not self.live:
            return None
        for limit, style in zip(FADE, self.ink.ghosts, strict=True):
            if age < limit:
                return style
        return None

    def _refused(self, done: RoundDone) -> str:
        """Return the first refused token and the untested tail after it, as one ghost, on one
        line."""
        fates = fate_of(done)
        text = "".join(
            piece
            for piece, fate in zip(done.drafted_text, fates, strict=True)
            if fate != "accepted"
        )
        return sanitize(text).replace("\n", "⏎")

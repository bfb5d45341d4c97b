"""One run of a race on its true timestamps: the text so far, a clock, what came of it."""

from __future__ import annotations

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from specllama.events import RoundDone
from specllama.stats import SpecStats
from specllama.text import sanitize
from specllama.tui.race import Run
from specllama.tui.record import is_special
from specllama.tui.widgets.base import Inked
from specllama.tui.widgets.stats_strip import duration, rate
from specllama.tui.widgets.walk import line_count


class RaceTrack(Inked, Widget):
    """Draws ``run`` as it stood ``seconds`` after its request; the last two lines are figures."""

    DEFAULT_CSS = """
    RaceTrack { width: 1fr; height: 1fr; padding: 0 1; }
    """

    seconds: reactive[float] = reactive(0.0, layout=False)

    def __init__(self, name: str, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.title = name
        self.run: Run | None = None

    def show(self, run: Run | None, seconds: float) -> None:
        self.run = run
        self.seconds = seconds
        self.refresh()

    def render(self) -> Content:
        ink, size, run = self.ink, self.content_size, self.run
        head = Content.assemble((self.title, "bold $primary"))
        if run is None or not run.rounds or size.height < 4:
            return head
        rounds = run.until(self.seconds)
        parts: list[tuple[str, str]] = []
        for done in rounds:
            style = ink.source(done.source)
            for i, text in enumerate(done.emitted_text):
                shown = "" if is_special(text) else sanitize(text)
                parts.append((shown, style if i < done.accepted else ""))
        parts = _tail(parts, size.width, size.height - 3)
        if run.end_s > self.seconds:
            parts.append((self.glyphs.cursor, ink.accent))
        said = Content.assemble(*parts)
        used = line_count(said.plain, size.width)
        blank = "\n" * max(1, size.height - 2 - used)
        return Content.assemble(head, "\n", said, blank, self._figures(run, rounds))

    def _figures(self, run: Run, rounds: list[RoundDone]) -> Content:
        ink, dot = self.ink, f" {self.glyphs.dot} "
        over = self.seconds >= run.end_s
        now = min(self.seconds, run.end_s)
        stats = SpecStats()
        for done in rounds:
            stats.observe(done)
        more = stats.emitted - 1
        speed = more / (now - run.ttft_s) if now > run.ttft_s and more > 0 else None
        first = f"{dot}{stats.emitted} tokens{dot}{rate(speed)} tok/s"
        second = f"TTFT {duration(1000 * run.ttft_s)}" if rounds else ""
        if stats.drafted:
            second += f"{dot}{stats.accepted} kept{dot}{stats.rejected} rejected"
        return Content.assemble(
            (f"{now:.2f} s", ink.strong if over else ""),
            (first, ink.muted),
            "\n",
            (second, ink.muted),
        )


def _tail(parts: list[tuple[str, str]], width: int, lines: int) -> list[tuple[str, str]]:
    """The newest parts that fit so many lines."""
    kept: list[tuple[str, str]] = []
    text = ""
    for part in reversed(parts):
        text = part[0] + text
        if line_count(text, width) > lines:
            break
        kept.append(part)
    return kept[::-1]

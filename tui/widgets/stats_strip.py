"""The strip below the conversation: the verdict on drafting in the shown reply, its figures.

Cells are dropped where the terminal is narrow; the most telling ones come first.
"""

from __future__ import annotations

from dataclasses import dataclass

from textual.content import Content
from textual.widget import Widget

from specllama.events import PrefillProgress
from specllama.figures import Figures
from specllama.rates import Payoff
from specllama.text import percent, rate, sanitize_line
from specllama.tui.advice import NO_GUESSES
from specllama.tui.record import Record
from specllama.tui.themes import Glyphs, Ink
from specllama.tui.widgets.inked import Inked
from specllama.verdict import brief

MEASURE = "F4 measures it"
FULL = 0.8  # of the context, from which on that is said


@dataclass(slots=True)
class StripState:
    """The strip's data, from the chat screen; ``record`` is of the shown reply."""

    record: Record | None = None
    busy: bool = False
    speculate: bool = True
    notice: str = ""  # of the engine
    used: int | None = 0  # tokens of the context; None where they were not counted
    n_ctx: int = 0
    on_full: str = "stop"
    prefill: PrefillProgress | None = None
    loading: str = ""
    guesses: bool = True  # something guesses new text
    demonstration: bool = False  # drafting is forced where it does not pay

    @property
    def figures(self) -> Figures | None:
        return None if self.record is None else self.record.figures()

    @property
    def verdict(self) -> Payoff | None:
        found = self.figures
        return None if found is None else found.verdict

    @property
    def filled(self) -> float:
        """The part of the context that is used, 0..1."""
        return (self.used or 0) / self.n_ctx if self.n_ctx else 0.0

    @property
    def loses(self) -> bool:
        """True if drafting is surely slower than plain decoding, yet still on."""
        return self.speculate and self.verdict is not None and self.verdict.answer == "slower"


def reading(progress: PrefillProgress, width: int, glyphs: Glyphs, ink: Ink) -> Content:
    """Draw how far a prompt is read: a bar, the tokens, and the seconds left if they fit."""
    done = progress.done / progress.total if progress.total else 1.0
    left_s = (progress.left_ms or 0.0) / 1e3
    parts = [
        f" reading the prompt: {progress.done:,} of {progress.total:,} tokens",
        *([f"about {left_s:.0f} s left"] * (left_s >= 1.0)),
        *([f"{progress.cached:,} were cached"] * bool(progress.cached)),
    ]
    while len(", ".join(parts)) + 6 > width and len(parts) > 1:
        del parts[-1]
    words = ", ".join(parts)
    full, rest = glyphs.meter(done, max(4, min(24, width - len(words) - 2)))
    return Content.assemble((full, ink.accent), (rest, ink.muted), (words, ink.muted))


def duration(ms: float | None) -> str:
    if ms is None:
        return "–"
    if ms < 10:
        return f"{ms:.1f} ms"
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"


class StatsStrip(Inked, Widget):
    def __init__(self, state: StripState, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.state = state

    def render(self) -> Content:
        """Draw the measurements at the left; at the right, the next action or a notice."""
        width = self.content_size.width
        if self.state.prefill is not None and self.state.busy:
            return reading(self.state.prefill, width, self.glyphs, self.ink)
        cells = self._cells()
        shortest = [min(cell.cell_length for cell in forms) for forms in cells[:2]]
        least = sum(n + 3 for n in shortest)  # the verdict and the speed stay
        fit = [one for one in self._notices() if one.cell_length <= width] or [Content("")]
        notice = next((one for one in fit if one.cell_length + least <= width), fit[-1])
        room = width - notice.cell_length - 3 if notice.plain else width
        gap = ("  ", "") if width < 100 else (" · ", self.ink.muted)
        line = Content("")
        after = sum(n + len(gap[0]) for n in shortest[1:])
        for forms in cells:
            for cell in forms:  # the longest that fits
                joined = Content.assemble(line, gap, cell) if line.plain else cell
                if joined.cell_length + after <= room:
                    line = joined
                    break
            after = 0
        return Content.assemble(line, " " * (width - line.cell_length - notice.cell_length), notice)

    def _cells(self) -> list[list[Content]]:
        """List the figures to show, the most telling first, each in forms that get shorter."""
        s, ink = self.state, self.ink
        figures, verdict = s.figures, s.verdict
        cells: list[list[Content]] = []
        idle = figures is not None and (verdict is None or not verdict.drafted)
        if idle and s.speculate and not s.guesses:
            forms = (NO_GUESSES, "No draft model: F6 chooses one", "no draft model")
            cells.append([Content.assemble((words, ink.muted)) for words in forms])
        elif verdict is not None:
            first = brief(verdict, MEASURE)
            leads = [first, first.partition(" (")[0], first.partition(":")[0]]
            style = f"bold {ink.verdict(verdict.answer)}"
            cells.append([Content.assemble((words, style)) for words in leads])
        if figures is not None and (speed := figures.tok_per_s) is not None:
            cells.append([Content.assemble((rate(speed), ink.strong), " tok/s")])
        if figures is not None and figures.engine:
            cells.append([Content(f"kept {figures.kept_words}")])
        elif verdict is not None and verdict.drafted:
            cells.append([Content(f"{percent(verdict.acceptance_rate)} kept")])
        if s.filled:
            cells.append([Content.assemble(("context ", ink.muted), percent(s.filled))])
        return cells

    def _notices(self) -> list[Content]:
        """Return one notice, in forms that get shorter."""
        s, ink, left = self.state, self.ink, max(0, self.state.n_ctx - (self.state.used or 0))
        then = "Ctrl+N new chat" if s.on_full == "stop" else "then the oldest turns leave"
        if s.loading:
            words, style = [sanitize_line(s.loading)], ink.muted
        elif s.filled >= FULL:
            more = ", F8 lets the oldest go" if s.on_full == "stop" else ""
            words = [f"{left} tokens of context left: {then}{more}", f"{left} tokens left: {then}"]
            style = ink.warn
        elif s.demonstration and s.speculate and s.record is not None:
            forced, then = "demonstration: drafting is forced on", ": F9 lets it decide"
            why = ", it does not pay for a model this small"
            short = "demonstration: forced on, F9 lets it decide"
            words = [forced + why + ": F9 decides", forced + then, short, "demonstration" + then]
            style = ink.warn
        elif not s.speculate:
            words, style = ["Drafting is off (F9 turns it on)", "F9 drafts"], ink.muted
        elif s.loses:
            words, style = ["F9 off"], ink.warn
        else:
            words, style = [sanitize_line(s.notice)], ink.muted
        return [Content.assemble((one, style)) for one in words]

"""The strip below the conversation: the figures of the last reply, and whether drafting paid.

Cells are dropped from the right when the terminal is narrow; the most telling ones come first.
"""

from __future__ import annotations

from dataclasses import dataclass

from textual.content import Content
from textual.widget import Widget

from specllama.events import Payoff, PrefillProgress
from specllama.replies.figures import ReplyFigures
from specllama.text import percent, rate, sanitize_line
from specllama.tui import legend
from specllama.tui.record import Record
from specllama.tui.widgets.base import Inked
from specllama.verdict import details, lead

MEASURE = "press F4 to measure"
RECENT = 32  # rounds whose letters are explained


@dataclass(slots=True)
class StripState:
    """Everything the strip shows, as the chat screen knows it; ``record`` is of the last reply."""

    record: Record | None = None
    busy: bool = False
    speculate: bool = True
    source: str = ""
    window: int | None = None
    reason: str = ""
    used: int | None = 0  # tokens of the context; None where they were not counted
    n_ctx: int = 0
    on_full: str = "stop"
    prefill: PrefillProgress | None = None
    loading: str = ""
    demonstration: bool = False  # drafting is forced where it does not pay

    def show(self, record: Record | None) -> None:
        """Another reply is the last that is shown."""
        self.record = record
        last = record.rounds[-1] if record is not None and record.rounds else None
        self.source = "" if last is None else last.source
        self.window = None if last is None else last.draft_max
        self.reason = "" if last is None else last.window_reason

    @property
    def figures(self) -> ReplyFigures | None:
        return None if self.record is None else self.record.figures()

    @property
    def verdict(self) -> Payoff | None:
        found = self.figures
        return None if found is None else found.verdict

    @property
    def filled(self) -> float | None:
        """The part of the context that is used, 0..1."""
        return self.used / self.n_ctx if self.n_ctx and self.used is not None else None

    @property
    def loses(self) -> bool:
        """Whether drafting is surely slower than plain decoding, yet still on."""
        return self.speculate and self.verdict is not None and self.verdict.answer == "slower"


def duration(ms: float | None) -> str:
    if ms is None:
        return "–"
    if ms < 10:
        return f"{ms:.1f} ms"
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"


def gigabytes(n: float) -> str:
    """A size in the largest unit that leaves something before the point."""
    if n >= 100_000_000:
        return f"{n / 1e9:.1f} GB"
    return f"{n / 1e6:.1f} MB" if n >= 100_000 else f"{n / 1e3:.0f} kB"


class StatsStrip(Inked, Widget):
    DEFAULT_CSS = """
    StatsStrip { height: 1; padding: 0 1; }
    """

    def __init__(self, state: StripState, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.state = state

    def render(self) -> Content:
        width = self.content_size.width
        if self.state.prefill is not None and self.state.busy:
            return self._prefill(width)
        gap = "   " if width >= 124 else "  "
        line = Content("")
        for forms in self._cells():
            for cell in forms:  # the longest that fits
                joined = Content.assemble(line, gap, cell) if line.plain else cell
                if joined.cell_length <= width:
                    line = joined
                    break
        return line

    def _cells(self) -> list[list[Content]]:
        """What is worth showing, the most telling first, each in forms that get shorter."""
        s, ink, glyphs = self.state, self.ink, self.glyphs
        figures, verdict = s.figures, s.verdict
        cells: list[list[Content]] = []
        if figures is not None and (speed := figures.tok_per_s) is not None:
            cells.append([Content.assemble((rate(speed), ink.strong), (" tok/s", ink.muted))])
        if s.speculate and verdict is not None:
            style = ink.verdict(verdict.answer)
            first = glyphs.text(lead(verdict, MEASURE))
            leads = [first, first.partition(":")[0], first.partition(" (")[0]]
            cells.append([Content.assemble((words, style)) for words in leads])
        elif figures is not None and figures.engine:
            kept = glyphs.text(figures.kept_words)
            cells.append([Content.assemble(("kept ", ink.muted), (kept, ""))])
        elif not s.speculate:
            cells.append([Content.assemble(("speculation off", ink.warn))])
        if (used := s.filled) is not None:
            style = ink.bad if used >= 0.95 else ink.warn if used >= 0.8 else ""
            full, rest = glyphs.meter(used, 6)
            count = f" {s.used}/{s.n_ctx}"
            bar = [(full, style or ink.accent), (rest, ink.muted), (count, style)]
            forms = [bar] if self.content_size.width >= 100 else []
            forms.append([(percent(used), style)])
            cells.append([Content.assemble(("ctx ", ink.muted), *form) for form in forms])
        if s.speculate and verdict is not None:
            cells += [[Content.assemble((words, ink.muted))] for words in details(verdict)]
        if figures is not None and figures.first is not None:
            took = duration(figures.first.total)
            cells.append([Content.assemble(("TTFT ", ink.muted), (took, ""))])
        depths = figures.depths[:8] if figures is not None and s.speculate else ()
        if bars := glyphs.spark([kept / drafted for kept, drafted in depths if drafted]):
            cells.append([Content.assemble(("by depth ", ink.muted), (bars, ink.accent))])
        if s.speculate and s.window is not None:
            cells.append([Content.assemble(("window ", ink.muted), (str(s.window), ""))])
        return cells

    def _prefill(self, width: int) -> Content:
        progress = self.state.prefill
        assert progress is not None
        done = progress.done / progress.total if progress.total else 1.0
        cached = f", {progress.cached} cached" if progress.cached else ""
        words = f" reading prompt {progress.done}/{progress.total}{cached}"
        full, rest = self.glyphs.meter(done, max(4, min(24, width - len(words) - 2)))
        return Content.assemble(
            (full, self.ink.accent), (rest, self.ink.muted), (words, self.ink.muted)
        )


class WhyLine(Inked, Widget):
    """One sentence: why the draft window is what it is, or that speculation loses here."""

    DEFAULT_CSS = """
    WhyLine { height: 1; padding: 0 1; }
    """

    def __init__(self, state: StripState, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.state = state

    @property
    def is_warning(self) -> bool:
        s = self.state
        return s.loses or (s.filled or 0.0) >= 0.8

    def render(self) -> Content:
        """The sentence, and at the right what the row of rounds shows, where there is room."""
        why, width = self._why(), self.content_size.width
        record = self.state.record
        if record is None or not record.rounds:
            return why
        sources = [done.source for done in record.rounds[-RECENT:] if done.drafted]
        entries = legend.rounds(self.glyphs, self.ink, sources)
        for shown in (entries, entries[-3:]):
            parts = [((sign, style), (f" {word}  ", self.ink.muted)) for sign, style, word in shown]
            line = Content.assemble(*(part for pair in parts for part in pair)).rstrip()
            gap = width - why.cell_length - line.cell_length
            if gap >= 4:
                return Content.assemble(why, " " * gap, line)
        return why

    def _why(self) -> Content:
        s, ink, glyphs = self.state, self.ink, self.glyphs
        if s.loading:
            return Content.assemble((sanitize_line(s.loading), ink.muted))
        if s.used is not None and (s.filled or 0.0) >= 0.8:
            then = (
                "then the reply stops: Ctrl+N new chat, F8 let the oldest go"
                if s.on_full == "stop"
                else "then the oldest turns leave the context"
            )
            left = max(0, s.n_ctx - s.used)
            return Content.assemble((f"{left} tokens of context left, {then}", ink.warn))
        if s.demonstration and s.speculate and s.record is not None:
            why = ", it does not pay for a model this small"
            why = why if self.content_size.width >= 100 else ""
            return Content.assemble(
                (f"demonstration: drafting is forced on{why}: F9 lets it decide", ink.warn)
            )
        if s.loses:
            return Content.assemble(("drafting loses here: F9 turns it off", ink.warn))
        if not s.speculate:
            return Content.assemble(("plain decoding by your choice: F9 turns it on", ink.muted))
        if not s.reason:
            return Content("")
        lead = f"{glyphs.label(s.source)}: " if s.source not in ("", "none") else ""
        return Content.assemble((lead, ink.source(s.source)), (sanitize_line(s.reason), ink.muted))

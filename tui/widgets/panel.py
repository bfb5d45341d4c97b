"""The live panel of the conversation: what the shown reply kept, and its cost so far.

Sections stand below each other, in columns where there is room for several; what does not fit is
left out from the end, whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from textual import events
from textual.content import Content
from textual.message import Message
from textual.widget import Widget

from specllama.events import RoundDone
from specllama.figures import Figures
from specllama.interface import EngineInfo
from specllama.text import sanitize_line, size
from specllama.tui.bridge import Clock, monotonic
from specllama.tui.record import Record
from specllama.tui.themes import Glyphs, Ink
from specllama.tui.widgets.inked import Inked, flow
from specllama.tui.widgets.stats_strip import StripState, duration

NAME = 8  # cells of the names in front of bars
FIGURE = 14  # cells of the figures behind them: "100% of 10000"
COLUMN = 36  # the narrowest column of sections
GAP = 3  # between columns
DEPTHS = 5  # bars of acceptance at most
MEMORY_S = 2.0  # how long a look at the free memory holds

Line = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Section:
    """A title with its figure at the right, and the lines below."""

    title: str
    figure: str
    lines: list[Content] = field(default_factory=list)

    def draw(self, ink: Ink, width: int) -> list[Content]:
        if not self.figure:  # one line says all
            head = Content.assemble((f"{self.title:<{NAME}}", "bold"), self.lines[0])
            return [head, *self.lines[1:]]
        figure = self.figure if len(self.title) + len(self.figure) + 2 <= width else ""
        gap = " " * (width - len(self.title) - len(figure))
        head = Content.assemble((self.title, "bold"), gap, (figure, ink.muted))
        return [head, *self.lines]


class Drawing:
    """The sections of one reply, ``width`` cells wide."""

    def __init__(self, glyphs: Glyphs, ink: Ink, width: int) -> None:
        self.g, self.ink, self.width = glyphs, ink, width

    def bar(self, name: str, part: float, most: float, figure: str, style: str) -> Content:
        room = self.width - NAME - FIGURE
        full, rest = self.g.meter(part / most if most > 0 else 0.0, room)
        return Content.assemble(
            (f"{name:<{NAME}}", self.ink.muted),
            (full, style),
            (rest, self.ink.muted),
            f"{figure:>{FIGURE}}",
        )

    def words(self, text: str) -> list[Content]:
        return Content.assemble((text, self.ink.muted)).wrap(self.width)

    def depth(self, found: Figures) -> Iterator[Section]:
        guesses = [at for at in found.by_depth if at.drafted]
        if not guesses:
            if found.engine:
                yield Section("Guesses kept", found.kept_words)
            return
        lines = [
            self.bar(
                f"guess {i}",
                at.accepted,
                at.drafted,
                f"{at.of_drafted:.0%} of {at.drafted}",
                self.ink.good,
            )
            for i, at in enumerate(guesses[:DEPTHS], 1)
        ]
        yield Section("Kept by depth", found.kept_words, lines)

    def time(self, found: Figures) -> Iterator[Section]:
        if (each := found.token_ms) is None:
            return
        if found.engine:  # it does not tell what its time went into
            yield Section("Time for a token", duration(each))
            return
        parts = {"draft": found.draft_ms, "verify": found.verify_ms, "waiting": found.waiting_ms}
        rows = [(name, found.by_token(ms) or 0.0, self.ink.accent) for name, ms in parts.items()]
        if not found.draft_ms:
            del rows[0]
        plain = found.plain_ms
        if plain is not None:
            rows.append(("plain", plain, self.ink.muted))
        most = max(each, plain or 0.0)
        lines = [self.bar(name, ms, most, duration(ms), ink) for name, ms, ink in rows]
        if plain is not None:
            lines += self.words("By the clock; the strip judges typical passes.")
        yield Section("Time for a token", duration(each), lines)

    def first(self, record: Record, found: Figures | None, state: StripState) -> Iterator[Section]:
        progress = state.prefill
        if progress is not None and record.live:
            done = progress.done / max(progress.total, 1)
            cached = f" {progress.cached} of them were cached" if progress.cached else ""
            bar = self.bar("prompt", done, 1.0, f"{done:.0%}", self.ink.accent)
            lines = [bar, *(self.words(cached.strip()) if cached else [])]
            yield Section("Reading the prompt", f"{progress.done} of {progress.total}", lines)
            return
        if found is None or (took := found.first) is None:
            return
        ink = self.ink
        phases = (
            ("tokenize", took.tokenize, ink.muted, "─"),
            ("queue", took.queue, ink.warn, "─"),
            ("prefill", took.prefill, ink.accent, "━"),
            ("step", took.step, ink.good, "─"),
        )
        parts = [phase for phase in phases if phase[1] >= 0.05]
        cells: Line = [
            (cell * max(1, round(ms / took.total * self.width)), style)
            for _, ms, style, cell in parts
        ]
        words = [(f"{name} {duration(ms)}", style) for name, ms, style, _ in parts]
        bar = Content.assemble(*cells).truncate(self.width)
        lines = [bar, *flow(words, self.width)] if parts else []
        if (ahead := record.ahead) is not None:
            vain = f", {ahead.in_vain} in vain ({duration(ahead.in_vain_s * 1e3)})"
            said = f"{ahead.read} tokens were read while you typed{vain if ahead.in_vain else ''}."
            lines += self.words(said)
        yield Section("First token after", duration(took.total), lines)

    def room(self, record: Record | None, info: EngineInfo | None, free: int) -> Iterator[Section]:
        """Yield the sections on context and memory."""
        g, ink = self.g, self.ink
        used = None if record is None else record.context()
        if used is None and info is not None:
            used = 0, info.target.n_ctx
        if used is not None and used[1]:
            full = used[0] / used[1]
            style = ink.bad if full >= 0.95 else ink.warn if full >= 0.8 else ink.accent
            figure = f"{used[0]} of {used[1]}"
            done, rest = g.meter(full, max(4, self.width - NAME - len(figure) - 1))
            bar = Content.assemble((done, style), (rest, ink.muted), f" {figure}")
            yield Section("Context", "", [bar])
        if info is None or not info.target.path:  # nobody knows the memory of another engine
            return
        draft = info.draft
        models = [info.target, *([draft] if draft is not None else [])]
        files, cache = sum(m.file_bytes for m in models), sum(m.kv_bytes for m in models)
        words = [f"{size(files)} weights", f"{size(cache)} cache"]
        if free and info.device == "CPU":
            words.append(f"{size(free)} left")
        if draft is not None:
            some = [f"of {draft.draft_tokens:,} words"] if draft.draft_tokens else []
            words[:0] = [f"{size(draft.file_bytes)} draft", *some]
        lines = flow([(one, ink.muted) for one in words], self.width - NAME)
        yield Section(
            "Memory", "", [lines[0], *(Content.assemble(" " * NAME, x) for x in lines[1:])]
        )

    def balance(self, done: RoundDone) -> Iterator[Section]:
        """Yield the section on the loss limit, with the reason for the draft's length."""
        window = f"Guessing {done.draft_max}" if done.draft_max else "Not drafting"
        reason = sanitize_line(done.window_reason)
        why = self.words(f"{window}: {reason}." if reason else f"{window}.")
        if done.balance is not None:
            yield Section("Loss limit left", f"{done.balance:.1f} plain steps", why)
        elif done.index:
            yield Section("Draft window", str(done.draft_max), why)

    def all(
        self,
        record: Record | None,
        state: StripState,
        info: EngineInfo | None,
        free: int,
        at: int = -1,
    ) -> list[Section]:
        found: list[Section] = []
        if record is not None:
            figures = record.figures(at)
            if figures is not None:
                found += [*self.depth(figures), *self.time(figures)]
            found += self.first(record, figures, state)
            if record.rounds:
                found += self.balance(record.rounds[at])
        return [*found, *self.room(record, info, free)]


def layout(sections: Sequence[Section], ink: Ink, width: int, height: int, columns: int) -> Content:
    """Draw sections in columns, top to bottom, with blank lines between them as far as there is
    room."""
    drawn = [section.draw(ink, width) for section in sections]
    total = sum(map(len, drawn))
    for most in range(max(min(-(-total // columns), height), 1), height + 1):
        stacks = _stack(drawn, most, columns)
        if sum(map(len, stacks)) == len(drawn):
            break
    lines = [_joined(stack, height) for stack in stacks]
    rows: list[Content] = []
    for y in range(max(map(len, lines))):
        row: list[Content | str] = []
        for x, column in enumerate(lines):
            cell = column[y] if y < len(column) else Content("")
            row += [cell, " " * (width - cell.cell_length + GAP) if x < columns - 1 else ""]
        rows.append(Content.assemble(*row))
    return Content("\n").join(rows)


def _stack(drawn: Sequence[list[Content]], most: int, columns: int) -> list[list[list[Content]]]:
    """Spread the sections over columns of ``most`` lines; leave out one that fits nowhere."""
    stacks: list[list[list[Content]]] = [[] for _ in range(columns)]
    left = [most] * columns
    for lines in drawn:
        x = next((x for x in range(columns) if len(lines) <= left[x]), None)
        if x is not None:
            stacks[x].append(lines)
            left[x] -= len(lines)
    return stacks


def _joined(stack: Sequence[list[Content]], height: int) -> list[Content]:
    """Join the sections one below the other, with blank lines between as far as there is room."""
    blanks = height - sum(map(len, stack))
    out: list[Content] = []
    for lines in stack:
        if out and blanks > 0:
            out.append(Content(""))
            blanks -= 1
        out += lines
    return out


class PanelTabs(Inked, Widget):
    """The tabs that show conversation or panel if there is no room for both; a click chooses."""

    NAMES = (" Conversation ", " Figures ")

    @dataclass
    class Picked(Message):
        figures: bool

    def render(self) -> Content:
        chosen = self.screen.has_class("-figures")
        on, off = "bold reverse $primary", self.ink.muted
        tabs = zip(self.NAMES, (off, on) if chosen else (on, off), strict=True)
        return Content.assemble(*tabs, "  ", ("/figures", "bold $primary"))

    def on_click(self, event: events.Click) -> None:
        self.post_message(self.Picked(event.x > len(self.NAMES[0])))


class LivePanel(Inked, Widget):
    """The panel of the reply that ``record`` gives, as far as it is written.

    Args:
        here: the models are in this machine's memory.

    ``at`` is the round that it is about, the newest unless it is set.
    """

    def __init__(
        self,
        state: StripState,
        record: Callable[[], Record | None],
        info: Callable[[], EngineInfo | None],
        *,
        here: bool = True,
        clock: Clock = monotonic,
        id: str | None = None,
    ) -> None:
        super().__init__(id=id)
        self.state, self.record, self.info = state, record, info
        self.at = -1
        self._clock, self._here = clock, here
        self._free, self._looked = 0, -MEMORY_S

    @property
    def free(self) -> int:
        """The bytes of free memory; 0 if unknown."""
        if not self._here:
            return 0
        if (now := self._clock()) - self._looked >= MEMORY_S:
            from specllama.models.memory import available_memory

            self._free, self._looked = available_memory(), now
        return self._free

    def render(self) -> Content:
        size = self.content_size
        columns = max(1, (size.width + GAP) // (COLUMN + GAP))
        width = (size.width + GAP) // columns - GAP
        if width < 24 or size.height < 3:
            return Content("")
        drawing = Drawing(self.glyphs, self.ink, width)
        found = drawing.all(self.record(), self.state, self.info(), self.free, self.at)
        return layout(found, self.ink, width, size.height, columns)

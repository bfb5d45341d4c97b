"""The round inspector: any generation, step by step, on the user's own tokens."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from specllama.events import RoundDone
from specllama.tui.messages import RecordGrew
from specllama.tui.record import Record
from specllama.tui.screens.page import Page
from specllama.tui.themes import Ink
from specllama.tui.widgets import walk
from specllama.tui.widgets.panel import LivePanel
from specllama.tui.widgets.stats_strip import StripState


def rounds_rows(rounds: list[RoundDone], at: int, ink: Ink, width: int, height: int) -> Content:
    """Draw a row for each round: as long as it took, green if it won time, amber and shaded if it
    lost some; then the tokens that it wrote."""
    if not rounds or height < 1:
        return Content("")
    rows = [Content.assemble(("round  time, tokens", ink.muted))] if height > 1 else []
    height -= len(rows)
    first = max(0, min(at - height // 2, len(rounds) - height))
    shown = rounds[first : first + height]
    times = [done.took_ms for done in shown]
    room = max(4, width - 12)
    longest = max(sorted(times)[int(0.9 * (len(times) - 1))], 1e-9)  # a hiccup hides no other
    for i, (done, ms) in enumerate(zip(shown, times, strict=True), first):
        won = None if done.plain_ms is None else done.plain_ms * len(done.emitted) - ms
        lost = won is not None and won <= 0
        style = ink.muted if won is None else ink.warn if lost else ink.good
        length = max(1, min(room, round(room * ms / longest)))
        mark = "▶" if i == at else " "
        rows.append(
            Content.assemble(
                (f"{mark}{i + 1:>4} ", "bold" if i == at else ink.muted),
                (("▒" if lost else "█") * length, style),
                (f" {len(done.emitted)}", ink.muted),
            )
        )
    return Content("\n").join(rows)


ROWS = 30  # columns of the rounds alongside the walk, on a wide terminal
FIGURES = 34  # lines from which there is room for the figures of the reply


class InspectorScreen(Page):
    TITLE = "Round inspector"
    HELP = """
    Right and Left step through the stages of a round: what was drafted, what the target said in
    its one pass, what was committed. N and P go to the next and previous round.
    Another reply: Tab to it in the chat, then I.

    Each row at the left is a round: as long as it took, with the tokens that it wrote; green won
    time against plain decoding, amber and shaded lost some.

    conf is the proposer's own guess that the token will be accepted, q the probability it gave
    the token, p the target's, where they were computed. Under rejection a coin u is thrown for a
    guess: it is kept where u lies below p/q.

    A reply that is being written is followed until you step back; a step to its newest round
    follows it again.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right,l", "stage(1)", "Step", id="inspector.step"),
        Binding("left,h", "stage(-1)", "Back a step", show=False, id="inspector.unstep"),
        Binding("n,pagedown,down", "round(1)", "Next round", id="inspector.next"),
        Binding("p,pageup,up", "round(-1)", "Previous", id="inspector.previous"),
        Binding("home", "edge(0)", "First round", show=False, id="inspector.first"),
        Binding("end", "edge(1)", "Last round", show=False, id="inspector.last"),
        Binding("ctrl+s", "app.export", "Save", id="app.export"),
    ]

    def __init__(self, record: Record, *, follow: bool = False) -> None:
        super().__init__()
        self.following = follow
        self._take(record)
        self.stage = 0

    def _take(self, record: Record) -> None:
        self.record = record
        self.at = self._before_at = 0
        self._before = ""

    def compose_page(self) -> ComposeResult:
        with Horizontal():
            yield Static(id="walk-rows", markup=False)
            with Vertical():
                yield Static(id="walk-head", markup=False)
                yield Static(id="walk-text", markup=False)
                yield Static(id="walk-stages", markup=False)
                yield Static(id="walk-caption", markup=False)
                with VerticalScroll(id="walk-scroll", can_focus=False):
                    yield Static(id="walk-table", markup=False)
                yield LivePanel(StripState(), lambda: self.record, lambda: None, id="walk-figures")

    def on_mount(self) -> None:
        self._begin()

    def on_resize(self) -> None:
        self._show()

    # ------------------------------------------------------------------ moving

    def _begin(self) -> None:
        """Go to the newest round if it is followed, else to the first that was drafted."""
        rounds = self.record.rounds
        if self.following:
            self._go(len(rounds) - 1, 2)
        else:
            self._go(next((i for i, done in enumerate(rounds) if done.drafted), 0), 0)

    def _go(self, at: int, stage: int) -> None:
        self.at = max(0, min(at, len(self.record.rounds) - 1))
        self.stage = stage
        # The text before a round is extended step by step, not joined anew.
        if self._before_at > self.at:
            self._before, self._before_at = "", 0
        for done in self.record.rounds[self._before_at : self.at]:
            self._before += "".join(done.emitted_text)
        self._before_at = self.at
        self._show()

    def _moved(self, step: int) -> None:
        """Stop following after a step back; follow again at the newest round of a live reply."""
        newest = self.at == len(self.record.rounds) - 1
        self.following = self.record.live and step > 0 and newest
        self._title()

    def action_stage(self, step: int) -> None:
        stage = self.stage + step
        last = len(self.record.rounds) - 1
        if stage > 2 and self.at < last:
            self._go(self.at + 1, 0)
        elif stage < 0 and self.at > 0:
            self._go(self.at - 1, 2)
        elif 0 <= stage <= 2:
            self._go(self.at, stage)
        self._moved(step)

    def action_round(self, step: int) -> None:
        self._go(self.at + step, self.stage)
        self._moved(step)

    def action_edge(self, end: int) -> None:
        self._go(len(self.record.rounds) - 1 if end else 0, 2 if end and self.record.live else 0)
        self._moved(end)

    # ------------------------------------------------------------------ drawing

    @on(RecordGrew)
    def _record_grew(self, event: RecordGrew) -> None:
        if event.record is not self.record:
            if not (self.following and event.record.live):
                return
            self._take(event.record)  # the next reply has begun
        if self.following:
            self._begin()
        else:
            self._show()

    def _title(self) -> None:
        state = "live   " if self.following and self.record.live else ""
        self.set_title(self.TITLE or "", f"{state}{self.record.title}")

    def _show(self) -> None:
        self._title()
        figures = self.query_one(LivePanel)
        figures.display = self.size.height >= FIGURES and bool(self.record.rounds)
        figures.at = self.at
        figures.refresh()
        text = self.query_one("#walk-text", Static)
        if not self.record.rounds:
            self.query_one("#walk-head", Static).update("No rounds here yet.")
            text.update("Send a message: its reply is shown here.")
            return
        done = self.record.rounds[self.at]
        rows = self.query_one("#walk-rows", Static)
        beside = ROWS if self.size.width >= 100 else 0
        width = max(20, self.size.width - 4 - beside)
        total = len(self.record.rounds)
        g, ink = self.glyphs, self.ink
        lines = text.content_size.height or 3
        text.update(walk.passage(self._before, done, self.stage, ink, width - 4, lines))
        verify = self.record.verify_at(self.at)
        for name, drawn in (
            ("head", walk.headline(done, self.at, total, g, ink)),
            ("stages", walk.stage_bar(done, self.stage, ink, width)),
            ("caption", walk.caption(done, self.stage, g)),
            ("table", walk.table(done, self.stage, g, ink, width, verify)),
        ):
            self.query_one(f"#walk-{name}", Static).update(drawn)
        if beside:
            height = rows.content_size.height or self.size.height - 4
            rows.update(rounds_rows(self.record.rounds, self.at, ink, ROWS - 2, height))

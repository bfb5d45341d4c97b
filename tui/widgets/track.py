"""A pair of runs, replayed on their true timestamps: the text so far, a clock, what came of it."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.timer import Timer
from textual.widget import Widget

from specllama.bench.experiment import DRAFTED, PLAIN, RaceBoard, Run
from specllama.events import RoundDone
from specllama.stats import SpecStats
from specllama.text import rate, sanitize
from specllama.tui.record import is_special
from specllama.tui.widgets.base import Inked
from specllama.tui.widgets.stats_strip import duration

FRAMES = 12  # a second


class ReplayChanged(Message):
    """A replay began, ended or has another pace."""


class Replay(Horizontal):
    """The newest pair of a race, drawn as it really went.

    Attributes:
        seconds: how much of the pair is shown.
        pace: seconds of the pair a second.
        timer: while it plays.
    """

    def __init__(self, board: RaceBoard, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._board = board
        self.seconds = 0.0
        self.pace = 1.0
        self.timer: Timer | None = None

    def compose(self) -> ComposeResult:
        yield RaceTrack(PLAIN, id="track-plain")
        yield RaceTrack(DRAFTED, id="track-drafted")

    @property
    def _runs(self) -> tuple[Run | None, Run | None]:
        """Plain and drafted, of the newest pair that has begun."""
        runs = self._board.runs.get("race", ())
        lap = max((run.lap for run in runs if run.rounds), default=0)
        pair = {run.name: run for run in runs if run.lap == lap}
        return pair.get(PLAIN), pair.get(DRAFTED)

    @property
    def end_s(self) -> float:
        return max((run.end_s for run in self._runs if run is not None), default=0.0)

    def draw(self) -> None:
        for track, run in zip(self.query(RaceTrack), self._runs, strict=True):
            track.show(run, self.seconds)

    def skip(self) -> None:
        """Show all of it."""
        self.stop()
        self.seconds = self.end_s
        self.draw()

    def restart(self) -> None:
        self.seconds = 0.0
        if self.timer is None:
            self.timer = self.set_interval(1 / FRAMES, self._tick)
            self.post_message(ReplayChanged())

    def toggle(self) -> None:
        """Stop, go on, or begin again."""
        if self.timer is not None:
            self.stop()
            return
        seconds = 0.0 if self.seconds >= self.end_s else self.seconds
        self.restart()
        self.seconds = seconds

    def speed(self, factor: float) -> None:
        self.pace = min(8.0, max(0.125, self.pace * factor))
        self.post_message(ReplayChanged())

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.stop()
            self.timer = None
            self.post_message(ReplayChanged())

    def _tick(self) -> None:
        self.seconds = min(self.seconds + self.pace / FRAMES, self.end_s)
        if self.seconds >= self.end_s:
            self.stop()
        self.draw()


class RaceTrack(Inked, Widget):
    """Draws ``run`` as it stood ``seconds`` after its request; the last two lines are figures. The
    clock begins with the first token, as every tok/s does."""

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
        if run.end_s > self.seconds:
            parts.append((self.glyphs.cursor, ink.accent))
        room = size.height - 3
        said = Content.assemble(*_newest(parts, size.width * room)).wrap(size.width)[-room:]
        blank = [Content("")] * (room - len(said))
        return Content("\n").join([head, *said, *blank, *self._figures(run, rounds)])

    def _figures(self, run: Run, rounds: list[RoundDone]) -> list[Content]:
        ink, dot, width = self.ink, f" {self.glyphs.dot} ", self.content_size.width
        now = min(self.seconds, run.end_s)
        stats = SpecStats()
        for done in rounds:
            stats.observe(done)
        more = stats.emitted - 1
        speed = more / (now - run.ttft_s) if now > run.ttft_s and more > 0 else None
        took = max(now - run.ttft_s, 0.0)
        clock = Content.assemble((f"{took:.2f} s", ink.strong if now == run.end_s else ""))
        above = [f"{rate(speed)} tok/s", f"{stats.emitted} tokens"]
        below = [f"first token after {duration(1000 * run.ttft_s)}"] if rounds else []
        if stats.drafted:
            below.append(f"{stats.accepted} of {stats.drafted} kept")
        lines: list[Content] = []
        for line, words in ((clock, above), (Content(""), below)):
            for one in words:  # what does not fit is left out
                longer = Content.assemble(line, (f"{dot if line.plain else ''}{one}", ink.muted))
                line = longer if longer.cell_length <= width else line
            lines.append(line)
        return lines


def _newest(parts: list[tuple[str, str]], letters: int) -> list[tuple[str, str]]:
    """The end of the text, at least ``letters`` long."""
    kept: list[tuple[str, str]] = []
    for part in reversed(parts):
        kept.append(part)
        letters -= len(part[0])
        if letters < 0:
            break
    return kept[::-1]

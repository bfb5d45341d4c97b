"""The first launch: a recorded reply is played as it was drafted, then the welcome takes its place.

The recording is a round log (``tests/lab/record_first_look.py`` makes it) of a pair that drafting
helps: the bundled one cannot show it. It is played at its own pace, or as much faster as makes it
ten seconds long, and tells that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.timer import Timer
from textual.widgets import Static

from specllama.events import Finished, RoundDone, Started
from specllama.models import catalog
from specllama.store.rounds import read_run
from specllama.text import size
from specllama.told import news
from specllama.tui.loader import EngineLoader
from specllama.tui.record import Record
from specllama.tui.widgets.drafted import DraftedView
from specllama.tui.widgets.inked import Inked
from specllama.tui.widgets.welcome import SHORT, Welcome, first_real, keys, legend
from specllama.verdict import lead

PLAY_S = 10.0  # at most
FRAMES = 10  # a second
TOLD = (
    ("guess", "a small model writes some tokens ahead"),
    ("check", "the large model reads them all in one pass"),
    ("keep", "what it would have written itself; it adds one token of its own"),
)


@dataclass(frozen=True, slots=True)
class Recording:
    """A reply as it was logged."""

    what: str
    question: str
    offered: bool  # it is of the file that the app offers to get
    started: Started
    rounds: list[RoundDone]
    finished: Finished

    @property
    def seconds(self) -> float:
        """The seconds after its first token."""
        return self.rounds[-1].t_s - self.rounds[0].t_s

    @property
    def result(self) -> str:
        """ "1.62× faster (1.48–1.77)" """
        verdict = self.finished.verdict
        return lead(verdict, "") if verdict is not None and verdict.answer == "faster" else ""


@lru_cache(maxsize=1)
def recording() -> Recording:
    """Return the recording that is shipped."""
    run = read_run(Path(str(files("specllama.tui") / "recorded.jsonl")))
    turn, header = run.turns[0], run.header
    assert turn.started is not None
    assert turn.finished is not None
    how_large = size(header["target"]["file_bytes"])
    file = f"{header['what']}, {header['kind']}, {how_large}"
    what = f"{file}, {header['device']}, {header['threads']} threads"
    offered = how_large == size(catalog.load()[catalog.FIRST].target.bytes)
    return Recording(what, header["question"], offered, turn.started, turn.rounds, turn.finished)


class FirstLook(Inked, Vertical):
    def __init__(
        self,
        loader: EngineLoader,
        moved: Callable[[Record, list[RoundDone]], object],
        *,
        id: str | None = None,
    ) -> None:
        """Start to play the recording.

        Args:
            moved: called with what was played so far, and with its new rounds; with [] at its end.
        """
        super().__init__(id=id)
        self.recording = recording()
        self.record = Record(f"a recording: {self.recording.what}")
        self.record.take(news(self.recording.started))
        self.record.live = True
        self.seconds = 0.0
        self.over = False
        self.pace = max(1.0, self.recording.seconds / PLAY_S)
        self._loader, self._moved = loader, moved
        self._drafted = DraftedView()
        self._timer: Timer | None = None

    def compose(self) -> ComposeResult:
        with Vertical(id="recorded"):
            yield Static(self._head(), markup=False)
            with VerticalScroll(id="recorded-text", can_focus=False):
                yield self._drafted
            yield Static(self._told(), markup=False, id="recorded-told")

    def on_mount(self) -> None:
        self._drafted.live = True
        self._timer = self.set_interval(1 / FRAMES, self._tick)

    def _head(self) -> Content:
        fast = "" if self.pace < 1.05 else f", played {self.pace:.1f} times as fast"
        ink = self.ink
        return Content.assemble(
            (f"A recording: {self.recording.what}{fast}.\n", ink.muted),
            (self.recording.question, "bold $secondary"),
        )

    def _told(self) -> Content:
        lines = list(TOLD)
        if self.recording.offered and self._loader.bundled and self.app.size.height >= SHORT:
            lines.append(("Ctrl+L", f"gets a real model: {first_real()}"))
        return Content.assemble(*keys(self, *lines), *legend(self)).rstrip()

    async def _tick(self) -> None:
        await self.play(self.seconds + self.pace / FRAMES)

    async def play(self, seconds: float) -> None:
        """Show the rounds written by then; at the end stop the clock: an idle app costs nothing."""
        if self.over:
            return
        self.seconds, known = seconds, len(self.record.rounds)
        all_of_it = self.recording.rounds
        until = seconds + all_of_it[0].t_s
        new = [done for done in all_of_it[known:] if done.t_s <= until]
        if new:
            self.record.add(new)
            await self._drafted.extend(new)
            self.query_one("#recorded-text").scroll_end(animate=False)
            self._moved(self.record, new)
        if seconds > self.recording.seconds + 1.0:  # what stands there can be read
            await self._end()

    async def _end(self) -> None:
        self.over = True
        await self.query_one("#recorded").remove()
        result = self.recording.result if self.recording.offered else ""  # of another file
        await self.mount(Welcome(self._loader, recorded=result))
        self._leave()
        if self._timer is not None:
            self._timer.stop()  # at last: this may run in the timer's task, which ends here

    def on_unmount(self) -> None:
        if self.record.live:  # a conversation takes its place
            self._leave()

    def _leave(self) -> None:
        self.record.live = False
        self.record.take(news(self.recording.finished))
        self._moved(self.record, [])

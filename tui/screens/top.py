"""What the lanes of the server do, live, and what several conversations at once gain there."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from specllama.bench import outcome
from specllama.bench.experiment import RaceBoard
from specllama.interface import EngineInfo, EngineLike
from specllama.remote import gauges
from specllama.remote.board import LEGEND, BoardLine
from specllama.settings.params import GenerateParams
from specllama.tui.lane_watch import LaneWatch
from specllama.tui.race import RaceEnded, Racing, at_once
from specllama.tui.screens.base import Page
from specllama.tui.widgets import race_tables
from specllama.tui.widgets.keys import Keys

DRAW_S = 0.25


class TopScreen(Page):
    TITLE = "Lanes"
    HELP = LEGEND + gauges.LEGEND

    BINDINGS: ClassVar[list[BindingType]] = [Binding("r", "race", "Race at once", id="top.race")]

    DEFAULT_CSS = """
    #lanes { height: 1fr; padding: 0 2; }
    #lanes Static { height: auto; }
    #lanes-raced { margin: 1 0 0 0; }
    #lanes-legend { height: auto; padding: 0 2; margin: 1 0 0 0; color: $muted; }
    TopScreen.-short #lanes-legend { display: none; }
    """

    def __init__(
        self,
        watch: LaneWatch,
        info: EngineInfo | None = None,
        engine: EngineLike | None = None,
        params: GenerateParams | None = None,
        board: RaceBoard | None = None,
    ) -> None:
        super().__init__()
        self.watch_lanes, self.info = watch, info
        self.params, self.board = params or GenerateParams(), board or RaceBoard()
        self.racing = None if engine is None else Racing(engine, self.post_message, log=False)
        self._shown: list[BoardLine] | None = None

    def compose_page(self) -> ComposeResult:
        with VerticalScroll(id="lanes"):
            yield Static(id="lanes-table", markup=False)
            yield Static(id="lanes-raced", markup=False)
        yield Static(id="lanes-legend", markup=False)
        yield Keys()

    def on_mount(self) -> None:
        super().on_mount()
        self.set_interval(DRAW_S, self._draw)
        self._draw()
        self._show_raced()

    def on_unmount(self) -> None:
        if self.racing is not None:
            self.racing.stop()
            self.board.drop_halves("lanes")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "race" or (self.info is not None and self.info.lanes > 1)

    def action_race(self) -> None:
        if self.racing is None or self.info is None or self.racing.busy:
            return
        runs = at_once(self.params, self.board, self.info.lanes)
        self.board.runs.setdefault("lanes", []).extend(runs)
        self.racing.start(runs)
        self._show_raced()

    @on(RaceEnded)
    def _ended(self, event: RaceEnded) -> None:
        if event.error is not None:
            self.board.runs.pop("lanes", None)
            self.notify(event.error.message, severity="error", markup=False)
        self._show_raced()

    def _show_raced(self) -> None:
        if self.info is None:
            return
        ways = outcome.ways(self.board, "lanes")
        offer = race_tables.offer(self.info)
        table = race_tables.lanes(ways, offer, self.glyphs, self.ink, self.size.width)
        if ways:
            gain = race_tables.together(ways, self.glyphs, self.ink)
            table = Content("\n").join([gain, table])
        self.query_one("#lanes-raced", Static).update(table)

    def _draw(self) -> None:
        racing = self.racing is not None and self.racing.busy
        self.set_title("Lanes", self.watch_lanes.state + (", racing" if racing else ""))
        self.query_one("#lanes-legend", Static).update(self.watch_lanes.legend)
        lines = self.watch_lanes.lines(self.size.width - 6)
        if lines == self._shown:
            return
        self._shown = lines
        styles = {"head": "", "columns": self.ink.muted, "live": "", "over": self.ink.muted}
        self.query_one("#lanes-table", Static).update(
            Content("\n").join(
                Content.assemble((self.glyphs.text(line.text), styles[line.kind])) for line in lines
            )
        )

    def on_resize(self) -> None:
        super().on_resize()
        self._draw()
        self._show_raced()

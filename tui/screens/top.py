"""The lanes of the server: the work of each, its rows and the reason for them."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from specllama.remote.board import LEGEND, BoardLine
from specllama.tui.lane_watch import LaneWatch
from specllama.tui.screens.base import Page
from specllama.tui.widgets.keys import Keys

DRAW_S = 0.25


class TopScreen(Page):
    TITLE = "Lanes"
    HELP = LEGEND

    DEFAULT_CSS = """
    #lanes { height: 1fr; padding: 0 2; }
    #lanes Static { height: auto; }
    #lanes-legend { height: auto; padding: 0 2; margin: 1 0 0 0; color: $muted; }
    TopScreen.-short #lanes-legend { display: none; }
    """

    def __init__(self, watch: LaneWatch) -> None:
        super().__init__()
        self.watch_lanes = watch
        self._shown: list[BoardLine] | None = None

    def compose_page(self) -> ComposeResult:
        with VerticalScroll(id="lanes"):
            yield Static(id="lanes-table", markup=False)
        yield Static(id="lanes-legend", markup=False)
        yield Keys()

    def on_mount(self) -> None:
        super().on_mount()
        self.set_interval(DRAW_S, self._draw)
        self._draw()

    def _draw(self) -> None:
        self.set_title("Lanes", self.watch_lanes.state)
        self.query_one("#lanes-legend", Static).update(self.watch_lanes.legend)
        lines = self.watch_lanes.lines(self.size.width - 6)
        if lines == self._shown:
            return
        self._shown = lines
        styles = {"head": "", "columns": self.ink.muted, "live": "", "over": self.ink.muted}
        self.query_one("#lanes-table", Static).update(
            Content("\n").join(Content.assemble((line.text, styles[line.kind])) for line in lines)
        )

    def on_resize(self) -> None:
        super().on_resize()
        self._draw()

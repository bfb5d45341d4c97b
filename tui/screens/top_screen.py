"""The lanes of the server: the work of each, its rows and the reason for them."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from specllama.errors import EngineDied, SpecllamaError
from specllama.remote.board import LEGEND, BoardLine, ServerWatch
from specllama.tui.screens.page import Page

DRAW_S = 0.25
AGAIN_S = 2.0  # between two attempts to reach a server
SILENT_S = 60.0  # until one that tells nothing is asked again: it may be started otherwise by then

Opened = Callable[[], tuple[ServerWatch, Iterator[dict[str, Any]]]]


class LaneWatch:
    """A board kept by a thread of its own, so that it also shows replies that ended before the page
    was opened. Callable from any thread.

    Args:
        server: its name.
        opened: what shows it, and what happens there from now on; raises SpecllamaError where it
            is not reached.
    """

    def __init__(self, server: str, opened: Opened) -> None:
        self.server, self.state = server, server
        self._opened = opened
        self._board: ServerWatch | None = None
        self._why = ""  # nothing was heard
        self._guard = threading.Lock()
        self._left = threading.Event()
        threading.Thread(target=self._listen, name="specllama-lanes", daemon=True).start()

    def lines(self, width: int) -> list[BoardLine]:
        """Return the latest lines; before the first, why there are none."""
        with self._guard:
            if self._board is None:
                return [BoardLine(line, "over") for line in textwrap.wrap(self._why, width)]
            return self._board.lines(width)

    @property
    def legend(self) -> str:
        with self._guard:
            return "" if self._board is None else " ".join(self._board.legend.split())

    def close(self) -> None:
        """Stop listening; a server sends something every second, so the thread ends soon."""
        self._left.set()

    def _listen(self) -> None:
        """Listen to the server; connect again if it went away."""
        while not self._left.is_set():
            wait_s = AGAIN_S
            try:
                board, events = self._opened()
                for event in events:
                    if self._left.is_set():
                        return
                    with self._guard:
                        self._board = board
                        board.take(event)
                    self.state = self.server
            except EngineDied as error:
                self.state = f"{error.message}; trying again"
            except SpecllamaError as error:
                self.state, wait_s = self.server, SILENT_S
                why = ": ".join(filter(None, (error.message, error.hint)))
                with self._guard:
                    self._board, self._why = None, f"{why}."
            self._left.wait(wait_s)


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

    def on_mount(self) -> None:
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
        self._draw()

"""What the lanes of the server do, live: ``specllama top`` as a page."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from textwrap import dedent
from typing import Any

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from specllama.errors import SpecllamaError
from specllama.remote.board import LEGEND, Board
from specllama.tui.screens.base import Page
from specllama.tui.widgets.keys import Keys

DRAW_S = 0.25
AGAIN_S = 2.0  # between two attempts to reach a server

Events = Callable[[], Iterator[dict[str, Any]]]


class TopScreen(Page):
    """
    Args:
        server: its name.
        events: what happens there from now on; raises SpecllamaError where it is not reached.
    """

    TITLE = "Lanes"
    HELP = LEGEND

    DEFAULT_CSS = """
    #lanes { height: 1fr; padding: 0 2; }
    #lanes-legend { height: auto; padding: 0 2; margin: 1 0 0 0; color: $muted; }
    TopScreen.-short #lanes-legend { display: none; }
    """

    def __init__(self, server: str, events: Events) -> None:
        super().__init__()
        self.server, self._events = server, events
        self.board = Board()
        self._heard = deque[dict[str, Any] | SpecllamaError]()
        self._left = threading.Event()

    def compose_page(self) -> ComposeResult:
        with VerticalScroll(id="lanes"):
            yield Static(id="lanes-table", markup=False)
        yield Static(" ".join(dedent(LEGEND).split()), id="lanes-legend", markup=False)
        yield Keys()

    def on_mount(self) -> None:
        super().on_mount()
        self.set_title("Lanes", self.server)
        self.set_interval(DRAW_S, self._take)
        threading.Thread(target=self._listen, name="specllama-top", daemon=True).start()

    def on_unmount(self) -> None:
        self._left.set()

    def _listen(self) -> None:
        """Hear what happens until the page is left; a server that went away is asked again."""
        while not self._left.is_set():
            try:
                for event in self._events():
                    self._heard.append(event)
                    if self._left.is_set():  # a server says something every second
                        return
            except SpecllamaError as error:
                self._heard.append(error)
            self._left.wait(AGAIN_S)

    def _take(self) -> None:
        if not self._heard:
            return
        state = self.server
        while self._heard:
            said = self._heard.popleft()
            if isinstance(said, SpecllamaError):
                state = f"{said.message}; trying again"
            else:
                self.board.take(said)
        self.set_title("Lanes", state)
        self._draw()

    def _draw(self) -> None:
        styles = {"head": "", "columns": self.ink.muted, "live": "", "over": self.ink.muted}
        lines = self.board.lines(self.size.width - 6)
        self.query_one("#lanes-table", Static).update(
            Content("\n").join(
                Content.assemble((self.glyphs.text(line.text), styles[line.kind])) for line in lines
            )
        )

    def on_resize(self) -> None:
        super().on_resize()
        self._draw()

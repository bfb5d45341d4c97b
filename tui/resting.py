"""The rest of an idle model: it is unloaded; the conversation stays, and typing loads it again."""

from __future__ import annotations

import math

from textual.timer import Timer

from specllama.settings.duration import told
from specllama.tui.screens.turn import TurnScreen


class Resting:
    """The timer that unloads a screen's idle engine.

    Args:
        idle_s: when nothing was typed, sent or written for so long; infinity: never.
    """

    def __init__(self, screen: TurnScreen, idle_s: float) -> None:
        self._screen = screen
        self._idle_s = math.inf if screen.loader.server else idle_s
        self._timer: Timer | None = None

    def used(self) -> None:
        """Restart the idle timer: something was typed, sent or written, or the model was loaded."""
        if self._idle_s == math.inf:
            return
        if self._timer is None:
            self._timer = self._screen.set_timer(self._idle_s, self.rest)
        else:
            self._timer.reset()

    def typed(self) -> None:
        """Load the model again if it rests: a message begins."""
        loader = self._screen.loader
        if loader.resting and self._screen.prompt.full_text:
            loader.load()
            self._screen.notify("The model was unloaded to free its memory: loading it again")
        self.used()

    def rest(self) -> None:
        self._timer = None
        screen, loader = self._screen, self._screen.loader
        if screen.busy or not loader.ready:
            self.used()
            return
        loader.rest(f"unloaded after {told(self._idle_s)} at rest")
        screen.prompt.count_with(None)
        screen.refresh_top()

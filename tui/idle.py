"""An idle engine: it reads ahead what is typed, and is unloaded after a while.

A word that ends, a pause, a paste or a file is sent. The engine reads it as far as the message's
own request would read the same (``Engine.begin``), and stops for anything else that is asked. What
is read and then deleted is work in vain: beyond as many tokens as stand, and some more, nothing is
read until the message is sent.
"""

from __future__ import annotations

import math
from typing import Any

from textual.timer import Timer

from specllama.errors import UsageError
from specllama.events import Started
from specllama.interface import Message
from specllama.models.power import on_battery
from specllama.session import owned, upcoming
from specllama.settings.duration import told
from specllama.told import news
from specllama.tui.bridge import Clock, monotonic
from specllama.tui.record import ReadAhead
from specllama.tui.screens.turn_screen import TurnScreen

PAUSE_S = 0.4  # without a key
PASTED = 40  # characters that come at once
IN_VAIN = 256  # tokens that may be read for nothing, in addition to as many as stand
SHARE = 10  # told no more often than this many times what rendering and tokenizing takes


class ReadingAhead:
    """The reading ahead of a screen's prompt by the engine.

    Args:
        when: "on", "off" or "auto": unless the machine runs on its battery.
    """

    def __init__(self, screen: TurnScreen, when: str, clock: Clock = monotonic) -> None:
        self._screen, self._when, self._clock = screen, when, clock
        self._timer: Timer | None = None
        self._chars = 0  # of the prompt, when it was looked at last
        self._told: list[Message] = []  # what was told last
        self._told_s = self._takes_s = 0.0  # when, and what preparing that took
        self.now = ReadAhead()

    def typed(self, index: int | None) -> None:
        """Note that the prompt has changed; it will be message ``index``, the next one if None."""
        screen = self._screen
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
        info = screen.loader.info
        if self._when == "off" or info is None or not info.reads_ahead:
            return
        text = screen.prompt.full_text
        before, self._chars = self._chars, len(text)
        wait = PAUSE_S
        if len(text) - before >= PASTED or text[-1:].isspace():
            wait = self._told_s + SHARE * self._takes_s - self._clock()
        if wait > 0:
            self._timer = screen.set_timer(wait, lambda: self._read(index))
        else:
            self._read(index)

    def _read(self, index: int | None) -> None:
        screen, now = self._screen, self.now
        if screen.busy or not screen.loader.ready or now.in_vain > now.stands + IN_VAIN:
            return
        if self._when == "auto" and on_battery():
            return
        messages = self._messages(index)
        if messages is None or messages == self._told:
            return
        self._told, self._told_s = messages, self._clock()
        params = owned(screen.session, screen.session.params)
        screen.loader.host.read_ahead(messages, params, self._heard)

    def _messages(self, index: int | None) -> list[Message] | None:
        """Return the conversation with the typed text so far; None if it is not yet to be read."""
        screen, prompt = self._screen, self._screen.prompt
        text = prompt.full_text
        if not text or prompt.naming or (text.startswith("/") and not text.startswith("//")):
            return None
        try:
            text = prompt.with_files(text[text.startswith("//") :])
        except UsageError:
            return None
        return upcoming(screen.session, text, index)

    def _heard(self, said: tuple[str, Any]) -> None:
        """Record how far the engine read; called from the host's reader thread."""
        kind, events = said
        for event in events if kind == "events" else ():
            new, now = news(event), self.now
            if new.started is not None:
                self._takes_s = new.started.tokenize_ms / 1e3
                if new.started.cached_n < new.started.prompt_n:
                    now.goes_on(new.started.cached_n)
            if new.prefill is not None:
                now.read += new.prefill.done - now.end
                now.end = new.prefill.done
            if new.finished is not None:
                now.read_s += new.finished.timings.prefill_ms / 1e3

    def sent(self, started: Started) -> ReadAhead | None:
        """Return how much was read ahead of the request that began, useful or in vain."""
        now, self.now, self._told, self._chars = self.now, ReadAhead(), [], 0
        if not now.read:
            return None
        now.goes_on(started.cached_n)
        return now


class Resting:
    """The timer that unloads a screen's idle engine; the conversation stays, and typing loads it
    again.

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

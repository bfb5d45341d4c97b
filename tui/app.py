"""The terminal app: its life from the first frame to the last, its looks, what it remembers.

``run`` is what the command line calls. The first frame is on the screen before the model loads;
what is typed meanwhile waits its turn. The rest of the app is in its parts: the engine
(loading.py), the pages (pages.py), what keys do to the conversation (actions.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.command import Provider
from textual.screen import Screen
from textual.theme import Theme

from specllama.engine.host import EngineFactory, EngineHost, HostLike
from specllama.errors import ModelUnavailable, SpecllamaError, UsageError
from specllama.events import Event
from specllama.interface import EngineLike
from specllama.params import EngineOptions, GenerateParams
from specllama.session import Session
from specllama.store.sessions import SessionStore
from specllama.tui import keymap, themes
from specllama.tui.actions import ChatActions
from specllama.tui.bridge import Clock, Pace, monotonic
from specllama.tui.commands import ActionCommands, MethodCommands, SessionCommands
from specllama.tui.loading import EngineKeeper, lasting_pair
from specllama.tui.messages import InkChanged, StorageFailed
from specllama.tui.pages import Pages
from specllama.tui.screens.chat import ChatScreen
from specllama.tui.state import DraftFile, History, Preferences

QUIT_WITHIN_S = 1.5
JOIN_S = 3.0


class NoModel:
    """The recipe while nothing has been chosen."""

    def __call__(self, progress: Callable[[Event], None], /) -> EngineLike:
        raise ModelUnavailable("no model is chosen yet", "press F6 to choose one")


class SpecllamaApp(EngineKeeper, Pages, ChatActions):
    TITLE = "specllama"
    leave_on_signals = False
    CSS_PATH = "app.tcss"
    ENABLE_COMMAND_PALETTE = True
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {
        ActionCommands,
        MethodCommands,
        SessionCommands,
    }
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012
        (0, "-narrow"),
        (100, "-wide"),
    ]
    VERTICAL_BREAKPOINTS = [  # noqa: RUF012
        (0, "-short"),
        (24, "-tall"),
    ]
    BINDINGS: ClassVar[list[BindingType]] = [
        *keymap.bindings(),
        Binding("ctrl+c", "copy_or_quit", "Copy or quit", show=False, priority=True),
    ]

    def __init__(
        self,
        *,
        target: str | None = None,
        draft: str | None = None,
        options: EngineOptions | None = None,
        params: GenerateParams | None = None,
        session_id: str | None = None,
        system: str | None = None,
        log_rounds: bool = True,
        host_class: Callable[[EngineFactory], HostLike] = EngineHost,
        factory_for: Callable[[str, str | None], EngineFactory] | None = None,
        store: SessionStore | None = None,
        pace: Pace | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self.prefs = Preferences.load()
        super().__init__()
        self.options = options or EngineOptions()
        self.clock = clock
        self.history = History()
        self.draft_file = DraftFile()
        self.store = store or SessionStore.open()
        if target is not None:
            self.wanted = lasting_pair(target, draft)
        elif self.prefs.last_target:
            last_draft = self.prefs.last_draft or None
            self.wanted = lasting_pair(self.prefs.last_target, draft or last_draft)
        self.factory_for = factory_for or self.load_recipe
        recipe: EngineFactory = self.factory_for(*self.wanted) if self.wanted else NoModel()
        self.host = host_class(recipe)
        self.host.on_event = self.engine_event
        self.session = Session(
            self.host,
            self.store,
            params=params,
            system=self.prefs.system_prompt if system is None else system,
            command="tui",
            log_rounds=log_rounds,
        )
        self._chat: ChatScreen | None = None
        self._session_id = session_id
        self._pace = pace or Pace.for_this_machine()
        self._told: set[str] = set()
        self._asked_to_quit = -QUIT_WITHIN_S
        self.glyph_choice = self.prefs.glyphs

    # ------------------------------------------------------------------ looks

    def get_theme_variable_defaults(self) -> dict[str, str]:
        theme = self.get_theme(self.theme) if self.theme else None
        return themes.variable_defaults(theme)

    def _choose_theme(self) -> None:
        for theme in themes.THEMES:
            self.register_theme(theme)
        self.theme = (
            self.prefs.theme if self.prefs.theme in self.available_themes else themes.DEFAULT_THEME
        )
        self.theme_changed_signal.subscribe(self, self._theme_changed)
        # Over SSH every animated frame is traffic.
        if self.prefs.animation == "none" or (
            self.prefs.animation == "auto" and os.environ.get("SSH_CONNECTION")
        ):
            self.animation_level = "none"

    def _theme_changed(self, theme: Theme) -> None:
        if self.prefs.theme != theme.name:
            self.prefs.theme = theme.name
            self.save_prefs()
        self.redraw()

    def redraw(self) -> None:
        self.set_class(self.glyphs.ascii, "-ascii")
        for screen in self.screen_stack:
            screen.post_message(InkChanged())

    def save_prefs(self) -> None:
        if not self.prefs.save():
            self.storage_failed(StorageFailed("settings of the app", str(Preferences.path())))

    def storage_failed(self, event: StorageFailed) -> None:
        if event.what not in self._told:
            self._told.add(event.what)
            self.notify(
                f"The {event.what} cannot be written to {event.reason}; it is kept in memory.",
                title="Disk",
                severity="warning",
                markup=False,
            )

    # ------------------------------------------------------------------ life

    def on_mount(self) -> None:
        self._choose_theme()
        self.set_keymap(self.prefs.keys)
        self.set_class(self.glyphs.ascii, "-ascii")
        if self._session_id is not None:
            try:
                self.session.load(self._session_id)
            except SpecllamaError as error:
                self.notify(error.message, severity="warning", markup=False)
        self._chat = ChatScreen(self.session, self._pace)
        self.push_screen(self._chat)
        if self.leave_on_signals:
            self._watch_signals()
        # The load begins behind the first frame.
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        if self.wanted is None:
            self.action_models()
        else:
            self.load()

    @property
    def chat(self) -> ChatScreen:
        assert self._chat is not None
        return self._chat

    async def action_quit(self) -> None:
        self.exit(0)

    def action_copy_or_quit(self) -> None:
        text = self.screen.get_selected_text()
        focused = self.focused
        if not text and focused is not None:
            text = getattr(focused, "selected_text", "")
        if text:
            self.copy_text(text)
            self.screen.clear_selection()
            return
        now = self.clock()
        if now - self._asked_to_quit < QUIT_WITHIN_S:
            self.exit(0)
            return
        self._asked_to_quit = now
        self.notify("Press Ctrl+C again to leave", timeout=QUIT_WITHIN_S)

    def _watch_signals(self) -> None:
        """TERM and HUP would else leave the terminal full-screen with the mouse captured."""
        loop = asyncio.get_running_loop()
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None:
                with contextlib.suppress(NotImplementedError, RuntimeError):
                    loop.add_signal_handler(number, partial(self.exit, return_code=128 + number))

    def shut_down(self) -> None:
        """After the terminal is restored: end the child, keep what it wrote, close the files."""
        turn = self._chat.turn if self._chat is not None else None
        if turn is not None:
            turn.cancel()
        self.host.close()
        if turn is not None:
            # Its last act is to store the part of the reply that came.
            turn.thread.join(JOIN_S)
        self.session.close()
        self.store.close()

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        yield SystemCommand("Theme", "Choose the colours", self.action_change_theme)


def run(
    target: str | None = None,
    draft: str | None = None,
    options: EngineOptions | None = None,
    params: GenerateParams | None = None,
    session_id: str | None = None,
    *,
    system: str | None = None,
    log_rounds: bool = True,
) -> int:
    """Run the app; returns the exit code, non-zero when it crashed.

    Raises:
        UsageError: standard input or standard error is not a terminal (the app draws on the
            latter); the caller falls back to plain lines.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            "the terminal app needs a terminal", "use: specllama chat --plain, or specllama run"
        )
    app = SpecllamaApp(
        target=target,
        draft=draft,
        options=options,
        params=params,
        session_id=session_id,
        system=system,
        log_rounds=log_rounds,
    )
    app.leave_on_signals = True
    try:
        code = app.run()
        if app.return_code:
            return app.return_code
        return code or 0
    finally:
        app.shut_down()

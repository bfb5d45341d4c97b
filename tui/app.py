"""The terminal app. Thin: it owns the engine's process, the store, the screens and the theme.

``run`` is what the command line calls. The first frame is on the screen before the model loads;
what is typed meanwhile waits its turn. Pages other than the chat are imported when they are opened,
for the sake of that first frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from textual import on, work
from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.command import Provider
from textual.screen import Screen
from textual.theme import Theme

from specllama.errors import (
    EngineDied,
    ModelUnavailable,
    SpecllamaError,
    UsageError,
)
from specllama.events import Event, LoadProgress
from specllama.host import EngineFactory, EngineHost, HostLike, LoadEngine
from specllama.interface import EngineInfo, EngineLike
from specllama.params import EngineOptions, GenerateParams
from specllama.session import Session
from specllama.store.sessions import SessionStore
from specllama.text import sanitize_line
from specllama.tui import keymap, themes
from specllama.tui.actions import ChatActions
from specllama.tui.bridge import Clock, Pace, monotonic
from specllama.tui.commands import ActionCommands, MethodCommands, SessionCommands
from specllama.tui.messages import (
    EngineFailed,
    EngineLoading,
    EngineReady,
    InkChanged,
    StorageFailed,
)
from specllama.tui.record import Record
from specllama.tui.screens.chat import ChatScreen
from specllama.tui.screens.inspector import InspectorScreen
from specllama.tui.state import DraftFile, History, Preferences

if TYPE_CHECKING:
    from specllama.tui.screens.models import Choice

QUIT_WITHIN_S = 1.5
JOIN_S = 3.0


class NoModel:
    """The recipe while nothing has been chosen."""

    def __call__(self, progress: Callable[[Event], None], /) -> EngineLike:
        raise ModelUnavailable("no model is chosen yet", "press F6 to choose one")


class SpecllamaApp(ChatActions):
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
        self.engine_info: EngineInfo | None = None
        self.engine_ready = False
        self.wanted: tuple[str, str | None] | None = None
        if target is not None:
            self.wanted = (target, draft)
        elif self.prefs.last_target:
            self.wanted = (self.prefs.last_target, draft or self.prefs.last_draft or None)
        self.factory_for = factory_for or self._load_recipe
        recipe: EngineFactory = self.factory_for(*self.wanted) if self.wanted else NoModel()
        self.host = host_class(recipe)
        self.host.on_event = self._engine_event
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
        self._load_text = ""
        self._load_failed = False
        self._told: set[str] = set()
        self._asked_to_quit = -QUIT_WITHIN_S
        self.glyph_choice = self.prefs.glyphs

    def _load_recipe(self, target: str, draft: str | None) -> EngineFactory:
        return LoadEngine(target, draft, self.options)

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
            self._load()

    @property
    def chat(self) -> ChatScreen:
        assert self._chat is not None
        return self._chat

    @property
    def engine_possible(self) -> bool:
        """A model is loaded, loading, or will be loaded with the next message."""
        return self.wanted is not None

    @property
    def status(self) -> tuple[str, str]:
        ink, glyphs = self.ink, self.glyphs
        if self.engine_ready and self.engine_info is not None:
            return f"{glyphs.bullet} {sanitize_line(self.engine_info.device)}", ink.good
        if self.wanted is None:
            return f"{glyphs.ring} no model: F6", ink.warn
        if self._load_failed:
            return f"{glyphs.ring} not loaded", ink.bad
        return f"{glyphs.ring} {self._load_text or 'loading'}", ink.warn

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

    # ------------------------------------------------------------------ the engine

    def _engine_event(self, event: Event) -> None:
        """From the host's reader thread."""
        if isinstance(event, LoadProgress):
            self.post_message(EngineLoading(event))

    @work(thread=True, exit_on_error=False, group="load")
    def _load(self, factory: EngineFactory | None = None) -> None:
        try:
            info = self.host.start() if factory is None else self.host.switch(factory)
        except SpecllamaError as error:
            self.post_message(EngineFailed(error, kept=factory is not None))
        else:
            self.post_message(EngineReady(info))

    @on(EngineLoading)
    def _engine_loading(self, event: EngineLoading) -> None:
        progress = event.progress
        self._load_text = f"loading {progress.role} {100 * progress.fraction:.0f}%"
        self.chat.refresh_top()
        if self.chat.busy:
            # The engine died and comes back for this request.
            self.chat.strip.loading = self._load_text
            self.chat.refresh_strip()

    @on(EngineReady)
    async def _engine_is_ready(self, event: EngineReady) -> None:
        self.engine_info = event.info
        self.engine_ready, self._load_failed, self._load_text = True, False, ""
        if self.wanted is not None:
            self.prefs.last_target, self.prefs.last_draft = self.wanted[0], self.wanted[1] or ""
            self.save_prefs()
        chat = self.chat
        self.session.engine = self.host
        chat.engine_changed(event.info)
        for notice in event.info.notices:
            await chat.transcript.note(notice)
        await chat.send_queued()

    @on(EngineFailed)
    async def _engine_failed(self, event: EngineFailed) -> None:
        self._load_text = ""
        chat = self.chat
        if event.kept and self.engine_info is not None:
            # The host has put the old recipe back; the next message loads it again.
            self.engine_ready = True
            self.wanted = self._before_switch
            await chat.transcript.failed(event.error)
            await chat.transcript.note("The model from before is kept; it loads again on use.")
        else:
            self._load_failed = True
            self.engine_ready = False
            await chat.transcript.failed(event.error)
        chat.strip.loading = ""
        chat.refresh_top()
        chat.refresh_strip()

    def engine_trouble(self, error: SpecllamaError) -> None:
        """A reply failed. A dead engine comes back with the next message."""
        if isinstance(error, EngineDied):
            self.chat.refresh_top()

    def switch_model(self, choice: Choice | None) -> None:
        if choice is None:
            return
        self._before_switch = self.wanted
        self.wanted = (choice.target, choice.draft)
        factory = self.factory_for(choice.target, choice.draft)

        def go() -> None:
            self.engine_ready = False
            self._load_failed = False
            self._load_text = "loading"
            self.chat.refresh_top()
            self._load(factory)

        self.chat.when_idle(go)

    def use_method(self, name: str) -> None:
        plain = name == "none"
        params = self.session.params
        try:
            params = params.replace(speculate=not plain, proposer="auto" if plain else name)
        except UsageError as error:
            self.notify(error.message, severity="error", markup=False)
            return
        self.set_params(params)
        self.notify(f"Next reply: {'plain decoding' if plain else themes.source_label(name)}")

    def set_params(self, params: GenerateParams) -> None:
        chat = self.chat
        self.session.params = params
        speculate = params.speculate and params.proposer != "none"
        if speculate != chat.strip.speculate:
            # Why the window was what it was says nothing about the next reply.
            chat.strip.reason, chat.strip.window = "", None
        chat.strip.speculate = speculate
        chat.refresh_strip()

    def stored_stats(self, session: Session) -> dict[int, dict[str, Any]]:
        """The finish lines of stored replies, by message."""
        if session.id is None:
            return {}
        try:
            messages = self.store.get(session.id).messages
        except SpecllamaError:
            return {}
        return {i: m.stats for i, m in enumerate(messages) if m.stats is not None}

    # ------------------------------------------------------------------ screens

    async def run_chat_action(self, action: str) -> None:
        """From the palette and slash commands: where the action lives does not matter."""
        name = action.partition("(")[0]
        owner: Any = self if hasattr(self, f"action_{name}") else self.chat
        await self.run_action(action, owner)

    def _open(self, screen: Screen[Any], then: Callable[[Any], None] | None = None) -> None:
        # A function key pressed on another page replaces that page.
        if len(self.screen_stack) > 1 and not isinstance(self.screen, ChatScreen):
            if type(self.screen) is type(screen):
                return
            self.screen.dismiss(None)
        self.push_screen(screen, then)

    def action_help(self) -> None:
        from specllama.tui.screens.help import HelpScreen

        focus = getattr(self.focused, "HELP", "") if self.focused is not None else ""
        self._open(HelpScreen(getattr(self.screen, "HELP", "") or "", focus or "", self.prefs.keys))

    def action_inspector(self) -> None:
        self.inspect(None)

    def inspect(self, record: Record | None) -> None:
        chat = self.chat
        found = record if record is not None and record.rounds else chat.latest_record()
        others = [r for _, r in sorted(chat.records.items(), reverse=True) if r.rounds]
        self._open(InspectorScreen(found or Record("nothing generated yet"), others))

    def action_playground(self) -> None:
        from specllama.tui.screens.playground import PlaygroundScreen

        chat = self.chat
        done = [r.finished for _, r in sorted(chat.records.items()) if r.finished is not None]
        self._open(PlaygroundScreen(chat.strip.meter.pair(), done[-1].timings if done else None))

    def action_methods(self) -> None:
        from specllama.tui.screens.methods import MethodsScreen

        methods = self.engine_info.methods if self.engine_info is not None else ()
        params = self.session.params
        now = params.proposer if params.speculate else "none"
        self._open(MethodsScreen(methods, now), self._method_chosen)

    def _method_chosen(self, name: str | None) -> None:
        if name is not None:
            self.use_method(name)

    def action_models(self) -> None:
        from specllama.tui.screens.models import ModelsScreen

        self._open(ModelsScreen(self.wanted, self.options), self.switch_model)

    def action_sessions(self) -> None:
        from specllama.tui.screens.sessions import SessionsScreen

        self._open(SessionsScreen(self.store, self.session.id), self._session_chosen)

    def _session_chosen(self, session: str | None) -> None:
        if session is not None:
            self.resume_session(session)
        elif self.session.id is not None and self.session.id not in {
            s.id for s in self.store.summaries(limit=1000)
        }:
            # The conversation on the screen was deleted in the list.
            self.chat.when_idle(self._new_chat)

    def resume_session(self, session: str) -> None:
        async def go() -> None:
            try:
                self.session.load(session)
            except SpecllamaError as error:
                self.notify(error.message, severity="error", markup=False)
                return
            self.set_params(self.session.params)
            await self.chat.show_conversation()

        self.chat.when_idle(go)

    def action_settings(self) -> None:
        from specllama.tui.screens.settings import SettingsScreen

        self._open(
            SettingsScreen(self.session.params, self.session.system, self.prefs),
            self._settings_changed,
        )

    def _settings_changed(self, result: tuple[GenerateParams, str] | None) -> None:
        if result is None:
            return
        params, system = result
        self.set_params(params)
        self.session.system = system
        self.save_prefs()
        self.glyph_choice = self.prefs.glyphs
        self.theme = self.prefs.theme
        self.redraw()

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

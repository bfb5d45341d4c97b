"""The terminal app. Thin: it owns the engine's process, the store, the screens and the theme.

``run`` is what the command line calls. The first frame is on the screen before the model loads;
what is typed meanwhile waits its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

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
from specllama.host import EngineFactory, EngineHost, LoadEngine
from specllama.interface import EngineInfo, EngineLike
from specllama.params import EngineOptions, GenerateParams
from specllama.session import Session
from specllama.store.sessions import SessionStore
from specllama.text import sanitize_line
from specllama.tui import clipboard, keymap, themes
from specllama.tui.bridge import Clock, Pace, monotonic
from specllama.tui.commands import ActionCommands, MethodCommands, SessionCommands
from specllama.tui.messages import (
    EngineFailed,
    EngineLoading,
    EngineReady,
    InkChanged,
    StorageFailed,
)
from specllama.tui.reading import code_blocks
from specllama.tui.record import Record
from specllama.tui.screens.chat import ChatScreen
from specllama.tui.screens.help import HelpScreen
from specllama.tui.screens.inspector import InspectorScreen
from specllama.tui.screens.methods import MethodsScreen
from specllama.tui.screens.models import Choice, ModelsScreen
from specllama.tui.screens.playground import PlaygroundScreen
from specllama.tui.screens.sessions import SessionsScreen
from specllama.tui.screens.settings import SettingsScreen
from specllama.tui.state import VIEWS, DraftFile, History, Preferences
from specllama.tui.widgets.base import InkedApp

QUIT_WITHIN_S = 1.5
PLAIN_TOKENS = 32


class HostLike(EngineLike, Protocol):
    """EngineHost, or a stand-in for tests."""

    factory: EngineFactory
    on_event: Callable[[Event], None] | None

    def start(self) -> EngineInfo: ...

    def switch(self, factory: EngineFactory) -> EngineInfo: ...


class NoModel:
    """The recipe while nothing has been chosen."""

    def __call__(self, progress: Callable[[Event], None], /) -> EngineLike:
        raise ModelUnavailable("no model is chosen yet", "press F6 to choose one")


class SpecllamaApp(InkedApp):
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
            self.host, self.store, params=params, system=self.prefs.system_prompt, command="tui"
        )
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
        self.set_class(self.glyphs.ascii, "-ascii")
        if self._session_id is not None:
            try:
                self.session.load(self._session_id)
            except SpecllamaError as error:
                self.notify(error.message, severity="warning", markup=False)
        self.push_screen(ChatScreen(self.session, self._pace))
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
        screen = next(s for s in self.screen_stack if isinstance(s, ChatScreen))
        return screen

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
        """After the terminal is restored: end the child, close the files."""
        self.session.close()
        self.host.close()
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
        chat.strip.speculate = params.speculate and params.proposer != "none"
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
        focus = getattr(self.focused, "HELP", "") if self.focused is not None else ""
        self._open(HelpScreen(getattr(self.screen, "HELP", "") or "", focus or ""))

    def action_inspector(self) -> None:
        self.inspect(None)

    def inspect(self, record: Record | None) -> None:
        chat = self.chat
        found = record if record is not None and record.rounds else chat.latest_record()
        others = [r for _, r in sorted(chat.records.items(), reverse=True) if r.rounds]
        self._open(InspectorScreen(found or Record("nothing generated yet"), others))

    def action_playground(self) -> None:
        chat = self.chat
        done = [r.finished for _, r in sorted(chat.records.items()) if r.finished is not None]
        self._open(PlaygroundScreen(chat.strip.meter.pair(), done[-1].timings if done else None))

    def action_methods(self) -> None:
        methods = self.engine_info.methods if self.engine_info is not None else ()
        params = self.session.params
        now = params.proposer if params.speculate else "none"
        self._open(MethodsScreen(methods, now), self._method_chosen)

    def _method_chosen(self, name: str | None) -> None:
        if name is not None:
            self.use_method(name)

    def action_models(self) -> None:
        self._open(ModelsScreen(self.wanted, self.options), self.switch_model)

    def action_sessions(self) -> None:
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

    # ------------------------------------------------------------------ actions of the chat

    async def action_cycle_view(self) -> None:
        chat = self.chat
        view = VIEWS[(VIEWS.index(chat.view) + 1) % len(VIEWS)]
        self.prefs.view = view
        self.save_prefs()
        await chat.set_view(view)
        words = {
            "text": "Replies as text",
            "drafted": "Replies as drafted",
            "ghosts": "Replies as drafted, with rejected drafts",
        }
        self.notify(words[view], timeout=2)

    def action_toggle_speculation(self) -> None:
        params = self.session.params
        self.set_params(params.replace(speculate=not params.speculate))
        state = "on" if self.session.params.speculate else "off"
        self.notify(f"Speculation is {state} from the next reply on", timeout=2)

    def action_toggle_rounds(self) -> None:
        self.prefs.show_rounds = not self.prefs.show_rounds
        self.save_prefs()
        self.chat.query_one("#rounds").display = self.prefs.show_rounds

    def action_stop(self) -> None:
        self.chat.action_stop()

    def action_new_chat(self) -> None:
        self.chat.when_idle(self._new_chat)

    async def _new_chat(self) -> None:
        self.session.clear()
        self.session.system = self.prefs.system_prompt
        await self.chat.show_conversation()
        self.chat.prompt.focus()

    def action_retry(self) -> None:
        self.chat.action_retry()

    def action_continue(self) -> None:
        self.chat.action_continue()

    def action_edit_last(self) -> None:
        self.chat.action_edit_last()

    def action_undo(self) -> None:
        self.chat.action_undo()

    def copy_text(self, text: str) -> None:
        self._copy(text)

    @work(thread=True, exit_on_error=False, group="copy")
    def _copy(self, text: str) -> None:
        said = clipboard.copy(text, lambda t: self.call_from_thread(self.copy_to_clipboard, t))
        self.call_from_thread(self.notify, said, timeout=3, markup=False)

    def copy_code(self, text: str) -> None:
        blocks = code_blocks(text)
        if blocks:
            self.copy_text(blocks[0])
        else:
            self.notify("There is no code block here", timeout=2)

    def _last_reply(self) -> str | None:
        return next(
            (m.content for m in reversed(self.session.messages) if m.role == "assistant"), None
        )

    def action_copy_reply(self) -> None:
        reply = self._last_reply()
        if reply is None:
            self.notify("There is no reply to copy yet", timeout=2)
        else:
            self.copy_text(reply)

    def action_copy_code(self) -> None:
        self.copy_code(self._last_reply() or "")

    def action_copy_chat(self) -> None:
        self.copy_text(self.session.export("md"))

    def action_export(self, form: str) -> None:
        if not self.session.messages:
            self.notify("There is nothing to export yet", timeout=2)
            return
        kind: Any = form
        path = clipboard.export_path(self.session.title, form)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.session.export(kind), "utf-8", errors="replace")
        except OSError as error:
            reason = error.strerror or str(error)
            self.notify(f"{path}: {reason}", title="Not exported", severity="error", markup=False)
            return
        self.notify(str(path), title="Exported", markup=False)

    def action_measure_plain(self) -> None:
        if not self.engine_ready:
            self.notify("Load a model first")
            return
        self.chat.when_idle(self._measure_plain)

    @work(thread=True, exit_on_error=False, group="measure")
    def _measure_plain(self) -> None:
        params = GenerateParams(
            max_tokens=PLAIN_TOKENS, speculate=False, proposer="none", seed=1, ignore_eos=True
        )
        rounds: list[float] = []
        try:
            for event in self.host.generate("Once upon a time there was a", params):
                if event.type == "round_done" and getattr(event, "index", 0) > 0:
                    rounds.append(
                        getattr(event, "verify_ms", 0.0) + getattr(event, "other_ms", 0.0)
                    )
        except SpecllamaError as error:
            self.call_from_thread(self.notify, error.message, severity="error", markup=False)
            return
        self.call_from_thread(self._plain_measured, rounds)

    def _plain_measured(self, rounds: list[float]) -> None:
        for ms in rounds:
            self.chat.strip.meter.observe_plain(ms)
        self.chat.refresh_strip()
        if rounds:
            speed = 1000 * len(rounds) / sum(rounds)
            self.notify(f"Plain decoding: {speed:.1f} tok/s over {len(rounds)} tokens")

    def action_editor(self) -> None:
        """Write the prompt in $EDITOR; the app waits with the terminal given back."""
        import shlex
        import subprocess
        import tempfile

        command = os.environ.get("VISUAL") or os.environ.get("EDITOR")
        if not command:
            self.notify("Set $EDITOR to write the prompt in your own editor")
            return
        prompt = self.chat.prompt
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "prompt.md"
            path.write_text(prompt.full_text, "utf-8", errors="replace")
            try:
                with self.suspend():
                    subprocess.run([*shlex.split(command), str(path)], check=False)
                text = path.read_text("utf-8", errors="replace")
            except (OSError, ValueError) as error:
                self.notify(f"{command}: {error}", severity="error", markup=False)
                return
        prompt.put(text.rstrip("\n"))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        yield SystemCommand("Theme", "Choose the colours", self.action_change_theme)


def run(
    target: str | None = None,
    draft: str | None = None,
    options: EngineOptions | None = None,
    params: GenerateParams | None = None,
    session_id: str | None = None,
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
        target=target, draft=draft, options=options, params=params, session_id=session_id
    )
    app.leave_on_signals = True
    try:
        code = app.run()
        if app.return_code:
            return app.return_code
        return code or 0
    finally:
        app.shut_down()

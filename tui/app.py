"""The terminal app: its life from the first frame to the last, its pages, its actions.

``run`` is what the command line calls. The first frame is drawn before the model loads; what is
typed meanwhile is queued. The app owns the engine (keeper.py) and the conversation;
the chat shows both and sends messages up. Pages are imported when they are opened, so that the
first frame comes early.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from textual import on, work
from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.command import Provider
from textual.screen import Screen

from specllama.bench.experiment import TOGETHER
from specllama.engine.host import EngineFactory, EngineHost, HostLike, LoadEngine
from specllama.engine.inline import InlineHost
from specllama.errors import SpecllamaError, UsageError
from specllama.events import Event
from specllama.interface import Message, MethodInfo, Stepped
from specllama.models.refs import NO_DRAFT
from specllama.remote.address import Address
from specllama.session import Session
from specllama.settings.params import EngineOptions, GenerateParams
from specllama.store.sessions import SessionStore
from specllama.text import sanitize_line
from specllama.tui import advice, clipboard, keymap
from specllama.tui.bridge import Clock, Pace, monotonic
from specllama.tui.commands import ActionCommands, MethodCommands, SessionCommands
from specllama.tui.downloads import Downloads, DownloadTold
from specllama.tui.editor import edit
from specllama.tui.keeper import EngineKeeper, Pair, lasting_pair
from specllama.tui.looks import ThemedApp
from specllama.tui.messages import (
    ActionAsked,
    EngineFailed,
    EngineGone,
    EngineLoading,
    EngineReady,
    TurnAction,
)
from specllama.tui.reading import code_blocks
from specllama.tui.record import Record
from specllama.tui.screens.base import Page
from specllama.tui.screens.chat import ChatScreen
from specllama.tui.state import VIEWS
from specllama.tui.widgets.download_line import DownloadLine
from specllama.tui.widgets.sidebar import Sidebar

if TYPE_CHECKING:
    from specllama.tui.exports import Export
    from specllama.tui.lane_watch import LaneWatch
    from specllama.tui.screens.settings import Settings

LIKELIEST = 3  # tokens beside each of the reply, on request
QUIT_WITHIN_S = 1.5
JOIN_S = 3.0


@runtime_checkable
class Exporting(Protocol):
    """A screen with something on it that can be saved."""

    def exports(self) -> list[Export]: ...


class SpecllamaApp(ThemedApp):
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
        server: Address | None = None,
        store: SessionStore | None = None,
        pace: Pace | None = None,
        clock: Clock = monotonic,
    ) -> None:
        super().__init__()
        self.options = self._loaded_options = options or EngineOptions()
        self.clock = clock
        self.store = store or SessionStore.open()
        self._server = server
        wanted: Pair | None = None
        if server is not None:
            wanted, host_class = (server.url, None), InlineHost
        elif target is not None:
            wanted = lasting_pair(target, draft)
        elif self.prefs.last_target:
            wanted = lasting_pair(self.prefs.last_target, draft or self.prefs.last_draft or None)
        recipe_for = factory_for or self._recipe_for
        self.keeper = EngineKeeper(
            wanted, recipe_for, host_class, self.post_message, server.name if server else ""
        )
        self.session = Session(
            self.keeper.host,
            self.store,
            params=params,
            system=self.prefs.system_prompt if system is None else system,
            command="tui",
            log_rounds=log_rounds,
        )
        self.downloads = Downloads(self.post_message)
        self._chat: ChatScreen | None = None
        self._session_id = session_id
        self._pace = pace or Pace.for_this_machine()
        self._asked_to_quit = -QUIT_WITHIN_S
        self._lanes: LaneWatch | None = None

    # ------------------------------------------------------------------ life

    def on_mount(self) -> None:
        self.choose_looks()
        if self.prefs.notice:
            self.notify(self.prefs.notice, title="Settings", severity="warning", markup=False)
        self.set_keymap(self.prefs.keys)
        self.set_class(self.glyphs.ascii, "-ascii")
        if self._session_id is not None:
            try:
                self.session.load(self._session_id)
            except SpecllamaError as error:
                self.notify(error.message, severity="warning", markup=False)
        self._chat = ChatScreen(
            self.session, self.store, self.keeper, self.prefs, self._pace, self.downloads
        )
        self.push_screen(self._chat)
        if self.leave_on_signals:
            self._watch_signals()
        # The load begins behind the first frame.
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        if self._server is not None:
            from specllama.tui.lane_watch import LaneWatch

            self._lanes = LaneWatch(self._server.name, self._server.events)
        if self.keeper.possible:
            self.keeper.load()
        else:
            self.action_models()

    @property
    def chat(self) -> ChatScreen:
        assert self._chat is not None
        return self._chat

    async def action_quit(self) -> None:
        self.exit(0)

    def action_copy_or_quit(self) -> None:
        """Ctrl+C: copy what is selected, else stop the reply, else leave when pressed twice."""
        text = self.screen.get_selected_text()
        focused = self.focused
        if not text and focused is not None:
            text = getattr(focused, "selected_text", "")
        if text:
            self.copy_text(text)
            self.screen.clear_selection()
            return
        turn = self.chat.turn
        if turn is not None and not turn.cancelled:
            self.chat.action_stop()
            return
        now = self.clock()
        if now - self._asked_to_quit < QUIT_WITHIN_S:
            self.exit(0)
            return
        self._asked_to_quit = now
        self.notify("Press Ctrl+C again to leave", timeout=QUIT_WITHIN_S)

    def _watch_signals(self) -> None:
        """Else TERM and HUP would leave the terminal full-screen with the mouse captured."""
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
        self.downloads.close()
        if self._lanes is not None:
            self._lanes.close()
        self.keeper.close()
        if turn is not None:
            # Its last act is to store the part of the reply that was written.
            turn.thread.join(JOIN_S)
        self.session.close()
        self.store.close()

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        yield SystemCommand("Theme", "Choose the colours", self.action_change_theme)

    # ------------------------------------------------------------------ the engine

    def _recipe_for(self, target: str, draft: str | None) -> EngineFactory:
        if self._server is not None:
            return partial(_connected, self._server)
        return LoadEngine(target, draft, self.options)

    @on(EngineLoading)
    @on(EngineReady)
    @on(EngineFailed)
    async def _engine_told(self, told: EngineLoading | EngineReady | EngineFailed) -> None:
        self.keeper.take(told)
        match told:
            case EngineLoading():
                self.chat.engine_loading()
            case EngineReady():
                self._loaded_options = self.options
                self._remember_pair()
                await self.chat.engine_ready(told.info)
            case EngineFailed():
                if told.kept:
                    self.options = self._loaded_options
                await self.chat.engine_failed(told)
        for screen in self.screen_stack:
            if isinstance(screen, Page):
                screen.engine_told(told)

    @on(EngineGone)
    async def _engine_gone(self, gone: EngineGone) -> None:
        """Only when nothing is asked of it: a reply that is cut off tells of it itself."""
        if self.keeper.ready and not self.chat.busy and self.keeper.host.death is gone.error:
            await self._engine_told(EngineFailed(gone.error))

    def _remember_pair(self) -> None:
        if self.keeper.wanted is not None and not self.keeper.server:
            target, draft = self.keeper.wanted
            self.prefs.last_target, self.prefs.last_draft = target, draft or ""
            self.save_prefs()

    def action_reload(self) -> None:
        if self.keeper.possible:
            self.chat.when_idle(self.keeper.reload)
        else:
            self.notify("Choose a model first: F6", severity="warning")

    def switch_model(self, pair: Pair | None) -> None:
        if pair is not None:
            self.chat.when_idle(partial(self.keeper.switch, *pair))

    @property
    def methods(self) -> tuple[MethodInfo, ...]:
        return () if self.keeper.info is None else self.keeper.info.methods

    def use_method(self, name: str) -> None:
        plain = name == "none"
        params = self.session.params
        try:
            params = params.replace(speculate=not plain, proposer="auto" if plain else name)
        except UsageError as error:
            self.notify(error.message, severity="error", markup=False)
            return
        self.chat.set_params(params)
        words = {"none": "plain decoding", "auto": "the method is chosen automatically"}
        self.notify(f"Next reply: {words.get(name) or self.glyphs.label(name)}")

    # ------------------------------------------------------------------ pages

    def _open(self, screen: Screen[Any], then: Callable[[Any], None] | None = None) -> None:
        # A function key pressed on another page replaces that page.
        if len(self.screen_stack) > 1 and not isinstance(self.screen, ChatScreen):
            if type(self.screen) is type(screen):
                return
            if isinstance(self.screen, Page) and not self.screen.may_leave():
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
        from specllama.tui.exports import Circumstances
        from specllama.tui.screens.inspector import InspectorScreen

        chat = self.chat
        live = chat.live_record
        if record is None and live is not None:
            found: Record | None = live
        else:
            found = record if record is not None and record.rounds else chat.latest_record()
        others = [r for _, r in sorted(chat.records.items(), reverse=True) if r.rounds]
        found = found or Record("nothing generated yet")
        under = Circumstances(self.keeper.info, self.session.params)
        self._open(InspectorScreen(found, others, follow=found.live, under=under))

    def action_race(self) -> None:
        self.race(None)

    def race(self, index: int | None) -> None:
        """The page that answers whether it pays, on the question at or before message ``index``."""
        from specllama.tui.screens.race import RaceScreen

        chat, session = self.chat, self.session
        if chat.busy:
            self.notify("A reply is being written: Esc stops it")
            return
        messages = session.messages[: None if index is None else index + 1]
        while messages and messages[-1].role != "user":
            messages = messages[:-1]
        head = [Message("system", session.system)] if session.system else []
        screen = RaceScreen(
            chat.board,
            self.keeper.host,
            self.keeper.info if self.keeper.ready else None,
            session.params,
            [*head, *messages] if messages else None,
            widen=None if self._server or self.options.parallel > 1 else self._widen,
            log=session.logs_rounds,
        )

        def applied(params: GenerateParams | None) -> None:
            if params is not None:
                chat.set_params(params)
            chat.refresh_strip()

        self._open(screen, applied)

    def _widen(self) -> None:
        """Load the pair again, for as many conversations at once as are raced together."""
        self.options = replace(self.options, parallel=max(TOGETHER))
        self.action_reload()

    def action_methods(self) -> None:
        from specllama.tui.screens.methods import MethodsScreen, raced

        params = self.session.params
        now = params.proposer if params.speculate else "none"

        def chosen(name: str | None) -> None:
            if name is not None:
                self.use_method(name)

        self._open(MethodsScreen(self.keeper.info, now, raced(self.chat.board)), chosen)

    def action_models(self) -> None:
        if self.keeper.server:
            words = "was started with its pair: chat without --server lets you choose one"
            self.notify(f"The server {words}", markup=False)
            return
        from specllama.tui.screens.models import ModelsScreen

        screen = ModelsScreen(self.keeper.wanted, self.options, self.downloads)
        self._open(screen, self.switch_model)

    def action_top(self) -> None:
        from specllama.tui.screens.top import TopScreen

        if self._lanes is None:
            self.notify("Lanes are a server's: specllama chat --server URL shows them")
        else:
            self._open(TopScreen(self._lanes))

    @on(DownloadTold)
    def _download_told(self, told: DownloadTold) -> None:
        for line in self.chat.query(DownloadLine):
            line.told()
        for screen in self.screen_stack:
            screen.post_message(told)
        over = told.over
        if over is None or (over.error is None and over.state != "done"):
            return
        if over.error is not None:
            self.notify(
                advice.said(over.error, "\n"), title=over.ref, severity="error", markup=False
            )
        elif over.target is not None:
            self.notify("Ctrl+L loads it", title=f"{over.ref} is here", markup=False)

    def action_use_download(self) -> None:
        """Load what was downloaded last."""
        done = [d for d in self.downloads.all.values() if d.state == "done" and d.target]
        if not done:
            self.notify("No download is ready: F6 shows what can be had", timeout=3)
            return
        if not isinstance(self.screen, ChatScreen):
            self.screen.dismiss(None)
        self.downloads.forget(done[-1].ref)
        self.chat.query_one(DownloadLine).told()
        assert done[-1].target is not None
        self.switch_model((done[-1].target, done[-1].draft or NO_DRAFT))

    # ------------------------------------------------------------------ conversations

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
            self.action_new_chat()

    def resume_session(self, session: str) -> None:
        async def go() -> None:
            try:
                self.session.load(session)
            except SpecllamaError as error:
                self.notify(error.message, severity="error", markup=False)
                return
            self.chat.params_changed()
            await self.chat.show_conversation()

        self.chat.when_idle(go)

    # ------------------------------------------------------------------ settings

    def action_settings(self) -> None:
        from specllama.tui.screens.settings import SettingsScreen

        info = self.keeper.info
        card = {} if info is None else info.target.card
        self._open(
            SettingsScreen(
                self.session.params,
                None if self.keeper.server else self.options,
                self.session.system,
                self.prefs,
                card,
                None if info is None else info.target.n_ctx,
            ),
            self._settings_changed,
        )

    def _settings_changed(self, settings: Settings | None) -> None:
        if settings is None:
            return
        self.chat.set_params(settings.params)
        self.session.system = settings.system
        if settings.options is not None and settings.options != self.options:
            self.options = settings.options
            if self.keeper.possible:
                self.action_reload()
        self.save_prefs()
        self.glyph_choice = self.prefs.glyphs
        self.theme = self.prefs.theme
        self.redraw()

    # ------------------------------------------------------------------ actions

    @on(ActionAsked)
    async def _run_asked(self, event: ActionAsked) -> None:
        name = event.action.partition("(")[0]
        owner: Any = self if hasattr(self, f"action_{name}") else self.chat
        await self.run_action(event.action, owner)

    @on(TurnAction)
    async def _act_on_turn(self, event: TurnAction) -> None:
        """Actions that leave the conversation as it is; the chat does the rest."""
        match event.action:
            case "inspect":
                records = self.chat.records
                self.inspect(records.get(event.index) or records.get(event.index + 1))
            case "view":
                await self.action_cycle_view()
            case "copy":
                self.copy_text(self.session.messages[event.index].content)
            case "race":
                self.race(event.index)
            case "copy_code":
                self.copy_code(self.session.messages[event.index].content)

    async def action_cycle_view(self) -> None:
        chat = self.chat
        view = VIEWS[(VIEWS.index(chat.view) + 1) % len(VIEWS)]
        self.prefs.view = view
        self.save_prefs()
        await chat.set_view(view)
        words = {
            "text": "Replies as text",
            "drafted": "Replies as drafted",
            "ghosts": "Replies as drafted, with refused guesses",
        }
        self.notify(words[view], timeout=2)

    def action_toggle_speculation(self) -> None:
        params = self.session.params
        self.chat.set_params(params.replace(speculate=not params.speculate))
        state = "on" if self.session.params.speculate else "off"
        self.notify(f"Speculation is {state} from the next reply on", timeout=2)

    def action_think(self, how: str = "") -> None:
        params = self.session.params
        how = how or ("auto" if params.think == "off" else "off")
        self.chat.set_params(params.replace(think=how))
        self.notify(f"Thoughts: {how}, from the next reply on", timeout=2)

    def action_record_likeliest(self) -> None:
        asked = None if self.session.params.chances else LIKELIEST
        self.chat.set_params(self.session.params.replace(chances=asked))
        words = "are recorded" if asked else "are no longer recorded"
        self.notify(f"The target's three likeliest tokens {words}, from the next reply on")

    def action_answer_now(self) -> None:
        self.chat.action_answer_now()

    def action_toggle_rounds(self) -> None:
        self.prefs.show_rounds = not self.prefs.show_rounds
        self.save_prefs()
        self.chat.query_one("#rounds").display = self.prefs.show_rounds

    def action_sidebar(self) -> None:
        if isinstance(self.screen, ChatScreen):
            self.chat.action_sidebar()
            self.save_prefs()

    @on(Sidebar.Chosen)
    def _resume_or_begin(self, event: Sidebar.Chosen) -> None:
        if event.session is None:
            self.action_new_chat()
        elif event.session != self.session.id:
            self.resume_session(event.session)
        self.chat.prompt.focus()

    def action_toggle_panel(self) -> None:
        self.chat.action_panel()
        self.save_prefs()

    def action_stop(self) -> None:
        self.chat.action_stop()

    def action_new_chat(self) -> None:
        self.chat.when_idle(self._new_chat)

    async def _new_chat(self) -> None:
        self.session.clear()
        self.session.system = self.prefs.system_prompt
        self.chat.params_changed()
        await self.chat.show_conversation()
        self.chat.prompt.focus()

    def action_retry(self) -> None:
        self.chat.action_retry()

    def action_reseed(self) -> None:
        self.chat.action_reseed()

    def action_continue(self) -> None:
        self.chat.action_continue()

    def action_edit_last(self) -> None:
        self.chat.action_edit_last()

    async def action_version(self, step: int) -> None:
        if isinstance(self.screen, ChatScreen):
            await self.chat.walk_versions(step)

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

    def action_export(self) -> None:
        """Save what is on the screen, as documents and as a picture."""
        from specllama.tui.exports import Export
        from specllama.tui.picture import self_contained
        from specllama.tui.screens.export import ExportScreen

        screen = self.screen
        if isinstance(screen, ExportScreen):
            return
        picture = self_contained(self.export_screenshot(title="specllama"))
        exports = list(screen.exports()) if isinstance(screen, Exporting) else []
        name = type(screen).__name__.removesuffix("Screen")
        exports.append(Export("The screen", f"specllama {name}", {"svg": lambda: picture}))

        def saved(path: Path | None) -> None:
            if path is not None:
                self.notify(sanitize_line(str(path.absolute())), title="Saved", markup=False)

        self.push_screen(ExportScreen(exports), saved)

    def action_editor(self) -> None:
        """Write the prompt in $EDITOR; meanwhile the app gives up the terminal."""
        command = os.environ.get("VISUAL") or os.environ.get("EDITOR")
        if not command:
            self.notify("Set $EDITOR to write the prompt in your own editor")
            return
        prompt = self.chat.prompt
        try:
            with self.suspend():
                text = edit(command, prompt.full_text)
        except (OSError, ValueError) as error:
            self.notify(f"{command}: {error}", severity="error", markup=False)
            return
        prompt.put(text.rstrip("\n"))


def _connected(server: Address, progress: Callable[[Event], None], /) -> Stepped:
    from specllama.remote.engine import RemoteEngine

    return RemoteEngine(server)


def run(
    target: str | None = None,
    draft: str | None = None,
    options: EngineOptions | None = None,
    params: GenerateParams | None = None,
    session_id: str | None = None,
    *,
    system: str | None = None,
    log_rounds: bool = True,
    server: Address | None = None,
) -> int:
    """Run the app; returns the exit code, non-zero when it crashed.

    Args:
        server: whose engine is used, instead of loading a model.

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
        server=server,
    )
    if sys.platform != "win32":
        from specllama.tui import pasting

        pasting.install()
    app.leave_on_signals = True
    try:
        code = app.run()
        if app.return_code:
            return app.return_code
        return code or 0
    finally:
        app.shut_down()

"""The terminal app: its life from the first frame to the last, its pages, its actions.

``run`` is what the command line calls. The first frame is drawn before the model loads; what is
typed meanwhile is queued. The app owns the engine (loader.py) and the conversation;
the chat shows both and sends messages up. ``pages.py`` opens the pages behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import signal
from collections.abc import Callable
from functools import partial
from inspect import iscoroutinefunction
from traceback import walk_tb
from typing import ClassVar

from textual import events, on, work
from textual.actions import parse
from textual.binding import Binding, BindingType

from specllama.engine.host import EngineFactory, EngineHost, HostLike, InlineHost, LoadEngine
from specllama.errors import SpecllamaError
from specllama.events import Event
from specllama.interface import EngineLike, MethodInfo
from specllama.models import catalog
from specllama.models.refs import NO_DRAFT
from specllama.remote.address import Address
from specllama.session import Session
from specllama.settings.params import EngineOptions, GenerateParams
from specllama.signals import has_terminal
from specllama.store.sessions import SessionStore
from specllama.tui import advice, clipboard, keymap
from specllama.tui.bridge import Clock, FlushPace, monotonic
from specllama.tui.downloads import Download, Downloads, DownloadTold
from specllama.tui.loader import EngineLoader, Pair, lasting_pair
from specllama.tui.messages import EngineFailed, EngineGone, EngineLoading, EngineReady
from specllama.tui.pages import PagedApp
from specllama.tui.screens.chat_screen import ChatScreen
from specllama.tui.screens.page import Page
from specllama.tui.widgets.prompt import types
from specllama.tui.widgets.welcome import first_real

QUIT_WITHIN_S = 1.5
JOIN_S = 3.0


class SpecllamaApp(PagedApp):
    TITLE = "specllama"
    leave_on_signals = False
    CSS_PATH = "app.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (24, "-tall")]  # noqa: RUF012
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
        read_ahead: str = "auto",
        idle_s: float = math.inf,
        host_class: Callable[[EngineFactory], HostLike] = EngineHost,
        factory_for: Callable[[str, str | None], EngineFactory] | None = None,
        server: Address | None = None,
        ahead: EngineHost | None = None,
        store: SessionStore | None = None,
        pace: FlushPace | None = None,
        clock: Clock = monotonic,
    ) -> None:
        """Prepare the app; ``run`` starts it.

        Args:
            read_ahead: when a message is read while it is typed, see ``ReadingAhead``.
            idle_s: at rest for so long, the model is unloaded, see ``Resting``.
            server: whose engine is used, instead of loading a model.
            ahead: has begun to load the pair.
        """
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
        if ahead is not None:
            host_class = partial(_begun, ahead)
        recipe_for = factory_for or self._recipe_for
        self.loader = EngineLoader(
            wanted, recipe_for, host_class, self.post_message, server.name if server else ""
        )
        self.session = Session(
            self.loader.host,
            self.store,
            params=params,
            system=self.prefs.system_prompt if system is None else system,
            command="tui",
            log_rounds=log_rounds,
        )
        self.downloads = Downloads(self.post_message)
        self._session_id = session_id
        self._read_ahead, self._idle_s = read_ahead, idle_s
        self._pace = pace or FlushPace.for_this_machine()
        self._asked_to_quit = -QUIT_WITHIN_S

    # ------------------------------------------------------------------ life

    def on_mount(self) -> None:
        self.choose_looks()
        if self.prefs.notice:
            self.notify(self.prefs.notice, title="Settings", severity="warning", markup=False)
        self.set_keymap(self.prefs.keys)
        if self._session_id is not None:
            try:
                self.session.load(self._session_id)
            except SpecllamaError as error:
                self.notify(error.message, severity="warning", markup=False)
        self._chat = ChatScreen(
            self.session,
            self.store,
            self.loader,
            self.prefs,
            self._pace,
            self.downloads,
            self.copy_text,
            self._read_ahead,
            self._idle_s,
        )
        self.push_screen(self._chat)
        if self.leave_on_signals:
            self._watch_signals()
        # The load begins behind the first frame.
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        if self.leave_on_signals:  # the process is the app's: what it consists of is not garbage
            gc.freeze()  # looking through it again and again is a tenth of what a reply costs
            gc.enable()
        if self.loader.possible:
            self.loader.load()
        else:
            self.action_show("models")

    async def action_quit(self) -> None:
        self.leaving(partial(self.exit, 0))

    def action_copy_or_quit(self) -> None:
        """Handle Ctrl+C: copy the selection, else stop the reply, else empty the prompt; with none
        of these, leave when pressed twice."""
        text = self.screen.get_selected_text() or getattr(self.focused, "selected_text", "")
        if text:
            self.copy_text(text)
            self.screen.clear_selection()
            return
        turn = self.chat.turn
        if turn is not None and not turn.cancelled:
            self.chat.action_stop()
            return
        if self.screen is self.chat and self.chat.prompt.text:
            self.chat.prompt.empty()
            self.notify("Ctrl+Z brings the text back", timeout=2)
            return
        now = self.clock()
        if now - self._asked_to_quit < QUIT_WITHIN_S:
            self.leaving(partial(self.exit, 0))
            return
        self._asked_to_quit = now
        self.notify("Press Ctrl+C again to leave", timeout=QUIT_WITHIN_S)

    def _watch_signals(self) -> None:
        """Catch TERM and HUP, which would leave the terminal full-screen with the mouse
        captured."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(RuntimeError):  # not the main thread
                loop.add_signal_handler(number, partial(self.exit, return_code=128 + number))
        if has_terminal():  # it may go without a signal, where a shell or make stands between
            self.set_interval(5.0, self._leave_without_terminal)

    def _leave_without_terminal(self) -> None:
        if not has_terminal():
            self.exit(return_code=129)

    def shut_down(self) -> None:
        """End the child, keep its text and close the files, after the terminal is restored."""
        turn = self._chat.turn if self._chat is not None else None
        if turn is not None:
            turn.cancel()
        self.downloads.close()
        self.loader.close()
        if turn is not None:
            # Its last act is to store the part of the reply that was written.
            turn.thread.join(JOIN_S)
        self.session.close()
        self.store.close()

    # ------------------------------------------------------------------ the engine

    def _recipe_for(self, target: str, draft: str | None) -> EngineFactory:
        if self._server is not None:
            return partial(_connected, self._server)
        return LoadEngine(target, draft, self.options)

    @on(EngineLoading)
    @on(EngineReady)
    @on(EngineFailed)
    def _engine_told(self, told: EngineLoading | EngineReady | EngineFailed) -> None:
        self.loader.apply(told)
        match told:
            case EngineLoading() if self.loader.ready:  # it is measured while it rests
                self.chat.refresh_top()
            case EngineLoading():
                self.chat.engine_loading()
            case EngineReady():
                self._loaded_options = self.options
                if self.loader.wanted is not None and not self.loader.server:
                    self.prefs.last_target, draft = self.loader.wanted
                    self.prefs.last_draft = draft or ""
                    self.save_prefs()
                while self.loader.warned:
                    words = self.loader.warned.pop()
                    self.notify(words, severity="warning", timeout=20, markup=False)
                self.chat.call_next(self.chat.engine_ready, told.info)
            case EngineFailed():
                if told.kept:
                    self.options = self._loaded_options
                self.chat.call_next(self.chat.engine_failed, told)
        for screen in self.screen_stack:
            if isinstance(screen, Page):
                screen.engine_told(told)

    @on(EngineGone)
    def _engine_gone(self, gone: EngineGone) -> None:
        """Show that the engine died while idle: a reply that is cut off shows it itself."""
        if self.loader.ready and not self.chat.busy and self.loader.host.death is gone.error:
            self._engine_told(EngineFailed(gone.error))

    @property
    def methods(self) -> tuple[MethodInfo, ...]:
        return () if self.loader.info is None else self.loader.info.methods

    # ------------------------------------------------------------------ pages

    @on(DownloadTold)
    def _download_told(self, told: DownloadTold) -> None:
        self.chat.download_line.told()
        for screen in self.screen_stack:
            screen.post_message(told)
        over = told.over
        if over is None or (over.error is None and over.state != "done"):
            return
        if over.error is not None:
            words = advice.said(over.error, "\n")
            self.notify(words, title=over.ref, severity="error", markup=False)
        elif over.opens and self.loader.bundled and not self.chat.busy:
            self._use(over)
        elif over.target is not None:
            self.notify("Ctrl+L loads it", title=f"{over.ref} is here", markup=False)

    def action_use_download(self) -> None:
        """Load the newest download; if there is none, and the bundled pair is in use, bring the
        first real model."""
        done = [d for d in self.downloads.all.values() if d.state == "done" and d.target]
        if not done and self.loader.bundled:
            begun = self.downloads.begin(catalog.FIRST)
            if not begun.opens:
                begun.opens = True
                words = f"{first_real()}. It is opened as soon as it is here"
                self.notify(words, title="A real model", markup=False)
        elif not done:
            self.notify("No download is ready: F6 shows what can be had", timeout=3)
        else:
            if not isinstance(self.screen, ChatScreen):
                self.screen.dismiss(None)
            self._use(done[-1])

    def _use(self, download: Download) -> None:
        assert download.target is not None
        self.downloads.forget(download.ref)
        self.chat.download_line.told()
        # the first real model goes on showing guesses; others need not be forced to draft
        if self.session.lent and download.ref != catalog.FIRST:
            self.session.lend(None)
            self.chat.params_changed()
        self.switch_model((download.target, download.draft or NO_DRAFT))

    # ------------------------------------------------------------------ actions

    async def on_event(self, event: events.Event) -> None:
        """Pass on an event, to a page once it is built. What is typed in the chat goes to the
        prompt wherever the focus is."""
        sent = isinstance(event, events.InputEvent | events.Paste) and not event.is_forwarded
        if sent and self.screen_stack:
            await self.screen._mounted_event.wait()
        typed = isinstance(event, events.Paste) or (isinstance(event, events.Key) and types(event))
        if typed and not event.is_forwarded and self._chat is not None and self._chat.is_current:
            self._chat.set_focus(self._chat.prompt)
        try:
            await super().on_event(event)
        except Exception as error:
            frames = walk_tb(error.__traceback__ and error.__traceback__.tb_next)
            ours = any(frame.f_globals["__name__"].startswith("specllama") for frame, _ in frames)
            if ours or not sent:
                raise  # else a key or a click that Textual's own parts cannot answer now

    def action_ask(self, action: str) -> None:
        """Run the action of a keymap row, here or in the chat. Of what takes its time there, one
        ends before the next begins."""
        _, name, words = parse(action)
        where = self if hasattr(self, f"action_{name}") else self.chat
        run = getattr(where, f"action_{name}")
        if iscoroutinefunction(run):
            where.call_next(run, *words)
        else:
            run(*words)

    @work(thread=True, exit_on_error=False, group="copy")
    def copy_text(self, text: str) -> None:
        said = clipboard.copy(text, lambda t: self.call_from_thread(self.copy_to_clipboard, t))
        self.call_from_thread(self.notify, said, timeout=3, markup=False)

    def action_editor(self) -> None:
        """Write the prompt in $EDITOR; meanwhile the app gives up the terminal."""
        command = os.environ.get("VISUAL") or os.environ.get("EDITOR")
        if not command:
            self.notify("Set $EDITOR to write the prompt in your own editor")
            return
        prompt = self.chat.prompt
        try:
            with self.suspend():
                text = clipboard.edit(command, prompt.full_text)
        except (OSError, ValueError) as error:
            self.notify(f"{command}: {error}", severity="error", markup=False)
            return
        prompt.put(text.rstrip("\n"))


def _connected(server: Address, progress: Callable[[Event], None], /) -> EngineLike:
    from specllama.remote.remote_engine import open_remote

    return open_remote(server)


def _begun(host: EngineHost, factory: EngineFactory) -> EngineHost:
    """Return the host if it loads just this, else a new one."""
    if host.factory == factory:
        return host
    host.close()
    return EngineHost(factory)


def run(app: SpecllamaApp) -> int:
    """Run the app in this terminal; returns the exit code, non-zero when it crashed."""
    clipboard.install_pasting()
    app.leave_on_signals = True
    try:
        code = app.run()
        return app.return_code or code or 0
    finally:
        app.shut_down()

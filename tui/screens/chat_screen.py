"""The chat screen: the conversation, the strip that shows speculation at work, the prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, cast

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget
from textual.widgets import Button

from specllama.bench.outcome import RaceBoard
from specllama.errors import UsageError
from specllama.events import RoundDone, Started
from specllama.interface import EngineInfo
from specllama.session import Session
from specllama.store.sessions import SessionStore
from specllama.text import sanitize_line
from specllama.tui import advice, keymap
from specllama.tui.bridge import FlushPace, monotonic
from specllama.tui.downloads import Downloads
from specllama.tui.idle import ReadingAhead, Resting
from specllama.tui.loader import EngineLoader, files_of, loading_words
from specllama.tui.messages import EngineFailed, InkChanged, PromptSubmitted
from specllama.tui.record import Record
from specllama.tui.screens.acting_screen import ActingScreen
from specllama.tui.screens.turn_screen import UNNAMED, unfinished
from specllama.tui.state import VIEWS, Preferences
from specllama.tui.widgets.above_prompt import DownloadLine
from specllama.tui.widgets.inked import Keys, ThemedApp
from specllama.tui.widgets.message import AssistantMessage, MessageView, UserMessage
from specllama.tui.widgets.panel import PanelTabs
from specllama.tui.widgets.prompt import Prompt
from specllama.tui.widgets.welcome import Welcome, next_example

TWICE_S = 1.5  # within which a key is pressed twice
FLAT = 20  # rows below which the conversation needs that of the rounds


class ChatScreen(ActingScreen):
    HELP = """
    Type and press Enter; what you send while a reply is being written waits its turn.
    Esc stops a reply at once and keeps what is there. PgUp and PgDn turn the pages of the
    conversation, Ctrl+End goes to its end and follows what is written.
    """

    AUTO_FOCUS = "#prompt"
    BINDINGS: ClassVar[list[BindingType]] = [
        *keymap.chat_bindings(),
        Binding("pageup", "page(-1)", "Page up", show=False, priority=True, id="chat.page_up"),
        Binding("pagedown", "page(1)", "Page down", show=False, priority=True, id="chat.page_down"),
        Binding("ctrl+z", "redo", "Bring back", show=False, priority=True, id="chat.redo"),
        Binding("ctrl+end", "to_end", "To the end", show=False, priority=True, id="chat.to_end"),
    ]

    def __init__(
        self,
        session: Session,
        store: SessionStore,
        loader: EngineLoader,
        prefs: Preferences,
        pace: FlushPace,
        downloads: Downloads,
        copy: Callable[[str], object],
        read_ahead: str,
        idle_s: float,
    ) -> None:
        super().__init__(session, loader, pace)
        self.download_line = DownloadLine(downloads, id="download")
        self.tabs, self.keys = PanelTabs(id="panel-tabs"), Keys(show_command_palette=True)
        self.downloads = downloads
        self.store = store
        self.prefs = prefs
        self.view = prefs.view
        self.board = RaceBoard()
        self.copy_text = copy
        self.ahead = ReadingAhead(self, read_ahead)
        self.resting = Resting(self, idle_s)
        self._loaded: tuple[object, ...] = ()
        self._recording: Record | None = None
        self._left_s = -TWICE_S  # when Esc was pressed in a prompt with text

    def compose(self) -> ComposeResult:
        yield self.top_bar
        yield self.tabs
        with Horizontal(id="talk"):
            yield self.transcript
            yield self.panel
        yield from (self.waiting, self.rounds_row, self.strip_line, self.download_line)
        yield from (self.editing_line, self.prompt.attached, self.prompt.completions, self.prompt)
        yield self.keys

    async def on_mount(self) -> None:
        self.editing_line.display = False
        self.set_class(not self.prefs.show_panel, "-no-panel")
        self.strip.speculate = self.session.params.speculate
        await self.show_conversation()

    def on_resize(self) -> None:
        flat = self.size.height < FLAT
        for name, holds in (("-beside", self.beside), ("-tabs", not self.beside), ("-flat", flat)):
            self.set_class(holds, name)
        # More keys need the room that the palette's takes.
        width = self.size.width
        self.keys.show_command_palette = 72 <= width < 100 or width >= 124
        self.keys.compact = width < 72
        self.refresh_bindings()

    # ------------------------------------------------------------------ the conversation

    async def show_conversation(self) -> None:
        """Draw the session as it stands: after a start, a resume, a new chat, another version."""
        session = self.session
        self.stop_editing()  # its message may be another one now
        self._known = {key: record for key, record in self._known.items() if key[0] == session.id}
        views: list[MessageView] = []
        for index, (number, message) in enumerate(session.stored.items()):
            if message.role == "user":
                views.append(UserMessage(index, message.content))
            else:
                record, foot = self._record_of(index, number), unfinished(message)
                shown = {"reasoning": message.reasoning, "record": record, "foot": foot}
                views.append(self._reply(index, message.content, **shown))
        await self.transcript.fill(views, None if views else self._welcome())
        self.show_versions()
        self.count_context()

    def _welcome(self) -> Widget:
        """Return the view of an empty conversation; the first time, an introduction."""
        if self.prefs.first_look and self.loader.possible:
            from specllama.tui.widgets.first_look import FirstLook

            self.prefs.first_look = False
            self.prefs.save()
            self.demonstrate()
            return FirstLook(self.loader, self._played, id="welcome")
        return Welcome(self.loader, id="welcome")

    def _played(self, record: Record, new: list[RoundDone]) -> None:
        """Show a recording that is played in the empty conversation, as if it were the reply."""
        if not self.app.is_running:  # it ends: the parts of the screen go in any order
            return
        self._recording = record if new else None
        self.refresh_figures()
        self.strip.notice = "a recording" if new else ""
        if new:
            self.rounds_row.clear()
            self.rounds_row.extend(record.rounds)
            self.strip.demonstration = False
            self.panel.refresh()

    def shown_record(self) -> Record | None:
        return super().shown_record() or self._recording

    @on(Button.Pressed, "#earlier")
    async def _show_earlier(self) -> None:
        await self.transcript.show_earlier()

    # ------------------------------------------------------------------ sending

    @on(PromptSubmitted)
    async def submit(self, event: PromptSubmitted) -> None:
        try:
            command = keymap.slash_command(event.text)
        except UsageError as error:
            self.warn(error)
            return
        if command is not None:
            self.prompt.sent()
            await self.action_listed(command.action)
            return
        await self.send(event.text[event.text.startswith("//") :])

    @on(Prompt.Changed)
    def _typed(self) -> None:
        self.resting.typed()
        self.ahead.typed(self.editing)

    def begun(self, started: Started) -> None:
        if self.live is not None:
            self.live.record.ahead = self.ahead.sent(started)

    async def turn_ended(self, failed: bool) -> None:
        self.resting.used()
        if failed:
            self.take_back_queue()
        else:
            await self.send_queued()

    # ------------------------------------------------------------------ actions

    @property
    def beside(self) -> bool:
        """True if the panel stands next to the conversation; else both are tabs."""
        return self.size.width >= keymap.BESIDE

    def action_toggle_panel(self) -> None:
        """Show or hide the panel; where there is no room for both, change the tab."""
        if self.beside:
            self.prefs.show_panel = not self.prefs.show_panel
            self.set_class(not self.prefs.show_panel, "-no-panel")
            cast(ThemedApp, self.app).save_prefs()
        else:
            self.toggle_class("-figures")
            self.tabs.refresh()

    @on(PanelTabs.Picked)
    def _tab_chosen(self, event: PanelTabs.Picked) -> None:
        self.set_class(event.figures, "-figures")
        self.tabs.refresh()

    def action_page(self, step: int) -> None:
        self.transcript.page(step)

    def action_to_end(self) -> None:
        self.transcript.to_end()

    def action_stop(self) -> None:
        """Handle Esc: leave the edited message, or stop the reply; at rest, empty the prompt when
        pressed twice."""
        prompt = self.prompt
        if self.editing is not None:
            self.stop_editing()
        else:
            rests = self.turn is None and not self.queue
            if self.turn is not None:
                self.turn.cancel()
            self.loader.skip()
            self.take_back_queue()
            if rests and prompt.has_focus and prompt.text:
                self._leave_text(prompt)
        if not self.prompt.has_focus:
            self.prompt.focus()

    def _leave_text(self, prompt: Prompt) -> None:
        now = monotonic()
        if now - self._left_s < TWICE_S:
            prompt.empty()
            now = -TWICE_S
        else:
            self.notify("Esc again empties the prompt", timeout=TWICE_S)
        self._left_s = now

    async def action_listed(self, action: str, columns: int = 0) -> None:
        """Run the action of a command, or of a key in the footer that was pressed or clicked."""
        await self.app.run_action(f"app.ask({action!r})")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """True if a key has room in the footer, and something to do."""
        if action == "redo":  # nothing was typed since the turn was taken back
            typed = self.prompt.has_focus and self.prompt.full_text != self.left
            return self.session.taken_back and not self.busy and not typed
        if action != "listed":
            return True
        own = parameters[0] != "show('models')" or not self.loader.server
        return own and self.app.size.width >= int(str(parameters[1]))

    async def action_cycle_view(self) -> None:
        """Show replies in the next way, until the app is left; F8 chooses for good."""
        views = list(VIEWS)
        await self.show_as(views[(views.index(self.view) + 1) % len(views)])

    async def show_as(self, view: str) -> None:
        self.view = view
        await self.transcript.show_as(view)
        self.mark_prompt()

    def on_descendant_focus(self) -> None:
        if self.shown_record() is not self.strip.record:
            self.refresh_strip()

    @on(Prompt.Left)
    def _leave_prompt(self) -> None:
        messages = [m for m in self.transcript.messages if m.is_attached]
        if messages:
            messages[-1].focus()
        elif (example := next_example(self.prompt.text, self.loader)) is not None:
            self.prompt.put(example)

    def on_ink_changed(self, _: InkChanged) -> None:
        for widget in self.query("*"):
            widget.refresh()
        for view in self.transcript.messages:
            if isinstance(view, AssistantMessage) and view.is_attached:
                view.redraw_foot()

    # ------------------------------------------------------------------ the engine

    def engine_loading(self) -> None:
        self.prompt.count_with(None)
        self.refresh_top()
        if self.busy:
            # The engine died and is restarted for this request.
            self.strip.loading = loading_words(self.loader.progress)
            self.refresh_strip()

    async def engine_ready(self, info: EngineInfo) -> None:
        self.resting.used()
        self.session.engine = self.loader.host
        self.prompt.count_with(self.loader.host.count_tokens)
        if (pair := files_of(info)) != self._loaded:
            self._loaded = pair
            # With another pair, what was measured on the old one no longer holds.
            self.board.runs.clear()
            self.strip.n_ctx = self.prompt.n_ctx = info.target.n_ctx
            self.strip.guesses = advice.guesses(info)
            self.strip.notice = ""
            for welcome in self.query(Welcome):
                welcome.redraw()
        self.refresh_top()
        for view in self.transcript.messages:
            if isinstance(view, AssistantMessage) and view.speaker == UNNAMED:
                view.speak_as(self.speaker)
        self.strip.loading = ""
        self.refresh_strip()
        await self.send_queued()

    async def engine_failed(self, event: EngineFailed) -> None:
        """Show in one note that a load failed, or that the previous pair is back."""
        self.prompt.count_with(None)
        self.strip.loading = ""
        if event.kept and self.loader.info is not None:
            name = sanitize_line(self.loader.info.target.name)
            next_step = f"back to {name}: the conversation continues with it"
        else:
            next_step = "your next message tries again"
            if not self.loader.server:
                next_step = f"F6 chooses another pair; {next_step}"
            self.take_back_queue()
        await self.failed(event.error, next_step, self.again)
        self.refresh_top()
        self.refresh_strip()

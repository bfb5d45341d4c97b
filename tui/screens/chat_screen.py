"""The chat screen: the conversation, the strip that shows speculation at work, the prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, cast

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget
from textual.widgets import Footer, Static

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
from specllama.tui.messages import ActionAsked, EngineFailed, InkChanged, PromptSubmitted
from specllama.tui.record import Record
from specllama.tui.screens.acting_screen import ActingScreen
from specllama.tui.screens.turn_screen import UNNAMED, unfinished
from specllama.tui.state import VIEWS, DraftFile, Preferences, PromptHistory
from specllama.tui.widgets.above_prompt import DownloadLine, Waiting
from specllama.tui.widgets.drafted import RoundsRow
from specllama.tui.widgets.inked import Keys, ThemedApp
from specllama.tui.widgets.message import AssistantMessage, MessageView, UserMessage
from specllama.tui.widgets.panel import LivePanel, PanelTabs
from specllama.tui.widgets.prompt import Prompt
from specllama.tui.widgets.stats_strip import StatsStrip
from specllama.tui.widgets.transcript import Transcript
from specllama.tui.widgets.welcome import TopBar, Welcome, next_example

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
        yield TopBar(self.loader, id="top")
        yield PanelTabs(id="panel-tabs")
        with Horizontal(id="talk"):
            yield Transcript(id="transcript")
            yield LivePanel(
                self.strip,
                self.shown_record,
                lambda: self.loader.info,
                here=not self.loader.server,
                id="panel",
            )
        draft = DraftFile()
        yield Waiting(draft, id="queue")
        yield RoundsRow(id="rounds")
        yield StatsStrip(self.strip, id="strip")
        yield DownloadLine(self.downloads, id="download")
        yield Static(id="editing", markup=False)
        prompt = Prompt(PromptHistory(), draft, id="prompt")
        yield prompt.attached
        yield prompt.completions
        yield prompt
        yield Keys(show_command_palette=True)

    async def on_mount(self) -> None:
        self.query_one("#editing").display = False
        self.set_class(not self.prefs.show_panel, "-no-panel")
        self.strip.speculate = self.session.params.speculate
        await self.show_conversation()

    def on_resize(self) -> None:
        flat = self.size.height < FLAT
        for name, holds in (("-beside", self.beside), ("-tabs", not self.beside), ("-flat", flat)):
            self.set_class(holds, name)
        # More keys need the room that the palette's takes.
        width, footer = self.size.width, self.query_one(Footer)
        footer.show_command_palette = 72 <= width < 100 or width >= 124
        footer.compact = width < 72
        self.refresh_bindings()

    # ------------------------------------------------------------------ the conversation

    async def show_conversation(self) -> None:
        """Draw the session as it stands: after a start, a resume, a new chat, another version."""
        session = self.session
        self._known = {key: record for key, record in self._known.items() if key[0] == session.id}
        views: list[MessageView] = []
        for index, (number, message) in enumerate(session.stored.items()):
            if message.role == "user":
                views.append(UserMessage(index, message.content))
            else:
                record, foot = self._record_of(index, number), unfinished(message)
                shown = {"reasoning": message.reasoning, "record": record, "foot": foot}
                views.append(self._reply(index, message.content, **shown))
            views[-1].version = session.version(index)
        await self.transcript.fill(views, None if views else self._welcome())
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
            row = self.query_one(RoundsRow)
            row.clear()
            row.extend(record.rounds)
            self.strip.demonstration = False
            self.query_one(LivePanel).refresh()

    def shown_record(self) -> Record | None:
        return super().shown_record() or self._recording

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
            self.post_message(ActionAsked(command.action))
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
            self.query_one(PanelTabs).refresh()

    @on(PanelTabs.Picked)
    def _tab_chosen(self, event: PanelTabs.Picked) -> None:
        self.set_class(event.figures, "-figures")
        self.query_one(PanelTabs).refresh()

    def action_page(self, step: int) -> None:
        self.transcript.page(step)

    def action_to_end(self) -> None:
        self.transcript.to_end()

    def action_stop(self) -> None:
        """Handle Esc: leave the edited message, or stop the reply; at rest, empty the prompt when
        pressed twice."""
        prompt = self.prompt
        if self.editing is not None:
            self.stop_editing(restore=True)
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

    def action_listed(self, action: str, columns: int) -> None:
        """Pass a key of the footer that was pressed or clicked to the app."""
        self.post_message(ActionAsked(action))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """True if a key has room in the footer, and something to do."""
        if action != "listed":
            return True
        own = parameters[0] != "show('models')" or not self.loader.server
        return own and self.app.size.width >= int(str(parameters[1]))

    async def action_cycle_view(self) -> None:
        views = list(VIEWS)
        self.view = self.prefs.view = views[(views.index(self.view) + 1) % len(views)]
        cast(ThemedApp, self.app).save_prefs()
        await self.transcript.show_as(self.view)
        self.strip.notice = VIEWS[self.view] if self.view != "text" else ""
        self.refresh_strip()

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
            self.strip.layout = f"--repack {'off' if info.target.repacked else 'on'}"
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

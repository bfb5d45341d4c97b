"""The chat screen: the conversation, the strip that shows speculation at work, the prompt."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Footer, Static

from specllama.bench.experiment import Board
from specllama.errors import UsageError
from specllama.interface import EngineInfo
from specllama.replies import attach
from specllama.session import Session
from specllama.settings.params import GenerateParams
from specllama.store.sessions import SessionStore
from specllama.store.tree import StoredMessage
from specllama.text import sanitize_line
from specllama.tui import keymap
from specllama.tui.bridge import Pace
from specllama.tui.downloads import Downloads
from specllama.tui.keeper import EngineKeeper, loading_words
from specllama.tui.messages import (
    ActionAsked,
    EngineFailed,
    InkChanged,
    PromptSubmitted,
    Scrolled,
    TurnAction,
)
from specllama.tui.record import Record
from specllama.tui.screens.turn import UNNAMED, TurnScreen, interrupted
from specllama.tui.state import DraftFile, History, Preferences
from specllama.tui.widgets.completions import Completions
from specllama.tui.widgets.download_line import DownloadLine
from specllama.tui.widgets.keys import Keys
from specllama.tui.widgets.message import AssistantMessage, MessageView, UserMessage
from specllama.tui.widgets.panel import LivePanel, PanelTabs
from specllama.tui.widgets.prompt import Prompt
from specllama.tui.widgets.rounds import RoundsRow
from specllama.tui.widgets.sidebar import Sidebar
from specllama.tui.widgets.stats_strip import StatsStrip, WhyLine
from specllama.tui.widgets.transcript import Transcript
from specllama.tui.widgets.waiting import Waiting
from specllama.tui.widgets.welcome import TopBar, Welcome, next_example

if TYPE_CHECKING:
    from specllama.tui.exports import Export

USUAL_DRAFTING = {"speculate": True, "proposer": "auto", "window": "auto", "draft_max": None}
DEMONSTRATION = 4  # guesses a round
EDITED = "edited: C continues from here"
SIDEBAR = 160  # columns from which other conversations are listed beside this one


class ChatScreen(TurnScreen):
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
        keeper: EngineKeeper,
        prefs: Preferences,
        pace: Pace,
        downloads: Downloads,
    ) -> None:
        super().__init__(session, keeper, pace)
        self.downloads = downloads
        self.store = store
        self.prefs = prefs
        self.view = prefs.view
        self.board = Board()
        self.editing: int | None = None
        self._loaded: tuple[object, ...] = ()
        self._before_edit = ""

    def compose(self) -> ComposeResult:
        yield TopBar(self.keeper, id="top")
        yield PanelTabs(id="panel-tabs")
        with Horizontal(id="talk"):
            yield Sidebar(self.store, id="sidebar")
            yield Transcript(id="transcript")
            yield LivePanel(
                self.strip,
                self.newest_record,
                lambda: self.keeper.info,
                here=not self.keeper.server,
                id="panel",
            )
        draft = DraftFile()
        yield Waiting(draft, id="queue")
        yield RoundsRow(id="rounds")
        yield StatsStrip(self.strip, id="strip")
        yield WhyLine(self.strip, id="why")
        yield DownloadLine(self.downloads, id="download")
        yield Static(id="editing", markup=False)
        prompt = Prompt(History(), draft, id="prompt")
        yield prompt.attached
        yield prompt.completions
        yield prompt
        yield Keys(show_command_palette=True)

    async def on_mount(self) -> None:
        self.query_one("#editing").display = False
        self.query_one(RoundsRow).display = self.prefs.show_rounds
        self.set_class(not self.prefs.show_panel, "-no-panel")
        self.strip.speculate = self.session.params.speculate
        await self.show_conversation()

    def on_resize(self) -> None:
        for name, holds in (("-beside", self.beside), ("-tabs", not self.beside)):
            self.set_class(holds, name)
        self.show_sidebar()
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
                record = self._known.get((session.id, number))
                if record is None:
                    record = Record(self._title_of(index))
                    if message.stats is not None:
                        record.restore(message.stats)
                views.append(
                    AssistantMessage(
                        index,
                        self.speaker,
                        message.content,
                        reasoning=message.reasoning,
                        record=record,
                        view=self.view,
                        foot=unfinished(message),
                    )
                )
            views[-1].version = session.version(index)
        await self.transcript.fill(views, None if views else self._welcome())
        self.count_context()
        self.show_sidebar()

    def show_sidebar(self) -> None:
        """List the conversations beside this one, where there is room and they are wanted."""
        shown = self.size.width >= SIDEBAR and self.prefs.show_sidebar
        self.set_class(shown, "-sidebar")
        if shown:
            self.query_one(Sidebar).show(self.session.id)

    def on_screen_resume(self) -> None:
        self.show_sidebar()  # another page may have changed the list

    def _welcome(self) -> Widget:
        """What an empty conversation shows, for the first time what this is about."""
        if self.prefs.first_look and self.keeper.possible:
            from specllama.tui.widgets.first_look import FirstLook

            self.prefs.first_look = False
            self.prefs.save()
            self._demonstrate()
            return FirstLook(self.keeper, id="welcome")
        return Welcome(model_chosen=self.keeper.possible, id="welcome")

    def _demonstrate(self) -> None:
        """Let the very first conversation draft where it does not pay, so that drafting is seen."""
        params = self.session.params
        if self.keeper.bundled and params == params.replace(**USUAL_DRAFTING):
            self.session.lend(params.replace(window="fixed", draft_max=DEMONSTRATION))

    def count_context(self) -> None:
        """How much of the context the conversation takes, from the counters of its last reply.

        If the last message is not a reply, nobody has counted: the strip says so.
        """
        messages = self.session.messages
        record = self.records.get(len(messages) - 1)
        if not messages:
            self.strip.used = 0
        elif messages[-1].role == "assistant" and record is not None and record.finished:
            self.strip.used = record.finished.prompt_n + len(record.finished.token_ids)
        else:
            self.strip.used = None
        self.refresh_strip()

    def latest_record(self) -> Record | None:
        with_rounds = [i for i, record in self.records.items() if record.rounds]
        return self.records[max(with_rounds)] if with_rounds else None

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
        try:
            text = self.prompt.with_files(event.text[event.text.startswith("//") :])
        except UsageError as error:
            self.warn(error)
            return
        if self.editing is not None:
            index = self.editing
            self._stop_editing(restore=False)
            self.prompt.sent()
            self.when_idle(lambda: self._resend(index, text))
            return
        if self.busy or not self.keeper.ready:
            if not self.keeper.possible:
                self.notify("Choose a model first: F6", severity="warning")
                return
            self.query_one(Waiting).put(text)
            self.prompt.sent()
            if self.keeper.failed:
                self.keeper.load()
            return
        self.prompt.sent()
        await self._send(text)

    async def _send(self, text: str) -> None:
        index = len(self.session.messages)
        await self.begin(
            lambda cancel: self.session.send(text, cancel=cancel),
            UserMessage(index, text),
            AssistantMessage(index + 1, self.speaker, view=self.view, live=True),
        )
        self.show_sidebar()

    # ------------------------------------------------------------------ the queue

    @property
    def queue(self) -> deque[str]:
        return self.query_one(Waiting).texts

    async def send_queued(self) -> None:
        if self.queue and not self.busy and self.keeper.ready:
            await self._send(self.query_one(Waiting).take())

    def take_back_queue(self) -> None:
        """Queued messages go back to the prompt, before what is being typed there."""
        if self.queue:
            self.prompt.put_before(self.query_one(Waiting).take_all())

    async def turn_ended(self, failed: bool) -> None:
        self.show_sidebar()
        if failed:
            self.take_back_queue()
        else:
            await self.send_queued()

    # ------------------------------------------------------------------ actions

    @property
    def beside(self) -> bool:
        """Whether the panel stands beside the conversation; else both are tabs."""
        return self.size.width >= keymap.BESIDE

    def action_panel(self) -> None:
        """Show or hide the panel; where there is no room beside it, change the tab."""
        if self.beside:
            self.prefs.show_panel = not self.prefs.show_panel
            self.set_class(not self.prefs.show_panel, "-no-panel")
        else:
            self.toggle_class("-figures")
            self.query_one(PanelTabs).refresh()

    def action_sidebar(self) -> None:
        """Into the list of conversations, or hide it from there; where it has no room, its page."""
        if self.size.width < SIDEBAR:
            self.post_message(ActionAsked("sessions"))
            return
        inside = self.query_one(Sidebar).has_focus_within
        self.prefs.show_sidebar = not inside
        self.show_sidebar()
        if inside:
            self.prompt.focus()
        else:
            self.query_one("#conversations").focus()

    @on(Sidebar.Left)
    def _left_sidebar(self) -> None:
        self.prompt.focus()

    @on(PanelTabs.Chosen)
    def _tab_chosen(self, event: PanelTabs.Chosen) -> None:
        self.set_class(event.figures, "-figures")
        self.query_one(PanelTabs).refresh()

    def action_page(self, step: int) -> None:
        self.transcript.page(step)

    def action_to_end(self) -> None:
        self.transcript.to_end()

    @on(Scrolled)
    def _scrolled(self) -> None:
        self.mark_end()

    def action_stop(self) -> None:
        if self.editing is not None:
            self._stop_editing(restore=True)
        elif self.queue and self.turn is None:
            self.take_back_queue()
        elif self.turn is not None:
            self.turn.cancel()
            self.take_back_queue()
        if not self.prompt.has_focus:
            self.prompt.focus()

    def action_retry(self) -> None:
        self.when_idle(self._retry)

    def action_reseed(self) -> None:
        self.when_idle(lambda: self._retry(new_seed=True))

    async def _retry(self, index: int | None = None, *, new_seed: bool = False) -> None:
        """Answer the question at or before ``index`` again, the last one unless given."""
        messages = self.session.messages
        last = len(messages) - 1 if index is None else min(index, len(messages) - 1)
        asked = max((i for i in range(last + 1) if messages[i].role == "user"), default=None)
        if asked is None:
            self.notify("There is no reply to write again yet")
            return
        await self.transcript.truncate(asked + 1)
        await self.begin(
            lambda cancel: self.session.retry(asked, new_seed=new_seed, cancel=cancel),
            None,
            AssistantMessage(asked + 1, self.speaker, view=self.view, live=True),
        )

    def action_continue(self) -> None:
        self.when_idle(self._continue)

    async def _continue(self, answer: bool = False) -> None:
        views = self.transcript.messages
        if not views or not isinstance(views[-1], AssistantMessage):
            self.notify("There is no reply to continue")
            return
        await self.begin(
            lambda cancel: self.session.continue_reply(answer=answer, cancel=cancel),
            None,
            views[-1],
        )

    def action_answer_now(self) -> None:
        """End the thought that is being written, or one that was cut short."""
        messages = self.session.messages
        live = self._live
        if live is None:
            thinking = bool(messages) and bool(messages[-1].reasoning and not messages[-1].content)
        else:
            thinking = not live.text
        if thinking:
            self.when_idle(partial(self._continue, answer=True))
        else:
            self.notify("There is no open thought", timeout=2)

    async def _resend(self, index: int, text: str) -> None:
        messages = self.session.messages
        if index >= len(messages):
            await self._send(text)
            return
        await self.transcript.truncate(index)
        if messages[index].role == "user":
            await self.begin(
                lambda cancel: self.session.edit(index, text, cancel=cancel),
                UserMessage(index, text),
                AssistantMessage(index + 1, self.speaker, view=self.view, live=True),
            )
            return
        try:
            for _ in self.session.edit(index, text):
                pass
        except UsageError as error:
            await self.failed(error)
            return
        await self.transcript.add(
            AssistantMessage(
                index,
                self.speaker,
                text,
                reasoning=self.session.messages[index].reasoning,
                view=self.view,
                foot=EDITED,
            )
        )
        self.transcript.messages[index].show_version(*self.session.version(index))
        self.count_context()

    def action_undo(self) -> None:
        self.when_idle(self._undo)

    async def _undo(self) -> None:
        try:
            question = self.session.undo()
        except UsageError as error:
            self.notify(error.message, markup=False)
            return
        await self.transcript.truncate(len(self.session.messages))
        if not self.session.messages:
            await self.transcript.fill([], self._welcome())
        self.count_context()
        if not self.prompt.text.strip():
            self.prompt.put_message(question)

    def action_read(self, path: str) -> None:
        """Attach a file to what is being written."""
        try:
            self.prompt.attach_file(attach.unquoted(path))
        except UsageError as error:
            self.warn(error)
            self.prompt.put(f"/read {path}")

    @on(Completions.Taken)
    def _completion_clicked(self) -> None:
        self.prompt.take_completion()

    def action_listed(self, action: str, columns: int) -> None:
        """A key of the footer was pressed or clicked. One without room there is the app's."""
        self.post_message(ActionAsked(action))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether a key has room in the footer, and something to do."""
        if action != "listed":
            return True
        idle = "models" if self.keeper.server else "top"
        return parameters[0] != idle and self.app.size.width >= int(str(parameters[1]))

    async def walk_versions(self, step: int) -> None:
        """Show another version of the focused message, or else of the last one that has several,
        and what was written behind it."""
        view = self.focused if isinstance(self.focused, MessageView) else None
        try:
            if self.busy:
                raise UsageError("a reply is being written: Esc stops it")
            index = self.session.show_version(view.index if view else None, step)
        except UsageError as error:
            self.notify(error.message[0].upper() + error.message[1:], timeout=2, markup=False)
            return
        await self.show_conversation()
        shown = self.transcript.messages[index]
        if view is not None and shown.is_attached:
            shown.focus()

    def action_edit_last(self) -> None:
        messages = self.session.messages
        last = max((i for i, m in enumerate(messages) if m.role == "user"), default=None)
        if last is not None:
            self.start_editing(last)

    def start_editing(self, index: int) -> None:
        messages = self.session.messages
        if index >= len(messages):
            return
        if self.editing is None:
            self._before_edit = self.prompt.full_text
        self.editing = index
        whose = "your message" if messages[index].role == "user" else "the reply"
        line = self.query_one("#editing", Static)
        words = f"Editing {whose}; this version is kept. Enter resends, Esc leaves it."
        if len(words) > self.size.width - 4:  # on a narrow screen the keys matter more
            words = "Editing: Enter resends, Esc leaves it"
        line.update(Content.assemble((words, self.ink.warn)))
        line.display = True
        self.prompt.put_message(messages[index].content)

    def _stop_editing(self, *, restore: bool) -> None:
        self.editing = None
        self.query_one("#editing").display = False
        if restore:
            self.prompt.put(self._before_edit)

    @on(TurnAction)
    def act_on_turn(self, event: TurnAction) -> None:
        """Actions that change the conversation; the app does the rest."""
        index = event.index
        match event.action:
            case "edit":
                self.start_editing(index)
            case "retry":
                self.when_idle(lambda: self._retry(index))
            case "reseed":
                self.when_idle(lambda: self._retry(index, new_seed=True))
            case "continue":
                self.action_continue()
            case "undo":
                self.action_undo()

    async def set_view(self, view: str) -> None:
        self.view = view
        await self.transcript.show_as(view)

    @on(Prompt.Left)
    def _leave_prompt(self) -> None:
        messages = [m for m in self.transcript.messages if m.is_attached]
        if messages:
            messages[-1].focus()
        elif (example := next_example(self.prompt.text)) is not None:
            self.prompt.put(example)

    def on_ink_changed(self, _: InkChanged) -> None:
        for widget in self.query("*"):
            widget.refresh()
        for view in self.transcript.messages:
            if isinstance(view, AssistantMessage) and view.is_attached:
                view.redraw_foot()

    # ------------------------------------------------------------------ saving

    def exports(self) -> list[Export]:
        """The conversation, and the reply in focus or the last one."""
        from specllama.tui import exports

        session, messages = self.session, self.session.messages
        if not messages:
            return []
        forms = {"md": session.export, "json": lambda: session.export("json")}
        found = [exports.Export("The conversation", session.title, forms)]
        replies = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if isinstance(self.focused, MessageView):
            replies = [i for i in replies if i >= self.focused.index][:1]
        if replies:
            at = replies[-1]
            record = self.records.get(at, Record())
            under = exports.Circumstances(self.keeper.info, session.params)
            question, text = messages[at - 1].content if at else "", messages[at].content
            found.append(
                exports.of_document(
                    "The reply",
                    f"{session.title} reply",
                    lambda: exports.reply(record, question, text, under),
                )
            )
        return found

    # ------------------------------------------------------------------ the engine

    def set_params(self, params: GenerateParams) -> None:
        """Takes effect with the next request."""
        self.session.params = params
        self.params_changed()

    def params_changed(self) -> None:
        """The conversation has other settings than before."""
        params = self.session.params
        speculate = params.speculate and params.proposer != "none"
        if speculate != self.strip.speculate:
            # The old reason for the window says nothing about the next reply.
            self.strip.reason, self.strip.window = "", None
        self.strip.speculate = speculate
        self.refresh_strip()

    def engine_loading(self) -> None:
        self.prompt.count_with(None)
        self.refresh_top()
        if self.busy:
            # The engine died and is restarted for this request.
            self.strip.loading = loading_words(self.keeper.progress)
            self.refresh_strip()

    async def engine_ready(self, info: EngineInfo) -> None:
        self.session.engine = self.keeper.host
        self.prompt.count_with(self.keeper.host.count_tokens)
        if (pair := _files(info)) != self._loaded:
            self._loaded = pair
            self._forget_measures(info)
        self.refresh_top()
        for view in self.transcript.messages:
            if isinstance(view, AssistantMessage) and view.speaker == UNNAMED:
                view.speak_as(self.speaker)
        self.strip.loading = ""
        self.refresh_strip()
        if self.queue:
            await self.send_queued()

    async def engine_failed(self, event: EngineFailed) -> None:
        """Say in one note that a load failed, or that the previous pair is back."""
        self.prompt.count_with(None)
        self.strip.loading = ""
        if event.kept and self.keeper.info is not None:
            name = sanitize_line(self.keeper.info.target.name)
            next_step = f"back to {name}: the conversation continues with it"
        else:
            next_step = "/reload or your next message tries again"
            if not self.keeper.server:
                next_step = f"F6 chooses another pair; {next_step}"
            self.take_back_queue()
        await self.failed(event.error, next_step, self.again)
        self.refresh_top()
        self.refresh_strip()

    def _forget_measures(self, info: EngineInfo) -> None:
        """With another pair, what was measured on the old one no longer holds."""
        self.board.runs.clear()
        self.strip.n_ctx = self.prompt.n_ctx = info.target.n_ctx
        self.strip.reason = ""


def unfinished(reply: StoredMessage) -> str:
    """What stands below a reply that was cut short, but was not ended by the one who asked."""
    if reply.state != "partial" or (reply.stats and "reason" in reply.stats):
        return ""
    # What a model wrote has at least its seed.
    return interrupted(reply.stats.get("emitted")) if reply.stats else EDITED


def _files(info: EngineInfo) -> tuple[object, ...]:
    """What figures of an engine rest on: loaded anew, they still hold."""
    models = [model for model in (info.target, info.draft) if model is not None]
    return (
        *((model.path, model.file_bytes, model.n_ctx) for model in models),
        info.device,
        info.threads,
    )

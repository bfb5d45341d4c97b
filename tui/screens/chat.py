"""The chat: the conversation, the strip that shows speculation at work, the prompt; sending, and
changing what was said."""

from __future__ import annotations

from collections import deque
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content
from textual.widgets import Footer, Static

from specllama.errors import UsageError
from specllama.interface import EngineInfo
from specllama.session import Session
from specllama.stats import SpecStats
from specllama.tui import keymap
from specllama.tui.bridge import Pace
from specllama.tui.messages import InkChanged, PromptSubmitted, StorageFailed, TurnAction
from specllama.tui.record import Record, finished_from
from specllama.tui.screens.turn import TurnScreen
from specllama.tui.widgets.message import AssistantMessage, MessageView, UserMessage
from specllama.tui.widgets.prompt import Prompt
from specllama.tui.widgets.rounds import RoundsRow
from specllama.tui.widgets.stats_strip import StatsStrip, WhyLine
from specllama.tui.widgets.transcript import Transcript
from specllama.tui.widgets.waiting import Waiting
from specllama.tui.widgets.welcome import TopBar, Welcome


class ChatScreen(TurnScreen):
    HELP = """
    Type and press Enter; what you send while a reply is being written waits its turn.
    Esc stops a reply at once and keeps what is there.
    """

    AUTO_FOCUS = "#prompt"
    BINDINGS: ClassVar[list[BindingType]] = [*keymap.chat_bindings()]

    def __init__(self, session: Session, pace: Pace) -> None:
        super().__init__(session, pace)
        self.view = self.chat_app.prefs.view
        self.editing: int | None = None
        self._before_edit = ""

    def compose(self) -> ComposeResult:
        app = self.chat_app
        yield TopBar(id="top")
        yield Transcript(id="transcript")
        yield Waiting(id="queue")
        yield RoundsRow(id="rounds")
        yield StatsStrip(self.strip, id="strip")
        yield WhyLine(self.strip, id="why")
        yield Static(id="editing", markup=False)
        yield Prompt(app.history, app.draft_file, id="prompt")
        yield Footer(show_command_palette=True)

    async def on_mount(self) -> None:
        self.query_one("#editing").display = False
        self.query_one(RoundsRow).display = self.chat_app.prefs.show_rounds
        self.strip.speculate = self.session.params.speculate
        await self.show_conversation()

    def on_resize(self) -> None:
        # Six keys need the room that the palette's takes on a narrow screen.
        self.query_one(Footer).show_command_palette = self.size.width >= 72

    # ------------------------------------------------------------------ the conversation

    async def show_conversation(self) -> None:
        """Draw the session as it stands: after a start, a resume, a new chat."""
        self.records.clear()
        views: list[MessageView] = []
        stats = self.chat_app.stored_stats(self.session)
        for index, message in enumerate(self.session.messages):
            if message.role == "user":
                views.append(UserMessage(index, message.content))
                continue
            record = Record(self._title_of(index))
            stored = stats.get(index)
            if stored is not None:
                record.finished = finished_from(stored)
            self.records[index] = record
            views.append(
                AssistantMessage(
                    index,
                    self.speaker,
                    message.content,
                    record=record,
                    view=self.view,
                )
            )
        await self.transcript.fill(views, Welcome(id="welcome"))
        self.query_one(RoundsRow).clear()
        self.count_context()

    def count_context(self) -> None:
        """What the conversation as it stands takes of the context, from its last reply's counters.

        Where the last message is another, nobody has counted: the strip says so.
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
            self.notify(f"{error.message}: {error.hint}", severity="warning", markup=False)
            return
        if command is not None:
            self.prompt.sent()
            await self.chat_app.run_chat_action(command.action)
            return
        text = event.text[1:] if event.text.startswith("//") else event.text
        if self.editing is not None:
            index = self.editing
            self._stop_editing(restore=False)
            self.prompt.sent()
            self.when_idle(lambda: self._resend(index, text))
            return
        if self.busy or not self.chat_app.engine_ready:
            if not self.chat_app.engine_possible:
                self.notify("Choose a model first: F6", severity="warning")
                return
            self.query_one(Waiting).put(text)
            self.prompt.sent()
            if self.chat_app.load_failed:
                self.chat_app.load()
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

    # ------------------------------------------------------------------ the queue

    @property
    def queue(self) -> deque[str]:
        return self.query_one(Waiting).texts

    async def send_queued(self) -> None:
        if self.queue and not self.busy and self.chat_app.engine_ready:
            await self._send(self.query_one(Waiting).take())

    def take_back_queue(self) -> None:
        """What waited goes back to the prompt, before what is being written there."""
        if not self.queue:
            return
        waiting, now = self.query_one(Waiting).take_all(), self.prompt.full_text
        self.prompt.put(f"{waiting}\n\n{now}" if now.strip() else waiting)

    async def turn_ended(self, failed: bool) -> None:
        if failed:
            self.take_back_queue()
        else:
            await self.send_queued()

    # ------------------------------------------------------------------ actions

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
        """Answer the question at or before ``index`` again, the last one unless given; what came
        later goes."""
        messages = self.session.messages
        last = len(messages) - 1 if index is None else min(index, len(messages) - 1)
        asked = max((i for i in range(last + 1) if messages[i].role == "user"), default=None)
        if asked is None:
            self.notify("There is nothing to write again yet")
            return
        await self.transcript.truncate(asked + 1)
        await self.begin(
            lambda cancel: self.session.retry(asked, new_seed=new_seed, cancel=cancel),
            None,
            AssistantMessage(asked + 1, self.speaker, view=self.view, live=True),
        )

    def action_continue(self) -> None:
        self.when_idle(self._continue)

    async def _continue(self) -> None:
        views = self.transcript.messages
        if not views or not isinstance(views[-1], AssistantMessage):
            self.notify("There is no reply to continue")
            return
        await self.begin(lambda cancel: self.session.continue_reply(cancel=cancel), None, views[-1])

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
            await self.transcript.failed(error)
            return
        await self.transcript.add(
            AssistantMessage(
                index, self.speaker, text, view=self.view, foot="edited: C continues from here"
            )
        )
        self.records.pop(index, None)
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
            await self.transcript.fill([], Welcome(id="welcome"))
        self.count_context()
        if not self.prompt.text.strip():
            self.prompt.put(question)

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
        later = len(messages) - index - 1
        lost = f"; the {later} after it will go" if later else ""
        line = self.query_one("#editing", Static)
        words = f"Editing {whose}{lost}. Enter resends, Esc leaves it."
        if len(words) > self.size.width - 4:  # the keys matter more than what goes
            words = f"Editing, {later} later go: Enter resends, Esc leaves it"
        line.update(Content.assemble((words, self.ink.warn)))
        line.display = True
        self.prompt.put(messages[index].content)

    def _stop_editing(self, *, restore: bool) -> None:
        self.editing = None
        self.query_one("#editing").display = False
        if restore:
            self.prompt.put(self._before_edit)

    @on(TurnAction)
    async def act_on_turn(self, event: TurnAction) -> None:
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
            case "inspect":
                record = self.records.get(index) or self.records.get(index + 1)
                self.chat_app.inspect(record)
            case "view":
                await self.chat_app.run_chat_action("cycle_view")
            case "copy":
                self.chat_app.copy_text(self.session.messages[index].content)
            case "copy_code":
                self.chat_app.copy_code(self.session.messages[index].content)

    async def set_view(self, view: str) -> None:
        self.view = view
        await self.transcript.show_as(view)

    @on(Prompt.Left)
    def _leave_prompt(self) -> None:
        messages = [m for m in self.transcript.messages if m.is_attached]
        if messages:
            messages[-1].focus()

    @on(StorageFailed)
    def _storage_failed(self, event: StorageFailed) -> None:
        self.chat_app.storage_failed(event)

    def on_ink_changed(self, _: InkChanged) -> None:
        for widget in self.query("*"):
            widget.refresh()
        for view in self.transcript.messages:
            if isinstance(view, AssistantMessage) and view.is_attached:
                view.redraw_foot()

    def engine_changed(self, info: EngineInfo) -> None:
        """Another pair: what was measured on the old one no longer holds."""
        self.strip.meter.clear()
        self.strip.total = SpecStats()
        self.query_one(RoundsRow).clear()
        self.strip.window = self.strip.ttft_ms = None
        self.strip.n_ctx = info.target.n_ctx
        self.strip.loading = ""
        self.strip.reason = ""
        self.refresh_top()
        self.refresh_strip()

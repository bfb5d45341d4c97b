"""The chat: the conversation, the strip that shows speculation at work, the prompt."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar, cast

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Footer, Static

from specllama.errors import SpecllamaError, UsageError
from specllama.events import Event
from specllama.interface import EngineInfo
from specllama.session import Session
from specllama.text import sanitize_line
from specllama.tui import keymap
from specllama.tui.bridge import Batch, Pace, Turn, processor
from specllama.tui.messages import (
    InkChanged,
    PromptSubmitted,
    StorageFailed,
    TurnAction,
    TurnWoke,
)
from specllama.tui.record import Record, finished_from
from specllama.tui.screens.inspector import InspectorScreen
from specllama.tui.widgets.base import Inked
from specllama.tui.widgets.message import AssistantMessage, MessageView, UserMessage
from specllama.tui.widgets.prompt import Prompt
from specllama.tui.widgets.rounds import RoundsRow
from specllama.tui.widgets.stats_strip import StatsStrip, StripState, WhyLine
from specllama.tui.widgets.transcript import Transcript
from specllama.tui.widgets.welcome import TopBar, Welcome

if TYPE_CHECKING:
    from specllama.tui.app import SpecllamaApp

QUEUE_SHOWN = 60


class ChatScreen(Inked, Screen[None]):
    HELP = """
    Type and press Enter; what you send while a reply is being written waits its turn.
    Esc stops a reply at once and keeps what is there.
    """

    AUTO_FOCUS = "#prompt"
    BINDINGS: ClassVar[list[BindingType]] = [*keymap.chat_bindings()]

    def __init__(self, session: Session, pace: Pace) -> None:
        super().__init__()
        self.session = session
        self.pace = pace
        self.strip = StripState()
        self.turn: Turn | None = None
        self.queue: deque[str] = deque()
        self.records: dict[int, Record] = {}
        self.view = self.chat_app.prefs.view
        self.editing: int | None = None
        self._live: AssistantMessage | None = None
        self._live_index = 0
        self._timer: Timer | None = None
        self._used_by_last: float | None = None  # processor seconds at the flush before
        self._after_turn: Callable[[], None] | None = None
        self._prompt_n = 0

    @property
    def chat_app(self) -> SpecllamaApp:
        return cast("SpecllamaApp", self.app)

    def compose(self) -> ComposeResult:
        app = self.chat_app
        yield TopBar(id="top")
        yield Transcript(id="transcript")
        yield Static(id="queue", markup=False)
        yield RoundsRow(id="rounds")
        yield StatsStrip(self.strip, id="strip")
        yield WhyLine(self.strip, id="why")
        yield Static(id="editing", markup=False)
        yield Prompt(app.history, app.draft_file, id="prompt")
        yield Footer(show_command_palette=True)

    async def on_mount(self) -> None:
        self.query_one("#queue").display = False
        self.query_one("#editing").display = False
        self.query_one(RoundsRow).display = self.chat_app.prefs.show_rounds
        self.strip.speculate = self.session.params.speculate
        await self.show_conversation()

    def on_resize(self) -> None:
        # Six keys need the room that the palette's takes on a narrow screen.
        self.query_one(Footer).show_command_palette = self.size.width >= 72

    # ------------------------------------------------------------------ parts

    @property
    def transcript(self) -> Transcript:
        return self.query_one(Transcript)

    @property
    def prompt(self) -> Prompt:
        return self.query_one("#prompt", Prompt)

    @property
    def busy(self) -> bool:
        return self.turn is not None

    def refresh_strip(self) -> None:
        self.strip.busy = self.busy
        self.strip.on_full = self.session.params.on_full
        self.query_one(StatsStrip).refresh()
        self.prompt.border_subtitle = (
            "Esc stops, Enter waits its turn" if self.busy else "Enter sends, Ctrl+J new line"
        )
        why = self.query_one(WhyLine)
        why.set_class(why.is_warning, "-warning")
        why.refresh()

    def refresh_top(self) -> None:
        self.query_one(TopBar).refresh()

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
        self.strip.used = 0
        self.query_one(RoundsRow).clear()
        self.refresh_strip()

    @property
    def speaker(self) -> str:
        info = self.chat_app.engine_info
        return info.target.name if info is not None else "assistant"

    def _title_of(self, index: int) -> str:
        messages = self.session.messages
        question = next(
            (m.content for m in reversed(messages[:index]) if m.role == "user"), "reply"
        )
        line = " ".join(question.split())
        return line if len(line) <= 60 else line[:59] + "…"

    def latest_record(self) -> Record | None:
        with_rounds = [i for i, record in self.records.items() if record.rounds]
        return self.records[max(with_rounds)] if with_rounds else None

    # ------------------------------------------------------------------ sending

    @on(PromptSubmitted)
    async def submit(self, event: PromptSubmitted) -> None:
        command = keymap.slash_command(event.text)
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
            self.queue.append(text)
            self.prompt.sent()
            self._show_queue()
            return
        self.prompt.sent()
        await self._send(text)

    async def _send(self, text: str) -> None:
        index = len(self.session.messages)
        await self._begin(
            lambda cancel: self.session.send(text, cancel=cancel),
            UserMessage(index, text),
            AssistantMessage(index + 1, self.speaker, view=self.view, live=True),
        )

    async def _begin(
        self,
        ask: Callable[[threading.Event], Iterator[Event]],
        question: UserMessage | None,
        reply: AssistantMessage,
    ) -> None:
        cancel = threading.Event()
        try:
            events = ask(cancel)
        except SpecllamaError as error:
            await self.transcript.failed(error)
            return
        if question is not None:
            await self.transcript.add(question)
        record = reply.record
        record.title = self._title_of(reply.index)
        self.records[reply.index] = record
        if reply.is_attached:
            reply.live = True
            await reply.restart()
        else:
            await self.transcript.add(reply)
        self._live, self._live_index = reply, reply.index
        self.query_one(RoundsRow).clear()
        self.strip.prefill = None
        self.turn = Turn(events, cancel, self._wake)
        self.turn.start()
        self._used_by_last = None
        self.refresh_strip()
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_timer(self.pace.period_s, self._flush) if self.turn else None

    def _wake(self) -> None:
        self.post_message(TurnWoke())

    @on(TurnWoke)
    async def _woken(self) -> None:
        await self._flush()

    async def _flush(self) -> None:
        turn = self.turn
        if turn is None:
            return
        batch = turn.drain()
        if batch:
            await self._show(batch)
        if batch.ended:
            await self._ended(batch)
            return
        # From flush to flush, because layout and drawing come some time after the flush itself.
        now = processor()
        if self._used_by_last is not None:
            self.pace.observe(now - self._used_by_last)
        self._used_by_last = now
        self.call_after_refresh(self._flushed)

    def _flushed(self) -> None:
        if self.turn is not None:
            self._schedule()

    async def _show(self, batch: Batch) -> None:
        live, strip = self._live, self.strip
        assert live is not None
        record = live.record
        if batch.started is not None:
            record.started = batch.started
            strip.n_ctx = batch.started.n_ctx
            self._prompt_n = strip.used = batch.started.prompt_n
            strip.source = batch.started.proposer
        if batch.prefill is not None:
            strip.prefill = batch.prefill if not record.rounds and not batch.rounds else None
        if batch.load is not None:
            strip.loading = f"loading {batch.load.role} {100 * batch.load.fraction:.0f}%"
        if batch.rounds:
            strip.prefill, strip.loading = None, ""
            record.add(batch.rounds)
            for done in batch.rounds:
                strip.meter.observe(done)
                strip.total.observe(done)
                if done.index == 0:
                    strip.ttft_ms = 1000 * done.t_s
            last = batch.rounds[-1]
            strip.window = last.draft_max
            strip.reason = last.window_reason
            strip.source = last.source
            strip.used = self._prompt_n + record.stats.emitted
            self.query_one(RoundsRow).extend(batch.rounds)
        for notice in batch.notices:
            if notice.level == "warning":
                await self.transcript.note(notice.message)
            elif notice.message:
                strip.reason = notice.message
        if batch.finished is not None:
            record.finished = batch.finished
            strip.ttft_ms = batch.finished.timings.ttft_ms or strip.ttft_ms
        await live.stream(batch.text, batch.rounds)
        self.refresh_strip()
        if batch.rounds:
            for screen in self.app.screen_stack:
                if isinstance(screen, InspectorScreen) and screen.record is record:
                    screen.rounds_added()

    async def _ended(self, batch: Batch) -> None:
        live = self._live
        assert live is not None
        self.strip.prefill, self.strip.loading = None, ""
        messages = self.session.messages
        if live.index < len(messages):
            foot = "interrupted: C continues, R writes it again" if batch.error else ""
            await live.settle(messages[live.index].content, foot=foot)
        else:
            # Nothing was said. If even the question was refused, it goes back to the prompt.
            if live.index - 1 >= len(messages) and not self.prompt.text:
                asked = self.transcript.messages[live.index - 1]
                self.prompt.put(asked.text)
            await self.transcript.truncate(len(messages))
            if batch.finished is not None and batch.error is None:
                cancelled = batch.finished.reason == "cancelled"
                await self.transcript.note(
                    "Stopped before the first token." if cancelled else "The reply is empty."
                )
            self.records.pop(live.index, None)
        if batch.error is not None:
            await self.transcript.failed(batch.error)
            self.chat_app.engine_trouble(batch.error)
        elif batch.finished is not None and batch.finished.reason == "context":
            await self.transcript.note(
                "The context is full, so the reply stops here.",
                "Ctrl+N begins a new chat; F8 can let the oldest turns go instead (on full: shift)",
            )
        # Not before everything is drawn: what waits for the end of the turn finds it complete.
        self.turn = self._live = None
        self.refresh_strip()
        then, self._after_turn = self._after_turn, None
        if then is not None:
            then()
        elif self.queue and batch.error is None:
            await self.send_queued()
        elif self.queue:
            self._queue_to_prompt()

    # ------------------------------------------------------------------ the queue

    async def send_queued(self) -> None:
        if self.queue and not self.busy and self.chat_app.engine_ready:
            text = self.queue.popleft()
            self._show_queue()
            await self._send(text)

    def _queue_to_prompt(self) -> None:
        waiting = "\n\n".join(self.queue)
        self.queue.clear()
        self._show_queue()
        now = self.prompt.full_text
        self.prompt.put(f"{waiting}\n\n{now}" if now.strip() else waiting)

    def _show_queue(self) -> None:
        line = self.query_one("#queue", Static)
        line.display = bool(self.queue)
        if self.queue:
            first = sanitize_line(self.queue[0])
            first = first if len(first) <= QUEUE_SHOWN else first[: QUEUE_SHOWN - 1] + "…"
            more = f" and {len(self.queue) - 1} more" if len(self.queue) > 1 else ""
            ink = self.ink
            line.update(
                Content.assemble(
                    ("waiting: ", ink.muted), first, (f"{more}  (Esc takes it back)", ink.muted)
                )
            )

    # ------------------------------------------------------------------ actions

    def when_idle(self, then: Callable[[], object]) -> None:
        """Run now, or stop the reply first and run as soon as it has ended."""

        def run() -> None:
            self.call_next(then)

        if self.turn is None:
            run()
        else:
            self._after_turn = run
            self.turn.cancel()

    def action_stop(self) -> None:
        if self.editing is not None:
            self._stop_editing(restore=True)
        elif self.queue and self.turn is None:
            self._queue_to_prompt()
        elif self.turn is not None:
            self.turn.cancel()
            if self.queue:
                self._queue_to_prompt()
        if not self.prompt.has_focus:
            self.prompt.focus()

    def action_retry(self) -> None:
        self.when_idle(self._retry)

    async def _retry(self) -> None:
        messages = self.session.messages
        if not messages:
            self.notify("There is nothing to write again yet")
            return
        keep = len(messages) - (messages[-1].role == "assistant")
        await self.transcript.truncate(keep)
        await self._begin(
            lambda cancel: self.session.retry(cancel=cancel),
            None,
            AssistantMessage(keep, self.speaker, view=self.view, live=True),
        )

    def action_continue(self) -> None:
        self.when_idle(self._continue)

    async def _continue(self) -> None:
        views = self.transcript.messages
        if not views or not isinstance(views[-1], AssistantMessage):
            self.notify("There is no reply to continue")
            return
        await self._begin(
            lambda cancel: self.session.continue_reply(cancel=cancel), None, views[-1]
        )

    async def _resend(self, index: int, text: str) -> None:
        messages = self.session.messages
        if index >= len(messages):
            await self._send(text)
            return
        await self.transcript.truncate(index)
        if messages[index].role == "user":
            await self._begin(
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
                self.when_idle(lambda: self._again_from(index))
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

    async def _again_from(self, index: int) -> None:
        """Answer the question at or before ``index`` anew; what came later goes."""
        messages = self.session.messages
        at = max(
            (i for i in range(min(index, len(messages) - 1) + 1) if messages[i].role == "user"),
            default=None,
        )
        if at is None:
            return
        if at >= len(messages) - 2:
            await self._retry()
        else:
            await self._resend(at, messages[at].content)

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
        self.strip.n_ctx = info.target.n_ctx
        self.strip.loading = ""
        self.strip.reason = ""
        self.refresh_top()
        self.refresh_strip()

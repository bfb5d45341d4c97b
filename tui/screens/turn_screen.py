"""A reply from the request to its last word.

The turn's thread is drained at the screen's pace into the live message, the row of rounds and the
strip.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from inspect import isawaitable
from typing import Any

from textual import on
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Static

from specllama.cancel import Cancel
from specllama.errors import EngineDied, SpecllamaError
from specllama.events import Event, Started
from specllama.replies import attach
from specllama.session import Session
from specllama.settings.params import GenerateParams
from specllama.store.message_tree import StoredMessage
from specllama.text import number_of
from specllama.tui import advice
from specllama.tui.bridge import Drained, FlushPace, Rest, RunningTurn, processor
from specllama.tui.loader import EngineLoader, loading_words
from specllama.tui.messages import (
    EngineFailed,
    EngineGone,
    EngineReady,
    RecordGrew,
    Scrolled,
    TurnWoke,
)
from specllama.tui.record import Record
from specllama.tui.screens.page import Page
from specllama.tui.state import VIEWS, DraftFile, PromptHistory
from specllama.tui.widgets.above_prompt import Waiting
from specllama.tui.widgets.drafted import RoundsRow
from specllama.tui.widgets.inked import Inked
from specllama.tui.widgets.message import AssistantMessage, MessageView, UserMessage
from specllama.tui.widgets.panel import LivePanel
from specllama.tui.widgets.prompt import Prompt
from specllama.tui.widgets.stats_strip import StatsStrip, StripState
from specllama.tui.widgets.transcript import Transcript
from specllama.tui.widgets.welcome import TopBar

EDITED = "edited"
NO_TEMPLATE = "a base model: it continues text, Esc stops it"
UNNAMED = "assistant"  # who wrote a reply, before any model is loaded


def interrupted(tokens: int | None = None) -> str:
    """Return the line below a reply that an error, or the end of the app, cut short."""
    return f"interrupted after {number_of(tokens, 'token')}" if tokens else "interrupted"


def unfinished(reply: StoredMessage) -> str:
    """Return the line below a reply that was cut short, but not by the user."""
    if reply.state != "partial" or (reply.stats and "reason" in reply.stats):
        return ""
    # What a model wrote has at least its seed.
    return interrupted(reply.stats.get("emitted")) if reply.stats else EDITED


class TurnScreen(Inked, Screen[None]):
    """A screen with a transcript, a strip and a prompt on which one turn at a time can run."""

    def __init__(self, session: Session, loader: EngineLoader, pace: FlushPace) -> None:
        super().__init__()
        self.session = session
        self.loader = loader
        self.pace = pace
        self.strip = StripState()
        self.top_bar = TopBar(loader, id="top")
        self.transcript = Transcript(id="transcript")
        self.rounds_row = RoundsRow(id="rounds")
        self.strip_line = StatsStrip(self.strip, id="strip")
        self.panel = LivePanel(
            self.strip,
            self.shown_record,
            lambda: self.loader.info,
            here=not loader.server,
            id="panel",
        )
        self.editing_line = Static(id="editing", markup=False)
        draft = DraftFile()
        self.waiting, self.prompt = Waiting(draft, id="queue"), Prompt(PromptHistory(), draft)
        self.view = "text"  # as what replies are shown
        self.turn: RunningTurn | None = None
        self.live: AssistantMessage | None = None  # the reply that is being written
        self._timer: Timer | None = None
        self._used_by_last: float | None = None  # processor seconds at the flush before
        self._strip_rest, self._panel_rest = Rest(pace.figures_s), Rest(2 * pace.figures_s)
        self._held = self._owed = False  # painting waits; something is to be painted
        self._after_turn: deque[Callable[[], object]] = deque()
        self._prompt_n = 0
        self._question: UserMessage | None = None  # what the running turn was asked
        self._before: list[int] | None = None  # the path before a turn that adds to it
        self._known: dict[tuple[str | None, int], Record] = {}  # by conversation and number

    def begun(self, started: Started) -> None:
        """Note that the engine has taken the turn's request."""
        raise NotImplementedError

    async def turn_ended(self, failed: bool) -> None:
        """Act on the end of a turn after which none is queued."""
        raise NotImplementedError

    async def show_conversation(self) -> None:
        """Draw the session as it stands."""
        raise NotImplementedError

    # ------------------------------------------------------------------ parts

    @property
    def here(self) -> MessageView | None:
        """The message in focus, on which keys act."""
        return self.focused if isinstance(self.focused, MessageView) else None

    @property
    def busy(self) -> bool:
        return self.turn is not None

    @property
    def records(self) -> dict[int, Record]:
        """The records of the replies, by the place of their message."""
        views = self.transcript.messages
        return {v.index: v.record for v in views if isinstance(v, AssistantMessage)}

    def shown_record(self) -> Record | None:
        """Return the record of the reply in focus, else of the one that is being written, else of
        the last one."""
        if isinstance(self.here, AssistantMessage):
            return self.here.record
        records = self.records
        return records[max(records)] if records else None

    @property
    def live_record(self) -> Record | None:
        """The record of the reply that is being written."""
        return self.live.record if self.live is not None else None

    def _record_of(self, index: int, number: int) -> Record:
        """Return the record of the reply at ``index``, which is stored as ``number``."""
        record = self._known.get((self.session.id, number))
        if record is None:
            record = Record(self._title_of(index))
            stats = self.session.stored[number].stats
            if stats is not None:
                record.restore(stats)
        return record

    def refresh_strip(self) -> None:
        self.refresh_figures()
        self.panel.refresh()

    def refresh_figures(self) -> None:
        """Draw all figures except the panel's."""
        strip = self.strip
        strip.busy = self.busy
        strip.on_full = self.session.params.on_full
        strip.demonstration = self.session.lent
        if (record := self.shown_record()) is not strip.record:
            strip.record = record
            self.panel.refresh()  # they show one reply
            self.rounds_row.clear()
            self.rounds_row.extend(record.rounds if record is not None else ())
        self.rounds_row.refresh()
        self.strip_line.refresh()
        self.set_class(record is None, "-new")
        self.set_class(record is None or not record.stats.drafted, "-unguessed")
        keys = "Esc stops, Enter queues" if self.busy else "Enter sends, Ctrl+J new line"
        if keys != self.prompt.border_subtitle:  # setting it draws the prompt anew
            self.prompt.border_subtitle = keys
        self.call_after_refresh(self.mark_prompt)  # once what was written has its place

    def set_params(self, params: GenerateParams) -> None:
        """Set the parameters from the next request on."""
        self.session.params = params
        self.params_changed()

    def params_changed(self) -> None:
        """Show the conversation's new settings."""
        params = self.session.params
        self.strip.speculate = params.speculate and params.proposer != "none"
        self.refresh_strip()

    def count_context(self) -> None:
        """Count the context tokens that the conversation takes, from its last reply's counters.

        If the last message is not a reply, its tokens were not counted: the strip shows that.
        """
        messages = self.session.messages
        record = self.records.get(len(messages) - 1)
        if not messages:
            self.strip.used = 0
        elif messages[-1].role == "assistant" and record is not None and record.finished:
            self.strip.used = record.finished.used
        else:
            self.strip.used = None
        self.refresh_strip()

    @on(Scrolled)
    def mark_prompt(self) -> None:
        """Show above the prompt that there is more below the visible part, and that replies are
        not shown as text."""
        below = not self.transcript.at_end
        words = "new text below" if self.busy else "more below"
        marks = [f"↓ {words}: Ctrl+End"] if below else []
        marks += [f"{VIEWS[self.view]}: F2"] if self.view != "text" else []
        title = " · ".join(marks)
        if title != self.prompt.border_title:
            self.prompt.border_title = title

    async def failed(self, error: SpecllamaError, *next_steps: str) -> None:
        """Show a failure in the conversation; see ``Transcript.failed``."""
        await self.transcript.failed(error, *next_steps, server=bool(self.loader.server))

    def warn(self, error: SpecllamaError) -> None:
        words = advice.said(error, server=bool(self.loader.server))
        self.notify(words, severity="warning", markup=False)

    def refresh_top(self) -> None:
        self.top_bar.refresh()

    @property
    def speaker(self) -> str:
        info = self.loader.info
        return info.target.name if info is not None else UNNAMED

    def _title_of(self, index: int) -> str:
        asked = ["reply", *(m.content for m in self.session.messages[:index] if m.role == "user")]
        line = " ".join(attach.split(asked[-1])[0].split())
        return line if len(line) <= 60 else line[:59] + "…"

    @property
    def again(self) -> str:
        """The hint on asking a question again that has no reply."""
        open = [m for m in self.session.messages[-1:] if m.role == "user"]
        return "Ctrl+R asks again" if open else ""

    def when_idle(self, then: Callable[[], object]) -> None:
        """Stop the reply, then run this; several run in the order in which they were asked for."""
        self._after_turn.append(then)
        self.call_next(self._go_on)

    async def _go_on(self) -> None:
        while self._after_turn and self.turn is None:
            done = self._after_turn.popleft()()
            if isawaitable(done):
                await done
        if self.turn is None:
            await self.turn_ended(failed=False)
        elif self._after_turn:
            self.turn.cancel()

    def show_versions(self) -> None:
        """Show which version each message is, of how many; the last that has several is the one
        whose versions the keys go through."""
        views = self.transcript.messages
        found = [self.session.version(view.index) for view in views]
        last = max((i for i, (_, count) in enumerate(found) if count > 1), default=None)
        for i, (view, (number, count)) in enumerate(zip(views, found, strict=True)):
            view.show_version(number, count, walked=i == last)
            if isinstance(view, AssistantMessage) and view.last != (i == len(views) - 1):
                view.last = not view.last
                view.redraw_foot()

    # ------------------------------------------------------------------ a turn

    def _reply(self, index: int, text: str = "", **shown: Any) -> AssistantMessage:
        """Return the view of a reply, which is being written unless ``text`` is given."""
        live = not text and not shown
        return AssistantMessage(index, self.speaker, text, view=self.view, live=live, **shown)

    async def begin(
        self,
        ask: Callable[..., Iterator[Event]],
        reply: AssistantMessage,
        question: UserMessage | None = None,
    ) -> None:
        """Ask for a reply and show it as it is written; ``ask`` takes what cancels it."""
        cancel = Cancel()
        goes_on = reply in self.transcript.messages
        self._before = None if goes_on else list(self.session.stored)
        try:
            events = ask(cancel=cancel)
        except SpecllamaError as error:
            if question is not None:
                self.prompt.put_before([question.text])
            await self.failed(error)
            return
        self._question = question
        first = reply if question is None else question
        if not goes_on and first.index < len(self.transcript.messages):
            await self.transcript.truncate(first.index)
        if question is not None:
            await self.transcript.add(question)
        record = reply.record
        record.title = self._title_of(reply.index)
        record.live = True
        if goes_on:
            reply.live = True
            await reply.restart()
        else:
            await self.transcript.add(reply)
        self.show_versions()
        self.live = reply
        self.rounds_row.clear()
        self.strip.prefill, self.strip.notice = None, ""
        self.turn = RunningTurn(events, cancel, lambda: self.post_message(TurnWoke()))
        self.turn.start()
        self._used_by_last = None
        self.refresh_strip()
        self._schedule()

    # ------------------------------------------------------------------ painting

    def _compositor_refresh(self) -> None:
        if self._held:  # new text changes sizes, and then what depends on them: painted at once
            self._owed = True
        else:
            super()._compositor_refresh()

    def _paint(self) -> None:
        self._held = False
        if self._owed:
            self._owed = False
            self._compositor_refresh()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_timer(self.pace.period_s, self._flush) if self.turn else None

    @on(TurnWoke)
    async def _flush(self) -> None:
        turn = self.turn
        if turn is None:
            return
        batch = turn.drain()
        if batch:
            self._held = True
            with self.app.batch_update():
                await self._show(batch)
        if batch.ended:
            self._paint()
            await self._ended(batch)
            return
        if self._strip_rest.over(bool(batch)):
            self.refresh_figures()
        if self._panel_rest.over(bool(batch)):
            self.panel.refresh()
        # From flush to flush: layout and drawing happen some time after the flush itself.
        now = processor()
        if self._used_by_last is not None:
            self.pace.observe(now - self._used_by_last)
        self._used_by_last = now
        self.call_after_refresh(self._flushed)

    def _flushed(self) -> None:
        self.call_after_refresh(self._paint)  # what the new sizes changed is laid out by then
        if self.turn is not None:
            self._schedule()

    async def _show(self, batch: Drained) -> None:
        live, strip = self.live, self.strip
        assert live is not None
        record = live.record
        before = record.stats.emitted
        record.take(batch)
        if batch.started is not None:
            self.begun(batch.started)
            if self._before is not None:
                self.show_versions()
            strip.n_ctx = batch.started.n_ctx
            strip.used = None if batch.started.unknown else batch.started.prompt_n
            # A reply that is continued is part of its own prompt.
            self._prompt_n = batch.started.prompt_n - before
        if batch.prefill is not None:
            strip.prefill = None if record.rounds else batch.prefill
        if batch.load is not None:
            strip.loading = loading_words(batch.load)
        if batch.rounds:
            strip.prefill, strip.loading = None, ""
            strip.used = self._prompt_n + record.stats.emitted
            if strip.record is record:
                self.rounds_row.extend(batch.rounds)
        for notice in batch.notices:
            if notice.topic == "template":
                strip.notice = NO_TEMPLATE
            elif notice.level == "warning":
                await self.transcript.note(notice.message)
            elif notice.message:
                strip.notice = notice.message
        await live.stream(batch.text, batch.rounds, batch.reasoning)
        if batch.rounds:
            self._tell_screens(record)

    def _tell_screens(self, record: Record) -> None:
        for screen in self.app.screen_stack:
            if isinstance(screen, Page):  # Textual's own, below all, would draw everything anew
                screen.post_message(RecordGrew(record))

    async def _ended(self, batch: Drained) -> None:
        live, turn = self.live, self.turn
        assert live is not None
        assert turn is not None
        self.strip.prefill, self.strip.loading = None, ""
        messages = self.session.messages
        path = list(self.session.stored)
        if path == self._before:
            # Nothing came: all is as it was. A question that was refused returns to the prompt.
            if self._question is not None:
                self.prompt.put_before([self._question.text])
            await self.show_conversation()
        elif live.index < len(messages):
            self._known[self.session.id, path[live.index]] = live.record
            foot = interrupted(live.record.stats.emitted) if batch.error else ""
            message = messages[live.index]
            await live.settle(message.content, message.reasoning, foot=foot)
        else:
            await self.transcript.truncate(len(messages))
            if batch.error is None:
                await self.transcript.note("Stopped before the first token.")
        if isinstance(batch.error, EngineDied):
            self.post_message(EngineFailed(batch.error))
        elif batch.error is not None:
            await self.failed(batch.error, self.again)
            self.refresh_top()
        elif turn.finished is not None and turn.finished.reason == "context":
            await self.transcript.note(
                "The context is full, so the reply stops here.",
                "Ctrl+N starts a new chat; F8 can drop the oldest turns instead (when full: shift)",
            )
        if batch.error is None and (self.loader.failed or self.loader.resting):
            # started again for this request
            self.post_message(EngineReady(self.loader.host.info))
        if batch.error is None and (death := self.loader.host.death) is not None:
            self.post_message(EngineGone(death))  # behind the reply's last word
        # Only once everything is drawn: a caller that waits for the end finds it complete.
        self.turn = self.live = None
        live.record.live = False
        self._tell_screens(live.record)
        self.refresh_strip()
        if self._after_turn:
            await self._go_on()
        else:
            await self.turn_ended(failed=batch.error is not None)

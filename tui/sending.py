"""Requests to the engine: messages, waiting ones, and replies written again or further."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from specllama.errors import UsageError
from specllama.tui.editing import Editing
from specllama.tui.screens.turn import EDITED, TurnScreen
from specllama.tui.widgets.message import AssistantMessage, UserMessage
from specllama.tui.widgets.waiting import Waiting


class Sending:
    """The start of turns of a screen's conversation.

    Args:
        sent: called when a message has been sent.
    """

    def __init__(self, screen: TurnScreen, editing: Editing, sent: Callable[[], None]) -> None:
        self._screen = screen
        self._editing = editing
        self._sent = sent

    def _reply(self, index: int) -> AssistantMessage:
        return AssistantMessage(index, self._screen.speaker, view=self._screen.view, live=True)

    # ------------------------------------------------------------------ messages

    async def submit(self, text: str) -> None:
        """Send the typed message, or keep it until the engine is free."""
        screen, loader = self._screen, self._screen.loader
        try:
            text = screen.prompt.with_files(text)
        except UsageError as error:
            screen.warn(error)
            return
        if self._editing.index is not None:
            index = self._editing.index
            self._editing.stop(restore=False)
            screen.prompt.sent()
            screen.when_idle(lambda: self._resend(index, text))
            return
        if screen.busy or not loader.ready:
            if not loader.possible:
                screen.notify("Choose a model first: F6", severity="warning")
                return
            screen.query_one(Waiting).put(text)
            screen.prompt.sent()
            if loader.failed or loader.resting:
                loader.load()
            return
        screen.prompt.sent()
        await self._send(text)

    async def _send(self, text: str) -> None:
        screen = self._screen
        index = len(screen.session.messages)
        await screen.begin(
            lambda cancel: screen.session.send(text, cancel=cancel),
            UserMessage(index, text),
            self._reply(index + 1),
        )
        self._sent()

    async def _resend(self, index: int, text: str) -> None:
        """Send another version of message ``index``; a question is answered anew."""
        screen, session = self._screen, self._screen.session
        if index >= len(session.messages):
            await self._send(text)
            return
        await screen.transcript.truncate(index)
        if session.messages[index].role == "user":
            await screen.begin(
                lambda cancel: session.edit(index, text, cancel=cancel),
                UserMessage(index, text),
                self._reply(index + 1),
            )
            return
        try:
            for _ in session.edit(index, text):
                pass
        except UsageError as error:
            await screen.failed(error)
            return
        reasoning = session.messages[index].reasoning
        await screen.transcript.add(
            AssistantMessage(
                index, screen.speaker, text, reasoning=reasoning, view=screen.view, foot=EDITED
            )
        )
        screen.transcript.messages[index].show_version(*session.version(index))
        screen.count_context()

    # ------------------------------------------------------------------ the queue

    @property
    def queue(self) -> deque[str]:
        return self._screen.query_one(Waiting).texts

    async def send_queued(self) -> None:
        if self.queue and not self._screen.busy and self._screen.loader.ready:
            await self._send(self._screen.query_one(Waiting).take())

    def take_back_queue(self) -> None:
        """Put queued messages back into the prompt, before the text that is being typed there."""
        if self.queue:
            self._screen.prompt.put_before(self._screen.query_one(Waiting).take_all())

    # ------------------------------------------------------------------ replies

    def action_retry(self, seed: str = "") -> None:
        self.retry(new_seed=seed == "new")

    def retry(self, index: int | None = None, *, new_seed: bool = False) -> None:
        """Answer the question at or before ``index`` again, the last one unless given."""
        self._screen.when_idle(partial(self._retry, index, new_seed))

    async def _retry(self, index: int | None, new_seed: bool) -> None:
        screen, session = self._screen, self._screen.session
        messages = session.messages
        last = len(messages) - 1 if index is None else min(index, len(messages) - 1)
        asked = max((i for i in range(last + 1) if messages[i].role == "user"), default=None)
        if asked is None:
            screen.notify("There is no reply to write again yet")
            return
        await screen.transcript.truncate(asked + 1)
        await screen.begin(
            lambda cancel: session.retry(asked, new_seed=new_seed, cancel=cancel),
            None,
            self._reply(asked + 1),
        )

    def action_continue(self) -> None:
        self._screen.when_idle(self._continue)

    async def _continue(self, answer: bool = False) -> None:
        screen = self._screen
        views = screen.transcript.messages
        if not views or not isinstance(views[-1], AssistantMessage):
            screen.notify("There is no reply to continue")
            return
        await screen.begin(
            lambda cancel: screen.session.continue_reply(answer=answer, cancel=cancel),
            None,
            views[-1],
        )

    def action_answer_now(self) -> None:
        """End the thought that is being written, or one that was cut short."""
        messages = self._screen.session.messages
        live = self._screen.live
        if live is None:
            thinking = bool(messages) and bool(messages[-1].reasoning and not messages[-1].content)
        else:
            thinking = not live.text
        if thinking:
            self._screen.when_idle(partial(self._continue, answer=True))
        else:
            self._screen.notify("There is no open thought", timeout=2)

    def action_undo(self) -> None:
        self._screen.when_idle(self._undo)

    async def _undo(self) -> None:
        screen, session = self._screen, self._screen.session
        try:
            question = session.undo()
        except UsageError as error:
            screen.notify(error.message, markup=False)
            return
        if session.messages:
            await screen.transcript.truncate(len(session.messages))
            screen.count_context()
        else:
            await screen.show_conversation()
        if not screen.prompt.text.strip():
            screen.prompt.put_message(question)

"""The actions on a conversation: to send, edit, repeat, continue, undo and copy, and settings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from textual.content import Content

from specllama.errors import UsageError
from specllama.events import Event
from specllama.replies import attach
from specllama.tui.screens.turn_screen import EDITED, TurnScreen
from specllama.tui.widgets.markdown_parser import code_blocks
from specllama.tui.widgets.message import AssistantMessage, UserMessage

USUAL_DRAFTING = {"speculate": True, "proposer": "auto", "window": "auto", "draft_max": None}
DEMONSTRATION = 4  # guesses a round


class ActingScreen(TurnScreen):
    """A screen whose conversation is changed by the keymap's actions.

    Attributes:
        editing: the message that is changed in the prompt, or None.
    """

    editing: int | None = None
    _before_edit = ""  # the prompt's text then
    left = ""  # and when a turn was taken back or brought back

    copy_text: Callable[[str], object]

    # ------------------------------------------------------------------ messages

    async def send(self, text: str) -> None:
        """Send the typed message, or keep it until the engine is free."""
        loader, index = self.loader, self.editing
        try:
            text = self.prompt.with_files(text)
        except UsageError as error:
            self.warn(error)
            return
        if index is not None:
            self.prompt.sent()
            self.stop_editing()
            self.when_idle(partial(self._send, text, index))
        elif loader.ready and not self.busy:
            self.prompt.sent()
            await self._send(text)
        elif loader.possible:
            self.waiting.put(text)
            self.prompt.sent()
            if loader.failed or loader.resting:
                loader.load()
        else:
            self.notify("Choose a model first: F6", severity="warning")

    async def _send(self, text: str, index: int | None = None) -> None:
        """Send a message, or another version of message ``index``; a question is answered anew."""
        session, messages = self.session, self.session.messages
        if index is None or index >= len(messages):
            index, ask = len(messages), partial(session.send, text)
        else:
            ask = partial(session.edit, index, text)
            if messages[index].role != "user":
                await self._replace(index, ask)
                return
        await self.begin(ask, self._reply(index + 1), UserMessage(index, text))

    async def _replace(self, index: int, edit: Callable[[], Iterator[Event]]) -> None:
        """Show the reply at ``index`` as it was edited."""
        try:
            deque(edit(), maxlen=0)
        except UsageError as error:
            await self.failed(error)
            return
        await self.transcript.truncate(index)
        now = self.session.messages[index]
        await self.transcript.add(
            self._reply(index, now.content, reasoning=now.reasoning, foot=EDITED)
        )
        self.show_versions()
        self.count_context()

    # ------------------------------------------------------------------ the queue

    @property
    def queue(self) -> deque[str]:
        return self.waiting.texts

    async def send_queued(self) -> None:
        if self.queue and not self.busy and self.loader.ready:
            await self._send(self.waiting.take())

    def take_back_queue(self) -> None:
        """Put queued messages back into the prompt, before the text that is being typed there."""
        if self.queue:
            self.prompt.put_before(self.waiting.take_all())

    # ------------------------------------------------------------------ replies

    def action_retry(self, seed: str = "") -> None:
        """Write the reply in focus again, else the last one."""
        index = None if self.here is None else self.here.index
        self.when_idle(partial(self._retry, index, seed))

    async def _retry(self, index: int | None, seed: str) -> None:
        """Answer the question at or before ``index`` again, the last one unless given."""
        asked = self.question_before(index)
        if asked is None:
            self.notify("There is no reply to write again yet")
            return
        again = partial(self.session.retry, asked, new_seed=seed == "new")
        await self.begin(again, self._reply(asked + 1))

    def question_before(self, index: int | None = None) -> int | None:
        """Return the place of the last question, of those up to ``index`` if given."""
        messages = self.session.messages[: None if index is None else index + 1]
        return max((i for i, m in enumerate(messages) if m.role == "user"), default=None)

    def action_continue(self) -> None:
        self.when_idle(self._continue)

    async def _continue(self, answer: bool = False) -> None:
        views = self.transcript.messages
        if not views or not isinstance(views[-1], AssistantMessage):
            self.notify("There is no reply to continue")
            return
        await self.begin(partial(self.session.continue_reply, answer=answer), views[-1])

    def action_answer_now(self) -> None:
        """End the thought that is being written, or one that was cut short."""
        last, live = self.session.messages[-1:], self.live
        if not live.text if live else any(m.reasoning and not m.content for m in last):
            self.when_idle(partial(self._continue, answer=True))
        else:
            self.notify("There is no open thought", timeout=2)

    def action_undo(self) -> None:
        self.when_idle(self._undo)

    async def _undo(self) -> None:
        session = self.session
        self.stop_editing()
        self.take_back_queue()
        try:
            question = session.undo()
        except UsageError as error:
            self.notify(error.message, markup=False)
            return
        if session.messages:
            await self.transcript.truncate(len(session.messages))
            self.show_versions()
            self.count_context()
        else:
            await self.show_conversation()
        if not self.prompt.text.strip():
            self.prompt.put_message(question)
        self.left = self.prompt.full_text
        self.notify("The turn is taken back. Ctrl+Z brings it back", timeout=6)

    def action_redo(self) -> None:
        """Bring back the turn that was taken back last."""
        self.when_idle(self._redo)

    async def _redo(self) -> None:
        if not self.session.taken_back:
            return
        question = self.session.redo()
        await self.show_conversation()
        if self.prompt.full_text == attach.again(question)[0]:
            self.prompt.undo()
        self.left = self.prompt.full_text

    # ------------------------------------------------------------------ changes of sent messages

    def action_edit(self) -> None:
        """Change the message in focus, else the last question, in the prompt."""
        messages, here = self.session.messages, self.here
        index = self.question_before() if here is None else here.index
        if index is None or index >= len(messages):
            self.notify("There is nothing to edit yet", timeout=2)
            return
        if self.editing is None:
            self._before_edit = self.prompt.full_text
        self.editing = index
        whose = "your message" if messages[index].role == "user" else "the reply"
        words = f"Editing {whose}. Enter sends a new version, Esc cancels. The old version is kept."
        if len(words) > self.size.width - 4:  # on a narrow screen the keys matter more
            words = "Editing: Enter sends, Esc cancels"
        self.editing_line.update(Content.assemble((words, self.ink.warn)))
        self.editing_line.display = True
        self.prompt.put_message(messages[index].content)

    def stop_editing(self) -> None:
        """Stop editing, and put back the prompt's text from before."""
        if self.editing is not None:
            self.editing = None
            self.editing_line.display = False
            self.prompt.put(self._before_edit)

    async def action_version(self, step: int) -> None:
        """Show another version of the focused message, or else of the last one that has several,
        with the messages that follow it."""
        if not self.is_current:
            return
        view = self.here
        if view is None and step < 0 and self.session.taken_back and not self.busy:
            await self._redo()
            return
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

    # ------------------------------------------------------------------ the next reply

    def action_use_method(self, name: str) -> None:
        plain = name == "none"
        params = self.session.params
        try:
            params = params.replace(speculate=not plain, proposer="auto" if plain else name)
        except UsageError as error:
            self.notify(error.message, severity="error", markup=False)
            return
        self.set_params(params)
        words = {"none": "plain decoding", "auto": "the method is chosen automatically"}
        self.notify(f"Next reply: {words.get(name) or self.glyphs.label(name)}")

    def action_toggle_speculation(self) -> None:
        params, state = self.session.params, "decides for itself"
        if self.session.lent:
            self.session.lend(None)
            self.params_changed()
        else:
            self.set_params(params.replace(speculate=not params.speculate))
            state = "is off" if params.speculate else "is on"
        self.notify(f"Drafting {state} from the next reply on", timeout=2)

    def action_think(self, how: str = "") -> None:
        params = self.session.params
        how = how or ("auto" if params.think == "off" else "off")
        self.set_params(params.replace(think=how))
        self.notify(f"Thoughts: {how}, from the next reply on", timeout=2)

    def demonstrate(self) -> None:
        """Let the very first conversation draft where it does not pay, so that drafting is seen."""
        params = self.session.params
        if self.loader.bundled and params == params.replace(**USUAL_DRAFTING):
            self.session.lend(params.replace(window="fixed", draft_max=DEMONSTRATION))

    # ------------------------------------------------------------------ copies

    def action_copy(self, what: str = "") -> None:
        """Copy the message in focus, else the last reply; its last code block; or all."""
        replies = [v for v in self.transcript.messages if isinstance(v, AssistantMessage)]
        view = self.here or (replies[-1] if replies else None)
        if what == "chat":
            self.copy_text(self.session.export("md"))
        elif view is None:
            self.notify("There is no reply to copy yet", timeout=2)
        elif what != "code":
            self.copy_text(view.text)
        elif blocks := code_blocks(view.text):
            self.copy_text(blocks[0])
        else:
            self.notify("There is no code block here", timeout=2)

    def action_thought(self) -> None:
        """Fold or unfold the thought of the reply in focus, else the last one."""
        views = [self.here, *reversed(self.transcript.messages)]
        if not any(isinstance(view, AssistantMessage) and view.fold() for view in views):
            self.notify("There is no thought here", timeout=2)

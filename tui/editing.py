"""Changes of sent messages: a message in the prompt again, and the versions of one."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static

from specllama.errors import UsageError
from specllama.tui.screens.turn import TurnScreen
from specllama.tui.widgets.message import MessageView


class Editing:
    """The change of one message of a screen's conversation.

    Attributes:
        index: its place, or None while none is.
    """

    def __init__(self, screen: TurnScreen) -> None:
        self._screen = screen
        self.index: int | None = None
        self._before = ""  # the prompt's text before

    def start(self, index: int) -> None:
        screen, messages = self._screen, self._screen.session.messages
        if index >= len(messages):
            return
        if self.index is None:
            self._before = screen.prompt.full_text
        self.index = index
        whose = "your message" if messages[index].role == "user" else "the reply"
        words = f"Editing {whose}. Enter sends a new version, Esc cancels. The old version is kept."
        if len(words) > screen.size.width - 4:  # on a narrow screen the keys matter more
            words = "Editing: Enter sends, Esc cancels"
        line = screen.query_one("#editing", Static)
        line.update(Content.assemble((words, screen.ink.warn)))
        line.display = True
        screen.prompt.put_message(messages[index].content)

    def stop(self, *, restore: bool) -> None:
        """Stop editing; ``restore`` puts back the prompt's text from before."""
        self.index = None
        self._screen.query_one("#editing").display = False
        if restore:
            self._screen.prompt.put(self._before)

    def action_edit_last(self) -> None:
        messages = self._screen.session.messages
        last = max((i for i, m in enumerate(messages) if m.role == "user"), default=None)
        if last is not None:
            self.start(last)

    async def action_version(self, step: int) -> None:
        """Show another version of the focused message, or else of the last one that has several,
        with the messages that follow it."""
        screen = self._screen
        if not screen.is_current:
            return
        view = screen.focused if isinstance(screen.focused, MessageView) else None
        try:
            if screen.busy:
                raise UsageError("a reply is being written: Esc stops it")
            index = screen.session.show_version(view.index if view else None, step)
        except UsageError as error:
            words = error.message[0].upper() + error.message[1:]
            screen.notify(words, timeout=2, markup=False)
            return
        await screen.show_conversation()
        shown = screen.transcript.messages[index]
        if view is not None and shown.is_attached:
            shown.focus()

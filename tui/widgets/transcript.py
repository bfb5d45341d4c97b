"""The conversation: a window of messages that follows the end until the user scrolls away."""

from __future__ import annotations

from collections.abc import Sequence

from textual.containers import VerticalScroll
from textual.content import Content
from textual.geometry import Offset, Size
from textual.reactive import Reactive
from textual.widget import Widget
from textual.widgets import Button, Static

from specllama.errors import SpecllamaError
from specllama.text import sanitize
from specllama.tui import advice
from specllama.tui.messages import Scrolled
from specllama.tui.widgets.inked import Inked
from specllama.tui.widgets.message import AssistantMessage, MessageView

WINDOW = 20


class Note(Inked, Static):
    """A line between messages that is not part of the conversation: an error, a notice. Every line
    of ``hint`` is one thing to do about it."""

    def __init__(self, message: str, hint: str | None = None, *, error: bool = False) -> None:
        super().__init__(markup=False, classes="-error" if error else "")
        self.message, self.hint, self.error = message, hint, error

    def on_mount(self) -> None:
        parts = [(sanitize(self.message), self.ink.bad if self.error else "")]
        for hint in (self.hint or "").splitlines():
            parts.append((f"\n→ {sanitize(hint)}", self.ink.muted))
        self.update(Content.assemble(*parts))


class Transcript(VerticalScroll, can_focus=False):
    virtual_size = Reactive(Size(0, 0), repaint=False)

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.messages: list[MessageView] = []
        self._hidden = 0
        self._follows = False

    def on_mount(self) -> None:
        self.anchor()

    def anchor(self, anchor: bool = True) -> None:
        self._follows = anchor
        super().anchor(anchor)

    def release_anchor(self) -> None:
        self._follows = False
        super().release_anchor()

    @property
    def scroll_offset(self) -> Offset:
        """The offset; few lines begin at the top, where Textual would put them at the bottom."""
        x, y = super().scroll_offset
        return Offset(x, max(y, 0))

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if round(old_value) != round(new_value):
            self.post_message(Scrolled())

    def watch_virtual_size(self) -> None:
        if not self._follows:  # what is below may be gone, or have come
            self.post_message(Scrolled())

    @property
    def at_end(self) -> bool:
        # Where the end is followed, the scroll position is behind it until the next frame.
        return self._follows or self.scroll_offset.y >= self.max_scroll_y

    def page(self, step: int) -> None:
        """Move a page up or down; at the end follow new text again."""
        if step > 0 and self.scroll_offset.y + self.size.height >= self.max_scroll_y:
            self.to_end()
        elif step > 0:
            self.scroll_page_down(animate=False)
        else:
            self.scroll_page_up(animate=False)

    def to_end(self) -> None:
        self.anchor()
        self.scroll_end(animate=False)

    async def fill(self, messages: Sequence[MessageView], empty: Widget | None = None) -> None:
        """Replace everything; only the newest messages are mounted. Without any, ``empty`` is
        shown."""
        await self.remove_children()
        self.messages = list(messages)
        self._hidden = max(0, len(self.messages) - WINDOW)
        self.set_class(empty is not None, "-empty")
        earlier = [self._earlier()] if self._hidden else []
        shown: list[Widget] = [*earlier, *self.messages[self._hidden :]]
        await self.mount_all(shown if empty is None else [empty])
        if empty is not None:  # is read from its first line
            self.release_anchor()
            self.scroll_home(animate=False)
        else:
            self.anchor()

    async def add(self, message: MessageView) -> None:
        await self.query("#welcome").remove()
        self.remove_class("-empty")
        self.messages.append(message)
        await self.mount(message)
        self.anchor()

    async def note(self, message: str, hint: str | None = None, *, error: bool = False) -> None:
        await self.mount(Note(message, hint, error=error))

    async def failed(self, error: SpecllamaError, *next_steps: str, server: bool = False) -> None:
        """Show an error and what can be done, in addition to what the error suggests."""
        hints = "\n".join(filter(None, (advice.hint(error, server=server), *next_steps)))
        await self.note(error.message, hints, error=True)

    async def truncate(self, keep: int) -> None:
        """Drop messages from number ``keep`` on, and every note after the last one left."""
        gone, self.messages = self.messages[keep:], self.messages[:keep]
        for view in gone:
            if view.is_attached:
                await view.remove()
        after = self.messages[-1] if self.messages and self.messages[-1].is_attached else None
        seen = after is None
        for child in list(self.children):
            if seen and isinstance(child, Note):
                await child.remove()
            seen = seen or child is after

    def _earlier(self) -> Button:
        return Button(f"Show {self._hidden} earlier messages", id="earlier", compact=True)

    async def show_earlier(self) -> None:
        before = self._hidden
        self._hidden = max(0, before - WINDOW)
        fresh: list[Widget] = list(self.messages[self._hidden : before])
        await self.query("#earlier").remove()
        if self._hidden:
            fresh.insert(0, self._earlier())
        await self.mount_all(fresh, before=0)

    async def show_as(self, view: str) -> None:
        for message in self.messages:
            if isinstance(message, AssistantMessage):
                if message.is_attached:
                    await message.show_as(view)
                else:
                    message.view = view

"""The list of the other conversations, newest first, and their times in words."""

from __future__ import annotations

import time
from datetime import datetime
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from specllama.errors import SpecllamaError
from specllama.store.sessions import SessionStore, SessionSummary
from specllama.text import sanitize_line
from specllama.tui.widgets.inked import Inked


def age(seconds: float) -> str:
    """Format an age: "just now", "5 min ago", "3 h ago", "yesterday", "12 days ago"."""
    if seconds < 60:
        return "just now"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min ago"
    if seconds < 86400:
        return f"{seconds // 3600:.0f} h ago"
    days = int(seconds // 86400)
    return "yesterday" if days == 1 else f"{days} days ago"


def heading(when_s: float, now_s: float) -> str:
    """Return the heading for the conversations of a day, or of a month if that is long ago:
    "Today", "Yesterday", "Monday", "October", "December 2025"."""
    then, now = datetime.fromtimestamp(when_s), datetime.fromtimestamp(now_s)
    days = (now.date() - then.date()).days
    if days < 2:
        return "Yesterday" if days == 1 else "Today"
    return then.strftime("%A" if days < 7 else "%B" if then.year == now.year else "%B %Y")


def moment(when_s: float, now_s: float) -> str:
    """Format a time under such a heading: "5 min ago", "14:05", "12 Oct"."""
    then, now = datetime.fromtimestamp(when_s), datetime.fromtimestamp(now_s)
    days = (now.date() - then.date()).days
    if days < 1:
        return age(max(0.0, now_s - when_s))
    return f"{then:%H:%M}" if days < 7 else f"{then.day} {then:%b}"


def date(when_s: float) -> str:
    """Format a date: "23 November 2026, 14:05"."""
    then = datetime.fromtimestamp(when_s)
    return f"{then.day} {then:%B %Y, %H:%M}"


LISTED = 60
COLUMNS = 32


class Sidebar(Inked, Vertical):
    HELP = """
    Enter or a click resumes a conversation, F7 searches them, F8 hides the list.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "screen.to_prompt", "Prompt", id="sidebar.leave"),
    ]

    DEFAULT_CSS = f"""
    Sidebar {{ width: {COLUMNS}; }}
    Sidebar > Static {{ height: 1; padding: 0 1; }}
    Sidebar > OptionList {{ padding: 0; }}
    """

    class Chosen(Message):
        """A choice of a conversation to resume; none for a new one."""

        def __init__(self, session: str | None) -> None:
            super().__init__()
            self.session = session

    def __init__(self, store: SessionStore, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.store = store

    def compose(self) -> ComposeResult:
        yield Static(Content.assemble(("Conversations", "bold")))
        yield OptionList(id="conversations", markup=False)
        hint = "Enter resumes · F7 search"
        yield Static(Content.assemble((hint, self.ink.muted)))

    def show(self, current: str | None) -> None:
        """List the stored conversations; the cursor is on the current one."""
        try:
            found = self.store.summaries(limit=LISTED)
        except SpecllamaError:
            found = []
        new = Content.assemble(("+ ", self.ink.accent), "New chat  ", ("Ctrl+N", self.ink.muted))
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options([Option(new), *(Option(self._row(s, current), s.id) for s in found)])
        ids: list[str | None] = [None, *(summary.id for summary in found)]
        options.highlighted = ids.index(current) if current in ids else 0

    def _row(self, summary: SessionSummary, current: str | None) -> Content:
        when = age(max(0.0, time.time() - summary.updated_s))
        mine = summary.id == current
        room = COLUMNS - 8 - len(when)  # borders, mark, scrollbar
        title = Content(sanitize_line(summary.title)).truncate(room, ellipsis=True, pad=True)
        return Content.assemble(
            ("● " if mine else "  ", self.ink.accent),
            title.stylize("bold") if mine else title,
            (f" {when}", self.ink.muted),
        )

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.post_message(self.Chosen(event.option.id))

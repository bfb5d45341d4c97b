"""Stored conversations: search, resume, rename, delete with undo."""

from __future__ import annotations

import time
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from specllama.errors import SpecllamaError
from specllama.store.sessions import SessionStore, SessionSummary
from specllama.text import number_of, sanitize_line
from specllama.tui.screens.base import Page
from specllama.tui.widgets.keys import Keys

LISTED = 200


def age(seconds: float) -> str:
    """ "just now", "5 min", "3 h", "yesterday", "12 days" """
    if seconds < 60:
        return "just now"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min"
    if seconds < 86400:
        return f"{seconds // 3600:.0f} h"
    days = int(seconds // 86400)
    return "yesterday" if days == 1 else f"{days} days"


class SessionsScreen(Page):
    TITLE = "Conversations"
    HELP = """
    Type to search titles and texts. Enter resumes, Ctrl+E renames, Delete (or Ctrl+D) deletes,
    Ctrl+Z brings the last deleted one back.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "move(1)", "Down", show=False, priority=True),
        Binding("up", "move(-1)", "Up", show=False, priority=True),
        Binding("enter", "resume", "Resume", id="sessions.resume", priority=True),
        Binding("ctrl+e", "rename", "Rename", id="sessions.rename", priority=True),
        Binding("ctrl+d,delete", "delete", "Delete", id="sessions.delete", priority=True),
        Binding("ctrl+z", "undelete", "Undo delete", id="sessions.undelete", priority=True),
    ]

    def __init__(self, store: SessionStore, current: str | None) -> None:
        super().__init__()
        self.store = store
        self.current = current
        self._found: list[SessionSummary] = []
        self._renaming: str | None = None

    def compose_page(self) -> ComposeResult:
        yield Input(placeholder="search", id="filter")
        yield OptionList(id="sessions", markup=False)
        yield Keys()

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one("#filter").focus()
        self._list()

    def _list(self, keep: str | None = None) -> None:
        query = "" if self._renaming else self.query_one(Input).value
        try:
            self._found = self.store.summaries(query=query, limit=LISTED)
        except SpecllamaError as error:
            self.notify(error.message, severity="error", markup=False)
            self._found = []
        options = self.query_one(OptionList)
        options.clear_options()
        for summary in self._found:
            options.add_option(Option(self._row(summary), summary.id))
        if self._found:
            ids = [s.id for s in self._found]
            options.highlighted = ids.index(keep) if keep in ids else 0
        count = len(self._found)
        words = f"{count} found" if query else f"{count} stored"
        self.set_title(
            self.TITLE or "", words if count else "none yet" if not query else "no match"
        )

    def _row(self, summary: SessionSummary) -> Content:
        ink = self.ink
        mine = summary.id == self.current
        when = age(max(0.0, time.time() - summary.updated_s))
        mark = f"{self.glyphs.bullet} " if mine else "  "
        count = number_of(summary.messages, "message")
        return Content.assemble(
            (mark, ink.accent),
            (sanitize_line(summary.title), "bold"),
            (f"  {when} {self.glyphs.dot} {count}", ink.muted),
        )

    @property
    def _selected(self) -> SessionSummary | None:
        at = self.query_one(OptionList).highlighted
        return self._found[at] if at is not None and at < len(self._found) else None

    @on(Input.Changed)
    def _typed(self) -> None:
        if self._renaming is None:
            self._list()

    def action_move(self, step: int) -> None:
        options = self.query_one(OptionList)
        if step > 0:
            options.action_cursor_down()
        else:
            options.action_cursor_up()

    def action_resume(self) -> None:
        if self._renaming is not None:
            self._rename_now()
        elif self._selected is not None:
            self.dismiss(self._selected.id)

    @on(OptionList.OptionSelected)
    def _clicked(self) -> None:
        self.action_resume()

    def action_rename(self) -> None:
        chosen = self._selected
        if chosen is None:
            return
        self._renaming = chosen.id
        field = self.query_one(Input)
        field.placeholder = "new title"
        field.value = chosen.title
        field.cursor_position = len(chosen.title)
        field.focus()
        self.set_title("Rename", "Enter keeps the title, Esc leaves it")

    def _rename_now(self) -> None:
        renamed, self._renaming = self._renaming, None
        field = self.query_one(Input)
        try:
            if renamed is not None:
                self.store.rename(renamed, field.value)
        except SpecllamaError as error:
            self.notify(error.message, severity="warning", markup=False)
        self._end_renaming(renamed)

    def _end_renaming(self, keep: str | None) -> None:
        field = self.query_one(Input)
        field.placeholder = "search"
        with self.prevent(Input.Changed):
            field.value = ""
        self._list(keep)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """While the field has text to delete, the keys belong to the field."""
        if action in ("delete", "undelete") and self.is_mounted:
            field = self.query_one(Input)
            typing = action == "delete" and field.cursor_position < len(field.value)
            return self._renaming is None and not typing
        return True

    def action_delete(self) -> None:
        chosen = self._selected
        if chosen is None:
            return
        # Select the one below, or at the end the one above.
        at = self._found.index(chosen)
        beside = [*self._found[at + 1 : at + 2], *self._found[max(0, at - 1) : at]]
        self.store.delete(chosen.id)
        self.notify(f"Deleted: {sanitize_line(chosen.title)}. Ctrl+Z brings it back.", markup=False)
        self._list(beside[0].id if beside else None)

    def action_undelete(self) -> None:
        try:
            back = self.store.undelete()
        except SpecllamaError as error:
            self.notify(error.message, severity="error", markup=False)
            return
        if back is None:
            self.notify("Nothing was deleted")
        self._list(back)

    def action_back(self) -> None:
        if self._renaming is not None:
            keep, self._renaming = self._renaming, None
            self._end_renaming(keep)
        else:
            self.dismiss(None)

"""Stored conversations by day: search, preview, resume, rename, delete with undo."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from specllama.errors import SpecllamaError
from specllama.store import search
from specllama.store.message_tree import StoredMessage
from specllama.store.sessions import SessionStore, SessionSummary, StoredSession
from specllama.text import number_of, sanitize, sanitize_line
from specllama.tui.screens.page import Page
from specllama.tui.widgets.inked import Inked

_CHARS = 6000  # of the last messages
_EXCERPT = 300
_EXCERPTS = 20


def age(seconds: float) -> str:
    """Format an age of less than a day: "just now", "5 min ago", "3 h ago"."""
    if seconds < 60:
        return "just now"
    return f"{seconds // 60:.0f} min ago" if seconds < 3600 else f"{seconds // 3600:.0f} h ago"


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


def marked(text: str, wanted: Sequence[str]) -> Content:
    """Mark the searched words in a text by style, not by color alone."""
    content = Content(text)
    for begin, end in search.hits(text, wanted):
        content = content.stylize("underline bold $source-ngram", begin, end)
    return content


class Preview(Inked, Vertical):
    """A view of one conversation: its title, and below that a part of it, which scrolls."""

    def __init__(self, store: SessionStore, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.store = store

    def compose(self) -> ComposeResult:
        yield Static(id="preview-head", markup=False)
        with VerticalScroll(can_focus=False):
            yield Static(id="preview-text", markup=False)

    def show(self, session: str | None, wanted: Sequence[str] = ()) -> None:
        """Show the end of a conversation, or all hits of a search in it."""
        head, found, said = Content(), list[Content](), list[Content]()
        if session is not None:
            try:
                stored = self.store.get(session)
            except SpecllamaError as error:
                head = Content.styled(error.message, self.ink.bad)
            else:
                head = self._head(stored)
                found = self._found(stored, wanted) if wanted else []
                said = found or self._ending(stored)
        self.query_one("#preview-head", Static).update(head)
        self.query_one("#preview-text", Static).update(Content("\n").join(said[1:]))
        scroll = self.query_one(VerticalScroll)
        (scroll.scroll_home if found else scroll.scroll_end)(animate=False)

    def _head(self, stored: StoredSession) -> Content:
        count = number_of(len(stored.messages), "message")
        return Content.assemble(
            (sanitize_line(stored.title), "bold"),
            (f"\n{date(stored.updated_s)} · {count}", self.ink.muted),
        )

    def _found(self, stored: StoredSession, wanted: Sequence[str]) -> list[Content]:
        chosen, out = set(stored.tree.path), list[Content]()
        for number, message in stored.tree.messages.items():
            for text in (message.reasoning, message.content):
                if len(out) < 3 * _EXCERPTS and search.hits(text, wanted):
                    other = "" if number in chosen else "another version"
                    part = sanitize_line(search.excerpt(text, wanted, _EXCERPT))
                    out += self._said(message, marked(part, wanted), other)
        return out

    def _ending(self, stored: StoredSession) -> list[Content]:
        out: list[list[Content]] = []
        room = _CHARS
        for message in reversed(stored.messages):
            if room <= 0:
                out.append([Content(), Content.styled("…", self.ink.muted)])
                break
            text = message.content.strip() or "(no text)"
            cut = "…" if len(text) > room else ""
            out.append(self._said(message, Content(cut + sanitize(text[-room:]))))
            room -= len(text)
        return [line for part in reversed(out) for line in part]

    def _said(self, message: StoredMessage, text: Content, note: str = "") -> list[Content]:
        """Return a message under the name of its writer."""
        mine = message.role == "user"
        name = ("You", "bold $secondary") if mine else ("Reply", "bold $primary")
        if message.state == "partial" and not mine:
            note = note or "interrupted"
        told = (f" · {note}" if note else "", self.ink.muted)
        return [Content(), Content.assemble(name, told), text]


LISTED = 200
SEARCH = "search titles and texts"
WITH_COUNT = 64  # columns of a row that also says how many messages there are


class SessionsScreen(Page):
    TITLE = "Conversations"
    HELP = """
    Type to search titles and texts: each word may stand anywhere, also as a part of a word; "words
    in quotes" stand together. Enter resumes, Ctrl+E renames, Delete (or Ctrl+D) deletes, Ctrl+Z
    brings the last deleted one back. Shift with Up or Down moves the preview.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "move(1)", "Down", show=False, priority=True),
        Binding("up", "move(-1)", "Up", show=False, priority=True),
        Binding("shift+down", "scroll(1)", "Preview", show=False, priority=True),
        Binding("shift+up", "scroll(-1)", "Preview", show=False, priority=True),
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
        yield Input(placeholder=SEARCH, id="filter")
        with Horizontal(id="chats"):
            yield OptionList(id="sessions", markup=False)
            yield Preview(self.store, id="preview")

    def on_mount(self) -> None:
        self.query_one("#filter").focus()
        self._list()

    @on(events.Resize)
    def _resized(self) -> None:
        self.call_after_refresh(self._draw)

    @property
    def _wanted(self) -> list[str]:
        return [] if self._renaming else search.terms(self.query_one(Input).value)

    def _list(self, keep: str | None = None) -> None:
        query = "" if self._renaming else self.query_one(Input).value
        try:
            self._found = self.store.summaries(query=query, limit=LISTED)
        except SpecllamaError as error:
            self.notify(error.message, severity="error", markup=False)
            self._found = []
        self._draw(keep)
        count = len(self._found)
        words = f"{count} found" if query else f"{count} stored"
        self.set_title(
            self.TITLE or "", words if count else "none yet" if not query else "no match"
        )

    def _draw(self, keep: str | None = None) -> None:
        """List the conversations found, under headings; the cursor is on ``keep``, or at the
        top."""
        options, now_s, wanted = self.query_one(OptionList), time.time(), self._wanted
        selected = self._selected
        keep = keep or (selected.id if selected else None)
        rows: list[Option] = []
        above = ""
        for one in self._found:
            day = heading(one.updated_s, now_s)
            if day != above:
                rows.append(Option(Content.styled(day, self.ink.accent), disabled=True))
                above = day
            rows.append(Option(self._row(one, now_s, wanted), one.id))
        options.clear_options()
        said = "No conversation is stored yet: Esc, and ask something."
        if wanted:
            said = "No conversation holds all of these words."
        nothing = Option(Content.styled(said, self.ink.muted), disabled=True)
        options.add_options(rows or [nothing])
        ids = [row.id for row in rows]
        if rows:
            options.highlighted = ids.index(keep) if keep and keep in ids else 1
            if options.highlighted == 1:
                options.scroll_home(animate=False)  # its heading is seen, too
        self._look()

    def _row(self, summary: SessionSummary, now_s: float, wanted: list[str]) -> Content:
        ink = self.ink
        room = max(self.query_one(OptionList).scrollable_content_region.width - 4, 20)
        mark = "● " if summary.id == self.current else "  "
        when = moment(summary.updated_s, now_s)
        if room >= WITH_COUNT:
            when += f" · {number_of(summary.messages, 'message')}"
        title = marked(sanitize_line(summary.title), wanted)
        title = title.truncate(max(room - len(when) - 4, 8), ellipsis=True, pad=True)
        row = Content.assemble((mark, ink.accent), title.stylize("bold"), (f"  {when}", ink.muted))
        found = sanitize_line(search.excerpt(summary.found, wanted, room - 3))
        if found in ("", sanitize_line(summary.title)):
            return row
        return Content("\n").join([row, Content.assemble("  ", marked(found, wanted))])

    @on(OptionList.OptionHighlighted)
    def _look(self) -> None:
        """Show the conversation at the cursor."""
        chosen = self._selected
        self.query_one(Preview).show(None if chosen is None else chosen.id, self._wanted)

    @property
    def _selected(self) -> SessionSummary | None:
        option = self.query_one(OptionList).highlighted_option
        return next((one for one in self._found if option and one.id == option.id), None)

    def action_scroll(self, step: int) -> None:
        self.query_one("#preview VerticalScroll").scroll_relative(y=3 * step, animate=False)

    @on(Input.Changed)
    def _typed(self) -> None:
        if self._renaming is None:
            self._list()

    def action_move(self, step: int) -> None:
        options = self.query_one(OptionList)
        (options.action_cursor_down if step > 0 else options.action_cursor_up)()

    @on(OptionList.OptionSelected)
    def action_resume(self) -> None:
        if self._renaming is not None:
            try:
                self.store.rename(self._renaming, self.query_one(Input).value)
            except SpecllamaError as error:
                self.notify(error.message, severity="warning", markup=False)
            self._end_renaming()
        elif self._selected is not None:
            self.dismiss(self._selected.id)

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

    def _end_renaming(self) -> None:
        keep, self._renaming = self._renaming, None
        field = self.query_one(Input)
        field.placeholder = SEARCH
        with self.prevent(Input.Changed):
            field.value = ""
        self._list(keep)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave the keys to the field while it has text to delete."""
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
            self._end_renaming()
        else:
            self.dismiss(None)

"""A stored conversation at a glance: its end, or the places with the searched words."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from specllama.errors import SpecllamaError
from specllama.store import search
from specllama.store.sessions import SessionStore, StoredSession
from specllama.store.tree import StoredMessage
from specllama.text import number_of, sanitize, sanitize_line
from specllama.tui.days import date
from specllama.tui.themes import Ink
from specllama.tui.widgets.base import Inked

_CHARS = 6000  # of the last messages
_EXCERPT = 300
_EXCERPTS = 20


def marked(text: str, wanted: Sequence[str], ink: Ink) -> Content:
    """Mark the searched words in a text by style, not by color alone."""
    content = Content(text)
    for begin, end in search.hits(text, wanted):
        content = content.stylize(f"underline {ink.mark}", begin, end)
    return content


class Preview(Inked, Vertical):
    """A view of one conversation: its title, and below that a part of it, which scrolls."""

    DEFAULT_CSS = """
    Preview > #preview-head { height: auto; max-height: 4; margin: 0 0 1 0; }
    """

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
        if found:
            scroll.scroll_home(animate=False)
        else:
            scroll.scroll_end(animate=False)

    def scroll_by(self, lines: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)

    def _head(self, stored: StoredSession) -> Content:
        count = number_of(len(stored.messages), "message")
        return Content.assemble(
            (sanitize_line(stored.title), "bold"),
            (f"\n{date(stored.updated_s)} {self.glyphs.dot} {count}", self.ink.muted),
        )

    def _found(self, stored: StoredSession, wanted: Sequence[str]) -> list[Content]:
        chosen, out = set(stored.tree.path), list[Content]()
        for number, message in stored.tree.messages.items():
            for text in (message.reasoning, message.content):
                if len(out) < 3 * _EXCERPTS and search.hits(text, wanted):
                    other = "" if number in chosen else "another version"
                    part = sanitize_line(search.excerpt(text, wanted, _EXCERPT))
                    out += self._said(message, marked(part, wanted, self.ink), other)
        return out

    def _ending(self, stored: StoredSession) -> list[Content]:
        out: list[list[Content]] = []
        room = _CHARS
        for message in reversed(stored.messages):
            if room <= 0:
                out.append([Content(), Content.styled(self.glyphs.ellipsis, self.ink.muted)])
                break
            text = message.content.strip() or "(no text)"
            cut = self.glyphs.ellipsis if len(text) > room else ""
            out.append(self._said(message, Content(cut + sanitize(text[-room:]))))
            room -= len(text)
        return [line for part in reversed(out) for line in part]

    def _said(self, message: StoredMessage, text: Content, note: str = "") -> list[Content]:
        """Return a message under the name of its writer."""
        mine = message.role == "user"
        name = ("You", "bold $secondary") if mine else ("Reply", "bold $primary")
        if message.state == "partial" and not mine:
            note = note or "interrupted"
        told = (f" {self.glyphs.dot} {note}" if note else "", self.ink.muted)
        return [Content(), Content.assemble(name, told), text]

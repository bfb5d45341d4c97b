"""The question before a conversation is left that the store does not hold."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input, Static

from specllama.tui.screens.page import Page


class UnkeptScreen(Page):
    """A page that offers a file for the conversation. It ends with a path, with "" to leave without
    one, or with None to stay.

    Args:
        path: of the file that it proposes.
        why: the conversation is not stored.
    """

    TITLE = "This conversation is not stored"
    HELP = "What the store of conversations could not take is lost, unless a file holds it."
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "save", "Save and leave", priority=True),
        Binding("ctrl+d", "lose", "Leave without it", priority=True),
    ]

    def __init__(self, path: str, why: str) -> None:
        super().__init__()
        self._path, self._why = path, why

    def compose_page(self) -> ComposeResult:
        yield Static(f"{self._why}\n\nSave it to a file, perhaps on another disk:", markup=False)
        yield Input(self._path)

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    def action_save(self) -> None:
        self.dismiss(self.query_one(Input).value.strip() or None)

    def action_lose(self) -> None:
        self.dismiss("")

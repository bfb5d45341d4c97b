"""The base of the screens opened from the chat: a title line, Esc back, help."""

from __future__ import annotations

from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Input, Static

from specllama.text import sanitize_line
from specllama.tui.messages import EngineFailed, EngineLoading, EngineReady, InkChanged
from specllama.tui.widgets.inked import Inked, Keys


class Page(Inked, Screen[Any]):
    """A page; subclasses compose what is between its title and its keys in ``compose_page``.

    Textual calls ``on_mount`` and ``on_resize`` of every class, a subclass's own before these.
    """

    HELP = ""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back", id="page.back"),
        Binding("f1", "app.show('help')", "Help", id="app.help", priority=True),
        Binding("question_mark", "app.show('help')", "Help", show=False),
    ]

    def compose(self) -> ComposeResult:
        yield Static(self.heading(self.TITLE or ""), id="page-title", markup=False)
        yield from self.compose_page()
        yield Keys()

    def compose_page(self) -> ComposeResult:
        raise NotImplementedError

    def on_mount(self) -> None:
        for field in self.query(Input):
            field.cursor_blink = False  # an idle app must cost nothing

    def on_resize(self) -> None:
        for keys in self.query(Keys):
            keys.show_command_palette = self.size.width >= 100

    def set_title(self, title: str, detail: str = "") -> None:
        self.query_one("#page-title", Static).update(self.heading(title, detail))

    def heading(self, title: str, detail: str = "") -> Content:
        parts = [(f" {sanitize_line(title)} ", "bold reverse $primary")]
        if detail:
            parts.append((f"  {sanitize_line(detail)}", self.ink.muted))
        return Content.assemble(*parts)

    def may_leave(self) -> bool:
        """True if another page may take its place; otherwise the page shows why not."""
        return True

    def engine_told(self, told: EngineLoading | EngineReady | EngineFailed) -> None:
        """Show the end of a load, once the app knows."""

    def action_back(self) -> None:
        if self.may_leave():
            self.dismiss(None)

    def on_ink_changed(self, _: InkChanged) -> None:
        self.refresh(recompose=False, layout=True)
        for widget in self.query("*"):
            widget.refresh()

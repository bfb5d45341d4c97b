"""Saving of the view: the conversation as a document, or the screen as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static

from specllama import paths
from specllama.session import Session
from specllama.text import encodable, sanitize_line
from specllama.tui import clipboard
from specllama.tui.screens.page import Page


@dataclass(frozen=True, slots=True)
class Export:
    """A thing that can be saved: its title, a name for its file, and its writer for each ending of
    the file name."""

    label: str
    stem: str
    forms: dict[str, Callable[[], str]]


def of_conversation(session: Session) -> list[Export]:
    """List the conversation, if it has begun."""
    forms = {"md": session.export, "json": lambda: session.export("json")}
    return [Export("The conversation", session.title, forms)] if session.messages else []


WORDS = {
    "svg": "a picture (SVG)",
    "md": "Markdown",
    "json": "JSON",
}


class ExportScreen(Page, ModalScreen[Any]):
    TITLE = "Save what you see"
    HELP = """
    Up and Down choose what is saved and how; the name of the file stands below and can be changed,
    folder and all. Enter saves, Esc leaves. A picture needs nothing from elsewhere, so that it can
    be attached to an issue; what a model wrote is shown as text and never as markup.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Leave", id="page.back"),
        Binding("enter", "save", "Save", id="export.save", priority=True),
        Binding("down", "move(1)", "Next", show=False, priority=True),
        Binding("up", "move(-1)", "Previous", show=False, priority=True),
    ]

    AUTO_FOCUS = "#save-path"

    def __init__(self, exports: Sequence[Export]) -> None:
        super().__init__()
        self.rows = {
            f"{what.label} as {WORDS[form]}": (what, form)
            for what in exports
            for form in what.forms
        }
        self._asked = ""  # a file that is there: Enter again replaces it

    def compose(self) -> ComposeResult:
        with Vertical(id="save"):
            yield from super().compose()

    def compose_page(self) -> ComposeResult:
        yield OptionList(*self.rows, id="save-rows", markup=False)
        yield Input(id="save-path")
        yield Static(id="save-problem", markup=False)

    def on_mount(self) -> None:
        rows = self.query_one(OptionList)
        rows.can_focus = False
        rows.highlighted = 0

    @property
    def row(self) -> tuple[Export, str]:
        """The chosen export and its form."""
        return [*self.rows.values()][self.query_one(OptionList).highlighted or 0]

    def action_move(self, step: int) -> None:
        rows = self.query_one(OptionList)
        rows.highlighted = ((rows.highlighted or 0) + step) % len(self.rows)

    @on(OptionList.OptionHighlighted)
    def _propose(self) -> None:
        """Propose a new file name, in the folder that was typed."""
        (what, form), field = self.row, self.query_one("#save-path", Input)
        typed = _path(field.value).parent
        path = clipboard.export_path(
            what.stem, form, typed if typed != Path() and typed.is_dir() else None
        )
        near = path.parent == clipboard.here()
        field.value = encodable(path.name if near else str(path))
        # of a long path the name is seen; a field does not scroll to the first value it gets
        self.call_after_refresh(
            field.scroll_to, x=len(field.value), animate=False, force=True, immediate=True
        )

    @on(Input.Changed)
    def _typed(self) -> None:
        self._asked = ""
        self._tell()

    def _tell(self, problem: str = "") -> None:
        """Show what is wrong with the name, or where Enter saves it."""
        line = self.query_one("#save-problem", Static)
        line.set_class(bool(problem), "-wrong")
        folder = (clipboard.here() or Path()) / _path(
            self.query_one("#save-path", Input).value
        ).parent
        line.update(sanitize_line(problem or f"Enter saves it in {folder}"))

    @on(OptionList.OptionSelected)
    def action_save(self) -> None:
        given = self.query_one("#save-path", Input).value.strip()
        path = _path(given)
        if not given or path.is_dir():
            self._tell("Give the name of a file")
        elif not path.parent.is_dir() and path.parent != paths.data_dir() / "exports":
            self._tell(f"There is no folder {path.parent}")
        elif path.exists() and self._asked != given:
            self._asked = given
            self._tell(f"{path.name} is there already: Enter again replaces it")
        else:
            self._write(path)

    def _write(self, path: Path) -> None:
        try:
            paths.private_folder(path.parent)
            what, form = self.row
            path.write_text(encodable(what.forms[form]()), "utf-8")
        except (OSError, ValueError) as error:  # the latter: a zero byte in the name
            self._tell(f"It cannot be saved there: {getattr(error, 'strerror', None) or error}")
        else:
            self.dismiss(path)


def _path(given: str) -> Path:
    try:
        return Path(given).expanduser()
    except RuntimeError:  # no user has that name
        return Path(given)

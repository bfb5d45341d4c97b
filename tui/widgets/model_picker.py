"""The models on this machine as a list that can be searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from specllama.models.library import LocalModel
from specllama.text import sanitize_line
from specllama.tui.widgets.base import Inked
from specllama.tui.widgets.stats_strip import gigabytes


class ModelPicker(Inked, Vertical):
    """The field filters; a path or a reference that matches nothing can be chosen as typed."""

    DEFAULT_CSS = """
    ModelPicker { height: 1fr; }
    ModelPicker OptionList { text-wrap: nowrap; text-overflow: ellipsis; }
    """

    @dataclass
    class Highlighted(Message):
        ref: str | None

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._models: list[LocalModel] = []
        self._shown: list[LocalModel | None] = []
        self._extra: str | None = None
        self._current: str | None = None
        self._note = ""

    def compose(self) -> ComposeResult:
        yield Input(placeholder="search, or a path to a GGUF file", id="filter")
        yield OptionList(id="models", markup=False)

    def offer(
        self, models: Sequence[LocalModel], *, extra: str | None = None, current: str | None = None
    ) -> None:
        """Show these; ``extra`` is a first entry that means none of them, ``current`` the one in
        use."""
        self._models = list(models)
        self._extra, self._current = extra, current
        with self.prevent(Input.Changed):
            self.query_one(Input).value = ""
        self._list()
        self.query_one(Input).focus()

    def _list(self) -> None:
        words = self.query_one(Input).value.lower().split()
        found = [
            m for m in self._models if all(w in f"{m.ref} {m.path.name}".lower() for w in words)
        ]
        self._shown = [None, *found] if self._extra is not None and not words else list(found)
        options = self.query_one(OptionList)
        options.clear_options()
        for model in self._shown:
            options.add_option(Option(self._row(model)))
        if self._shown:
            refs = [m.ref if m is not None else None for m in self._shown]
            options.highlighted = refs.index(self._current) if self._current in refs else 0
        else:
            self.post_message(self.Highlighted(self.chosen))

    def _row(self, model: LocalModel | None) -> Content:
        ink = self.ink
        if model is None:
            return Content.assemble((f"  {self._extra or ''}", "bold"))
        # In a path, people look for the file's name, so its folder comes last.
        by_path = model.ref == str(model.path)
        where = str(model.path.parent) if by_path else model.source
        mine = model.ref == self._current
        parts = [
            (f"{self.glyphs.bullet if mine else ' '} ", ink.accent),
            (sanitize_line(model.path.name if by_path else model.ref), "bold"),
            (f"  {gigabytes(model.bytes)}", ""),
            (f"  {sanitize_line(where)}", ink.muted),
        ]
        if not model.complete:
            parts.append(("  parts are missing", ink.warn))
        return Content.assemble(*parts)

    @property
    def chosen(self) -> str | None:
        """The reference that Enter would take; None for the extra entry."""
        at = self.query_one(OptionList).highlighted
        if at is not None and at < len(self._shown):
            model = self._shown[at]
            return model.ref if model is not None else None
        return self.query_one(Input).value.strip() or None

    @property
    def path_chosen(self) -> str | None:
        at = self.query_one(OptionList).highlighted
        if at is not None and at < len(self._shown):
            model = self._shown[at]
            return str(model.path) if model is not None else None
        return None

    def move(self, step: int) -> None:
        options = self.query_one(OptionList)
        if step > 0:
            options.action_cursor_down()
        else:
            options.action_cursor_up()

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self._list()

    @on(OptionList.OptionHighlighted)
    def _moved(self, event: OptionList.OptionHighlighted) -> None:
        event.stop()
        self.post_message(self.Highlighted(self.chosen))

"""One column of the model picker: a field, and below it models that are here or on the hub."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from specllama.errors import UsageError
from specllama.models import refs
from specllama.text import sanitize_line
from specllama.tui.choices import ChoiceRow, completions, is_path
from specllama.tui.widgets.inked import Inked

Lines = list[tuple[str, ChoiceRow | None]]
"""What is listed: (name, row), or (heading, None)."""


def _named(rows: Iterable[ChoiceRow]) -> Lines:
    return [(row.name, row) for row in rows]


class ModelColumn(Inked, Vertical):
    """A column whose field filters, completes paths and names models to search on the hub.

    Attributes:
        here: rows of what is on this machine. offers: of what can be got. found: on the hub, for
            the text ``asked``.
        favourites: references of what stands first.
        note: why the list is empty, or that something is on its way.
    """

    @dataclass
    class Highlighted(Message):
        column: ModelColumn
        row: ChoiceRow | None

    @dataclass
    class Entered(Message):
        column: ModelColumn
        row: ChoiceRow

    @dataclass
    class Activated(Message):
        """A click on the column, or the mouse over it."""

        column: ModelColumn

    def __init__(self, title: str, placeholder: str, *, id: str) -> None:
        super().__init__(id=id)
        self._title, self._placeholder = title, placeholder
        self.here: list[ChoiceRow] = []
        self.offers: list[ChoiceRow] = []
        self.found: list[ChoiceRow] = []
        self.favourites: Sequence[str] = ()
        self.asked = ""
        self.note = ""
        self._typed_rows: dict[str, ChoiceRow] = {}  # by reference, those that were judged
        self._lines: Lines = []
        self._wished: str | None = None

    def compose(self) -> ComposeResult:
        yield Static(classes="head", markup=False)
        yield Input(placeholder=self._placeholder)
        yield OptionList(markup=False)

    def on_click(self, event: events.Click) -> None:
        self.post_message(self.Activated(self))

    # ------------------------------------------------------------------ what is listed

    def show(
        self,
        *,
        here: Sequence[ChoiceRow] | None = None,
        offers: Sequence[ChoiceRow] | None = None,
        found: Sequence[ChoiceRow] | None = None,
        asked: str | None = None,
        note: str | None = None,
        highlight: str | None = None,
    ) -> None:
        """Replace the given rows, keep the rest, draw the changes; ``highlight`` is a reference."""
        self.here = list(here) if here is not None else self.here
        self.offers = list(offers) if offers is not None else self.offers
        self.found = list(found) if found is not None else self.found
        self.asked = self.asked if asked is None else asked
        self.note = self.note if note is None else note
        self._wished = highlight or self._wished
        self._list()

    def type(self, text: str) -> None:
        field = self.query_one(Input)
        field.value = text
        field.cursor_position = len(text)

    @property
    def text(self) -> str:
        return self.query_one(Input).value.strip()

    @property
    def row(self) -> ChoiceRow | None:
        """The highlighted row."""
        at = self.query_one(OptionList).highlighted
        return self._lines[at][1] if at is not None and at < len(self._lines) else None

    def _wanted(self) -> Lines:
        text = self.text
        if is_path(text):
            rows = [self._typed_rows.get(row.ref, row) for row in completions(text)]
            return _named(rows) or [("no folder and no GGUF file here", None)]
        words = text.lower().split()

        def matching(rows: Sequence[ChoiceRow]) -> Lines:
            return _named(
                row
                for row in rows
                if all(word in f"{row.name} {row.ref} {row.where}".lower() for word in words)
            )

        lines = matching(sorted(self.here, key=lambda row: row.ref not in self.favourites))
        if text:
            found = _named(self.found) if self.asked == text else []
            lines += [("On the hub", None), *(found or [self._search_row(text)])]
        offers = matching(self.offers)
        if offers:
            lines += [("Downloads", None), *offers]
        return lines if lines or not self.note else [(self.note, None)]

    def _search_row(self, text: str) -> tuple[str, ChoiceRow | None]:
        if self.asked == text:
            return self.note, None
        try:
            hub = refs.parse_hub(text)
        except UsageError as error:
            return error.message, None
        if hub is None:
            row = ChoiceRow(text, f'search for "{text}"', "search", detail="Enter asks the hub.")
        elif hub.quant or hub.file:
            row = ChoiceRow(text, f"get {text}", "get", detail=f"Enter downloads {text}.")
        else:
            row = ChoiceRow(hub.repo, f"list {hub.repo}", "list", detail="Enter lists its files.")
        return row.name, row

    def _list(self) -> None:
        options = self.query_one(OptionList)
        before, self._lines = self._lines, self._wanted()
        old = [row.ref if row is not None else name for name, row in before]
        new = [row.ref if row is not None else name for name, row in self._lines]
        if old == new and options.option_count == len(new):
            for i, line in enumerate(self._lines):
                if line != before[i]:
                    options.replace_option_prompt_at_index(i, self._drawn(*line))
        else:
            at = options.highlighted
            held = old[at] if at is not None and at < len(old) else None
            with self.prevent(OptionList.OptionHighlighted):
                options.set_options(
                    [Option(self._drawn(*line), disabled=line[1] is None) for line in self._lines]
                )
            self._light(new, held)
        if self._wished in new and options.highlighted != new.index(self._wished):
            self._light(new, None)
        self.redraw_head()
        self.post_message(self.Highlighted(self, self.row))

    def _light(self, new: list[str], held: str | None) -> None:
        options = self.query_one(OptionList)
        for ref in (self._wished, held):
            if ref is not None and ref in new:
                options.highlighted = new.index(ref)
                self._wished = None if ref == self._wished else self._wished
                return
        options.highlighted = next(
            (i for i, (_, row) in enumerate(self._lines) if row is not None), None
        )

    def redraw_head(self) -> None:
        """Draw the title, with the choice unless it is being made."""
        row, chosen = self.row, ""
        if not self.has_class("-active") and row is not None:
            chosen = f"  {sanitize_line(row.name)}  {row.size}"
        if row is not None and self.note:  # more are on their way
            chosen += f"  {self.note}"
        self.query_one(".head", Static).update(Content(f"{self._title}{chosen}"))

    def _drawn(self, name: str, row: ChoiceRow | None) -> Content:
        ink = self.ink
        if row is None:
            return Content.assemble((sanitize_line(name), ink.muted))
        mark, colour = " ", ink.muted
        if row.fits is not None:
            mark, colour = ("✓", ink.good) if row.fits else ("✗", ink.bad)
        elif row.does in ("get", "continue", "stop"):
            mark, colour = "↓", ink.accent
        plain = ink.muted if row.refused else ""
        style = "bold" if row.bold else plain
        indent = " " * (len(mark) + 1)
        name, owner = sanitize_line(row.name), ""
        if len(indent) + len(name) > self._room and row.does != "open":
            owner, _, name = name.rpartition("/")
        parts = [(f"{mark} ", colour), (name, style)]
        if row.ref in self.favourites:
            parts.append((" ★", ink.accent))
        store = row.where and "/" not in row.where and "\\" not in row.where
        beside = row.where if store else row.reason if row.fits is None else ""
        below = [words for words in (row.reason, row.where, owner) if words and words != beside]
        facts = "  ".join(sanitize_line(w) for w in (row.size, beside) if w)
        if facts:
            one_line = sum(len(part) for part, _ in parts) + len(facts) + 2 <= self._room
            parts.append((f"  {facts}" if one_line else f"\n{indent}{facts}", plain))
        if below:
            warn = row.fits is False and not row.refused
            words = "".join(f"\n{indent}{sanitize_line(w)}" for w in below)
            parts.append((words, ink.warn if warn else ink.muted))
        return Content.assemble(*parts)

    @property
    def _room(self) -> int:
        """The cells of a line of the list."""
        return self.size.width - 5

    def on_resize(self) -> None:
        self.redraw()

    def redraw(self, highlight: str | None = None) -> None:
        """Draw every line again, though the rows are the same."""
        held = self.row.ref if self.row is not None else None
        self._lines = []
        self.show(highlight=highlight or held)

    def judged(self, old: ChoiceRow, new: ChoiceRow | None) -> None:
        """Replace a row by its judged one; None removes it."""
        here = [new if row is old else row for row in self.here]
        self.show(here=[row for row in here if row is not None])

    def judge_typed(self, row: ChoiceRow) -> None:
        """Show the judged row of a path's completion."""
        self._typed_rows[row.ref] = row
        self._list()

    # ------------------------------------------------------------------ keys

    def move(self, step: int) -> None:
        options = self.query_one(OptionList)
        for _ in range(abs(step)):
            (options.action_cursor_down if step > 0 else options.action_cursor_up)()

    def enter(self) -> None:
        row = self.row
        if row is not None:
            self.post_message(self.Entered(self, row))

    def complete(self) -> bool:
        """Take the highlighted completion of a path; False if there is nothing to complete."""
        row, text = self.row, self.text
        if row is None or not is_path(text) or row.does == "nothing" or row.ref == text:
            return False
        self.type(row.ref)
        return True

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self._list()
        if self.text and self._lines:
            options = self.query_one(OptionList)
            rows = [(i, row) for i, (_, row) in enumerate(self._lines) if row is not None]
            # what is known by that name comes before a question to the hub
            rows.sort(key=lambda item: item[1].does in ("search", "list"))
            options.highlighted = rows[0][0] if rows else None

    @on(OptionList.OptionHighlighted)
    def _moved(self, event: OptionList.OptionHighlighted) -> None:
        event.stop()
        self.redraw_head()
        self.post_message(self.Highlighted(self, self.row))

    @on(OptionList.OptionSelected)
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.enter()

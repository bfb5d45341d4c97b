"""Lists of a command: a table that is fitted to the terminal and plain in a pipe, or JSON.

A table is written once, as columns; each has its title and its view of an item. Light until used.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from specllama.cli import diagnostics, output

if TYPE_CHECKING:
    from rich.console import Console

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
limit_option = click.option(
    "-n", "--limit", default=20, show_default=True, type=click.IntRange(1), help="Most rows."
)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        cell: what it shows of an item; the name of an attribute or key will do. "" takes the cell
            at the same place of an item that is a row already.
        right: align numbers.
        give: fold it when the terminal is too narrow; ``cut``: end it with an ellipsis instead.
        drop: hide it below this terminal width.
    """

    title: str
    cell: Callable[[Any], object] | str = ""
    right: bool = False
    style: str = ""
    give: bool = False
    cut: bool = False
    drop: int = 0

    def text(self, item: Any, place: int) -> str:
        """Return the cell of an item; "" if there is nothing to show."""
        if callable(self.cell):
            found = self.cell(item)
        elif not self.cell:
            found = item[place]
        else:
            found = item[self.cell] if isinstance(item, Mapping) else getattr(item, self.cell)
        return "" if found is None else clean(found)


def number(title: str, cell: Callable[[Any], object] | str = "", *, drop: int = 0) -> Column:
    """Make a column of figures."""
    return Column(title, cell, right=True, drop=drop)


def picked(item: object, names: str, **more: object) -> dict[str, object]:
    """Return these attributes of an item, and more, as an object of JSON."""
    return {name: getattr(item, name) for name in names.split()} | more


def context(n: int) -> str:
    """Format a context length: 128k, 2k, 300."""
    return "?" if n <= 0 else f"{n // 1024}k" if n >= 1024 else str(n)


def clean(text: object) -> str:
    """Remove terminal controls from outside text (file names, repositories, metadata)."""
    from specllama.text import sanitize_line

    return sanitize_line(str(text))


def console(*, err: bool = False) -> Console:
    """Return a console on the current stdout or stderr: as wide as it needs when it is not a
    terminal."""
    from rich.console import Console

    stream: Any = sys.stderr if err else sys.stdout
    width = None if stream.isatty() else 10_000
    return Console(file=stream, width=width, highlight=False, markup=False, soft_wrap=False)


def listing(
    as_json: bool,
    name: str,
    items: Sequence[Any],
    columns: Sequence[Column],
    *,
    to_dict: Callable[[Any], object] = lambda item: item,
    empty: str = "",
) -> None:
    """Print the whole answer of a command that lists items.

    Args:
        name: of the list in the JSON object; each item as ``to_dict`` returns it.
        empty: shown on stderr in place of an empty table.
    """
    if as_json:
        output.json_line({name: [to_dict(item) for item in items]})
    elif items:
        show_table(items, columns)
    else:
        note(empty)


def show_facts(title: str, value: str, facts: Mapping[str, object], *, style: str = "") -> None:
    """Show a table of two columns; leave out a fact that is ""."""
    rows = [row for row in facts.items() if row[1]]
    show_table(rows, [Column(title, style=style), Column(value, give=True)])


def show_table(items: Iterable[Any], columns: Sequence[Column]) -> None:
    """Print a table. Piped: one line an item, columns two spaces apart, nothing cut or hidden."""
    if not sys.stdout.isatty():
        for line in plain(items, columns):
            output.line(line)
        return
    from rich.table import Table
    from rich.text import Text

    width = shutil.get_terminal_size().columns
    cells, most = _cells(items, columns)
    kept = [i for i, column in enumerate(columns) if width >= column.drop]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i in kept:
        column = columns[i]
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            style=column.style or None,
            no_wrap=not column.give,
            overflow="fold" if column.give else "ellipsis",
            header_style="bold underline",
            # columns that must not fold keep their width; the others share the rest
            min_width=None if column.give or column.cut else most[i],
        )
    fixed = sum(most[i] + 2 for i in kept if not columns[i].cut)
    for cell in cells[1:]:
        row = [_cut(cell[i], width - fixed) if columns[i].cut else cell[i] for i in kept]
        table.add_row(*map(Text, row))
    console().print(table)


def plain(items: Iterable[Any], columns: Sequence[Column]) -> list[str]:
    """Return a table as lines: the titles, then one line an item, columns two spaces apart."""
    cells, most = _cells(items, columns)
    found = []
    for line in cells:
        aligned = (
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(line, most, columns, strict=True)
        )
        found.append("  ".join(aligned).rstrip())
    return found


def _cells(items: Iterable[Any], columns: Sequence[Column]) -> tuple[list[list[str]], list[int]]:
    """Return the titles and every item's cells, and the width of each column."""
    cells = [[column.title for column in columns]]
    cells += [[column.text(item, i) for i, column in enumerate(columns)] for item in items]
    return cells, [max(map(len, column)) for column in zip(*cells, strict=True)]


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(room - 1, 1)].rstrip() + "…"


def when(seconds: float) -> str:
    """Format a moment in seconds since 1970, in local time: 2026-11-21 09:30."""
    return datetime.fromtimestamp(seconds).isoformat(" ", "minutes")


def note(text: str) -> None:
    """Write one line for people to stderr."""
    diagnostics.say(clean(text))

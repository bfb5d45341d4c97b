"""Tables on stdout: fitted to the terminal, plain and unfolded when piped. Light until used."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from specllama.cli import diagnostics, output

if TYPE_CHECKING:
    from rich.console import Console

GB, MB = 1e9, 1e6


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        give: fold it when the terminal is too narrow; ``cut``: end it with an ellipsis instead.
        drop: hide it below this terminal width.
    """

    title: str
    align: Literal["left", "right"] = "left"
    style: str = ""
    give: bool = False
    cut: bool = False
    drop: int = 0


def size(n_bytes: float) -> str:
    """A size as people read it: 4.7 GB, 12 MB."""
    if n_bytes >= 0.95 * GB:
        return f"{n_bytes / GB:.1f} GB"
    if n_bytes >= 0.95 * MB:
        return f"{n_bytes / MB:.0f} MB"
    return f"{max(n_bytes / 1e3, 0):.0f} kB"


def params(n: float) -> str:
    """A parameter count: 8.2 B, 600 M, 5.5 M."""
    if n <= 0:
        return "?"
    if n >= 0.95e9:
        return f"{n / 1e9:.1f} B"
    return f"{n / 1e6:.0f} M" if n >= 20e6 else f"{n / 1e6:.1f} M"


def context(n: int) -> str:
    """A context length: 128k, 2k, 300."""
    return "?" if n <= 0 else f"{n // 1024}k" if n >= 1024 else str(n)


def clean(text: object) -> str:
    """Outside text (file names, repositories, metadata) without terminal controls."""
    from specllama.text import sanitize_line

    return sanitize_line(str(text))


def without_name(reason: str) -> str:
    """A refusal without the file name that its row already shows."""
    name, _, rest = reason.partition(" ")
    return rest if name.removesuffix(":").endswith(".gguf") and rest else reason


def console(*, err: bool = False) -> Console:
    """A console on the current stdout or stderr: as wide as it needs when it is not a terminal."""
    from rich.console import Console

    stream: Any = sys.stderr if err else sys.stdout
    width = None if stream.isatty() else 10_000
    return Console(file=stream, width=width, highlight=False, markup=False, soft_wrap=False)


def show_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. Piped: one line a row, columns two spaces apart, nothing cut or hidden."""
    if not sys.stdout.isatty():
        _plain(columns, rows)
        return
    from rich.table import Table
    from rich.text import Text

    width = shutil.get_terminal_size().columns
    cells = [[column.title, *(clean(row[i]) for row in rows)] for i, column in enumerate(columns)]
    kept = [i for i, column in enumerate(columns) if width >= column.drop]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i in kept:
        column = columns[i]
        table.add_column(
            column.title,
            justify=column.align,
            style=column.style or None,
            no_wrap=not column.give,
            overflow="fold" if column.give else "ellipsis",
            header_style="bold underline",
            # columns that must not fold keep their width; the others share the rest
            min_width=None if column.give or column.cut else max(map(len, cells[i]), default=0),
        )
    fixed = sum(max(map(len, cells[i])) + 2 for i in kept if not columns[i].cut)
    for n in range(1, len(rows) + 1):
        row = [_cut(cells[i][n], width - fixed) if columns[i].cut else cells[i][n] for i in kept]
        table.add_row(*map(Text, row))
    console().print(table)


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(room - 1, 1)].rstrip() + "…"


def _plain(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    lines = [[column.title for column in columns], *([clean(c) for c in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        cells = [
            cell.rjust(widths[i]) if columns[i].align == "right" else cell.ljust(widths[i])
            for i, cell in enumerate(line)
        ]
        output.line("  ".join(cells).rstrip())


def note(text: str) -> None:
    """One line for people on stderr."""
    diagnostics.say(clean(text))


def folders() -> tuple[str, ...]:
    """Model folders from the settings, where the settings have them."""
    from specllama.settings.schema import BY_NAME

    if "model-dirs" not in BY_NAME:
        return ()
    from specllama.settings.config import load_settings

    return tuple(load_settings()["model-dirs"] or ())

"""Documents for other people, as Markdown.

Whatever a model, a file or a person wrote is ``Raw``: it is shown as it is and can be nothing else,
neither markup nor a link, a mention or a control character.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from specllama.text import sanitize

_UNFIT = dict.fromkeys((0xFFFE, 0xFFFF), "\ufffd")  # XML has no way to write them


def clean(text: str) -> str:
    """Remove the characters that some format cannot hold."""
    return sanitize(text).translate(_UNFIT)


class Raw(str):
    """Text that a model, a file or a person wrote."""

    __slots__ = ()


def page(title: str, parts: Iterable[str]) -> str:
    """Return a document of parts; an empty one is left out."""
    return "\n\n".join([f"# {_md(title)}", *filter(None, parts)]) + "\n"


def heading(text: str) -> str:
    return f"## {_md(text)}"


def paragraph(text: str) -> str:
    return _md(text)


def fact_list(lines: Iterable[Sequence[str]]) -> str:
    """Write a list; each line is made of our words and of raw parts."""
    return "\n".join("- " + "".join(map(_md, line)) for line in lines)


def quote(text: str) -> str:
    """Write raw text of several lines."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}text\n{clean(text)}\n{fence}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_row(map(_md, heads)), _row("---" for _ in heads), *(_row(map(_md, r)) for r in rows)]
    return "\n".join(lines)


def folded(title: str, parts: Iterable[str]) -> str:
    """Write parts below a title that opens them."""
    inner = "\n\n".join(filter(None, parts))
    return f"<details><summary>{escape(title)}</summary>\n\n{inner}\n\n</details>"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _md(text: str) -> str:
    """Write a line of Markdown: raw text as code, our own words as they are."""
    line = " ".join(clean(text).split("\n")) if not isinstance(text, Raw) else clean(text)
    if isinstance(text, Raw) and text:
        line = line.replace("\n", "⏎").replace("\t", "⇥")
        begin, end = len(line) - len(line.lstrip(" ")), len(line.rstrip(" "))
        line = "␣" * begin + line[begin:end] + "␣" * (len(line) - max(begin, end))
        ticks = "`" * (_longest_run(line) + 1)
        pad = " " if "`" in (line[0], line[-1]) else ""
        line = f"{ticks}{pad}{line}{pad}{ticks}"
    return line.replace("|", "\\|")


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)

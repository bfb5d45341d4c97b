"""Documents for other people, as Markdown.

Whatever a model, a file or a person wrote is ``Raw``: it is shown as it is and can be nothing else,
neither markup nor a link, a mention or a control character.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from specllama.text import sanitize

_UNFIT = dict.fromkeys((0xFFFE, 0xFFFF), "\ufffd")  # XML has no way to write them


def clean(text: str) -> str:
    """Remove the characters that some format cannot hold."""
    return sanitize(text).translate(_UNFIT)


class Raw(str):
    """Text that a model, a file or a person wrote."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Heading:
    text: str


@dataclass(frozen=True, slots=True)
class Say:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class FactList:
    """A list; each line is made of our words and of raw parts."""

    lines: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Quote:
    """Raw text of several lines."""

    text: str


@dataclass(frozen=True, slots=True)
class Table:
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Folded:
    """Parts below a title that opens them."""

    title: str
    parts: Sequence[Part]


Part = Heading | Say | FactList | Quote | Table | Folded


@dataclass(frozen=True, slots=True)
class Document:
    title: str
    parts: Sequence[Part] = field(default_factory=tuple)


def markdown(document: Document) -> str:
    lines = [f"# {_md(document.title)}", *_blocks(document.parts)]
    return "\n\n".join(lines) + "\n"


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return [_row(map(_md, heads)), _row("---" for _ in heads), *(_row(map(_md, r)) for r in rows)]


def _blocks(parts: Sequence[Part]) -> list[str]:
    return [block for part in parts if (block := _block(part))]


def _block(part: Part) -> str:
    match part:
        case Heading(text):
            return f"## {_md(text)}"
        case Say(text):
            return _md(text)
        case FactList(lines):
            return "\n".join("- " + "".join(map(_md, line)) for line in lines)
        case Quote(text):
            return _fenced(text)
        case Table(heads, rows):
            return "\n".join(markdown_table(heads, rows))
        case Folded(title, parts):
            inner = "\n\n".join(_blocks(parts))
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


def _fenced(text: str) -> str:
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}text\n{clean(text)}\n{fence}"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)

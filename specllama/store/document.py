"""Documents that are handed on: one structure, as Markdown and as a self-contained web page.

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
    """Text that every format can hold."""
    return sanitize(text).translate(_UNFIT)


class Raw(str):
    """Text of others."""

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
class TokenPiece:
    """Tokens of a reply; ``kind`` is kept, refused or target, ``note`` says so in words."""

    kind: str
    text: str
    note: str
    letter: str = ""


@dataclass(frozen=True, slots=True)
class DraftedText:
    """A reply as it was drafted. Markdown cannot mark it: it gets the text alone."""

    pieces: Sequence[TokenPiece]
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture for web pages; the same figures stand in a table."""

    svg: str


@dataclass(frozen=True, slots=True)
class Folded:
    """Parts below a title that opens them."""

    title: str
    parts: Sequence[Part]


Part = Heading | Say | FactList | Quote | Table | DraftedText | Figure | Folded


@dataclass(frozen=True, slots=True)
class Document:
    title: str
    parts: Sequence[Part] = field(default_factory=tuple)


# ---- Markdown


def markdown(document: Document) -> str:
    lines = [f"# {_md(document.title)}", *_blocks(document.parts)]
    return "\n\n".join(lines) + "\n"


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table, line by line."""
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
        case DraftedText(pieces, _):
            return _fenced("".join(p.text for p in pieces if p.kind != "refused"))
        case Figure():
            return ""
        case Folded(title, parts):
            inner = "\n\n".join(_blocks(parts))
            return f"<details><summary>{escape(title)}</summary>\n\n{inner}\n\n</details>"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _md(text: str) -> str:
    """In a line: raw text as code, our own words as they are."""
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


# ---- a web page


def html(document: Document) -> str:
    """A whole page, which is well-formed XML, too: no scripts, nothing loaded from elsewhere."""
    title, body = document.title, "".join(map(_element, document.parts))
    name = _html(title)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f"<title>{escape(clean(title))}</title>"
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\"/>"
        '<meta name="viewport" content="width=device-width"/>'
        f"<style>{STYLE}</style></head>\n<body><h1>{name}</h1>{body}</body></html>\n"
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_html(c)}</th>" for c in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{_html(c)}</td>" for c in row) + "</tr>\n" for row in rows
    )
    return f"<table><tr>{head}</tr>\n{body}</table>"


def _element(part: Part) -> str:
    match part:
        case Heading(text):
            return f"<h2>{_html(text)}</h2>"
        case Say(text):
            return f"<p>{_html(text)}</p>"
        case FactList(lines):
            return "<ul>" + "".join(f"<li>{''.join(map(_html, ln))}</li>" for ln in lines) + "</ul>"
        case Quote(text):
            return f"<pre>{escape(clean(text))}</pre>"
        case Table(heads, rows):
            return _table(heads, rows)
        case DraftedText(pieces, legend):
            said = f"<p>{_html(legend)}</p>" if legend else ""
            return f'<pre class="drafted">{"".join(map(_piece, pieces))}</pre>{said}'
        case Figure(svg):
            return svg
        case Folded(title, parts):
            inner = "".join(map(_element, parts))
            return f"<details><summary>{_html(title)}</summary>{inner}</details>"


TAGS = {"kept": "u", "refused": "del", "target": "b"}


def _piece(piece: TokenPiece) -> str:
    """Read without its colours, too: each kind is an element of its own."""
    tag = TAGS[piece.kind]
    letter = f"<sup>{_html(piece.letter)}</sup>" if piece.letter else ""
    note = escape(clean(piece.note))
    return f'{letter}<{tag} title="{note}">{escape(clean(piece.text))}</{tag}>'


def _html(text: str) -> str:
    shown = escape(clean(text))
    return f"<code>{shown}</code>" if isinstance(text, Raw) else shown


STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #68737d; --line: #d5dbe0;
  --good: #2f8f6b; --bad: #c2573a; --paper: #ffffff; --guess: #1565a8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #98a2ab; --line: #3a434b;
  --good: #4fb88f; --bad: #e08162; --paper: #14181c; --guess: #5aa9e6; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 860px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0;
  font-variant-numeric: tabular-nums; }
@media (max-width: 40rem) { table { display: block; overflow-x: auto; } }
th, td { padding: .25rem .5rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
th { color: var(--soft); font-weight: 600; }
svg { width: 100%; height: auto; margin: 1rem 0; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink); } svg .l { text-anchor: end; fill: var(--soft); }
svg .h { font-weight: 600; font-size: 13px; }
svg .good { fill: var(--good); } svg .bad { fill: var(--bad); }
svg .w { stroke: var(--ink); stroke-width: 1.5; }
svg .m { stroke: var(--soft); stroke-dasharray: 4 3; fill: none; }
details { color: var(--soft); } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
code { font-size: .9em; overflow-wrap: anywhere; }
.drafted { line-height: 1.8; } .drafted sup { color: var(--soft); }
.drafted u { color: var(--guess); text-underline-offset: 3px; } .drafted b { color: var(--ink); }
.drafted del { color: var(--bad); opacity: .8; }
"""

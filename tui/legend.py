"""Meanings of every sign, letter and color: for the help page, and next to each use."""

from __future__ import annotations

from collections.abc import Iterable

from specllama.tui.themes import Glyphs, Ink

Entry = tuple[str, str, str]  # the sign, its style, its meaning


def rounds(glyphs: Glyphs, ink: Ink, sources: Iterable[str]) -> list[Entry]:
    """Explain the row of rounds, in few words, as far as it shows these sources."""
    names = dict.fromkeys(part for source in sources for part in source.split("+"))
    return [
        *((glyphs.source(name), ink.source(name), glyphs.label(name)) for name in names),
        (glyphs.accepted, ink.source(next(iter(names), "draft")), "kept"),
        (glyphs.rejected, ink.rejected, "refused"),
        (glyphs.untested, ink.muted, "unread"),
        (glyphs.target, ink.target, "target"),
    ]


def signs(glyphs: Glyphs, ink: Ink) -> list[Entry]:
    """Explain every sign of the row of rounds and of replies as drafted, except the letters."""
    return [
        (glyphs.accepted, ink.source("draft"), "a guess that was kept, in its source's color"),
        (glyphs.rejected, ink.rejected, "a guess that was refused"),
        (glyphs.untested, ink.muted, "a guess behind a refused one, which was not read"),
        (glyphs.target, ink.target, "the target's own token, which ends every round"),
        ("word", f"underline {ink.source('draft')}", "F2: guessed and kept"),
        ("word", ink.target, "F2: the target's own"),
        ("word", ink.ghosts[0], "F2: guessed and refused"),
    ]


def letters(glyphs: Glyphs, ink: Ink) -> list[Entry]:
    """Explain the letters of the methods that the loaded pair could use."""
    return [
        (glyphs.source(method.name), ink.source(method.name), method.short)
        for method in glyphs.methods
        if method.letter
    ]


def colours(glyphs: Glyphs, ink: Ink) -> list[Entry]:
    """Explain the verdict's colors: below replies, in the strip, the race and the inspector."""
    times = glyphs.times
    return [
        (f"1.3{times}", ink.verdict("faster"), "surely faster than plain; a round that won time"),
        (f"0.8{times}", ink.verdict("slower"), "surely slower than plain; a round that lost time"),
        (f"1.0{times}", ink.verdict("unsure"), "not sure yet, or drafting is off"),
        ("80%", ink.warn, "the context is nearly full"),
    ]

"""Completion at the cursor.

Slash commands, the words that follow them, and paths after ``@`` and ``/read``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specllama.replies import attach
from specllama.tui.keymap import SLASH, Action

_BEGUN = re.compile(r"""(?<!\S)@("[^"\n]*|'[^'\n]*|[^\s@"']*)$""")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One candidate: the text it inserts, and whether the text is complete then."""

    insert: str
    label: str
    help: str = ""
    short: str = ""  # instead of the help where that has no room
    final: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """Candidates to replace the text from ``start`` to the cursor; there is at least one."""

    start: int
    candidates: tuple[Candidate, ...]


def complete(text: str, cursor: int) -> Completion | None:
    if text.startswith("/") and "\n" not in text and cursor == len(text):
        name, space, rest = text[1:].partition(" ")
        action = SLASH.get(name.lower())
        found = list(_commands(name)) if not space else list(_words(action, rest)) if action else []
        return Completion(0, tuple(found)) if found else None
    begun = _BEGUN.search(text[:cursor])
    if begun is None:
        return None
    found = [
        Candidate(
            _begun(path) if path.endswith("/") else f"{attach.named(path)} ", path, detail, detail
        )
        for path, detail in _paths(begun[1].lstrip("\"'"))
    ]
    return Completion(begun.start(), tuple(found)) if found else None


def _commands(begun: str) -> Iterator[Candidate]:
    begun = begun.lower()
    at = {name: name.find(begun) for name in SLASH}
    # what begins so stands before what only contains it, and the very word before both
    for name in sorted(SLASH, key=lambda name: (name != begun, at[name] > 0)):
        if at[name] == 0 or (at[name] > 0 and len(begun) > 1):
            action = SLASH[name]
            more = " ".join(filter(None, ("|".join(action.words), action.takes)))
            insert = f"/{name} " if more else f"/{name}"
            label = f"/{name} {action.takes}".rstrip()
            yield Candidate(insert, label, action.help, action.label, final=not more)


def _words(action: Action, begun: str) -> Iterator[Candidate]:
    for word in action.words:
        if word.startswith(begun.lower()):
            yield Candidate(f"/{action.slash} {word}", word, final=True)
    if action.takes:
        for path, detail in _paths(begun):
            insert = f"/{action.slash} {path}"
            yield Candidate(insert, path, detail, detail, final=not path.endswith("/"))


def _paths(begun: str) -> Iterator[tuple[str, str]]:
    """Yield paths that continue this one, with the sizes of files."""
    for path in attach.paths(begun):
        detail = ""
        if not path.endswith("/"):
            try:
                detail = attach.size_of(Path(path).expanduser().stat().st_size)
            except (OSError, ValueError, RuntimeError):
                detail = "cannot be read"
        yield path, detail


def _begun(folder: str) -> str:
    """Return a folder as the beginning of a mention: a quote stays open."""
    quoted = attach.named(folder)
    return quoted if quoted == f"@{folder}" else quoted[:-1]

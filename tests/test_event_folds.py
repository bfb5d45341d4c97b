"""Events are folded in one place: who else asks for the class of an event, counted."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from specllama.events import EVENT_TYPES

ROOT = Path(__file__).parent.parent
MOST = 12
NAMES = {"Event", "AnyEvent", "Said", *(cls.__name__ for cls in EVENT_TYPES.values())}


def sites(source: str) -> Iterator[int]:
    """The lines that ask for the class of an event: one for each call, case and comparison."""
    for node in ast.walk(ast.parse(source)):
        asked: ast.AST | None = None
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                asked = kinds
            case ast.MatchClass(cls=kinds):
                asked = kinds
            case ast.Compare(left=ast.Call(func=ast.Name(id="type")), comparators=[kinds]):
                asked = kinds
        if asked is not None and any(_names(part) & NAMES for part in ast.walk(asked)):
            yield node.lineno


def _names(node: ast.AST) -> set[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return {name}
    return set()


def test_the_count_sees_every_way_to_ask() -> None:
    source = """
isinstance(event, Finished)
isinstance(event, (int, events.RoundDone))
isinstance(event, TextDelta | ReasoningDelta)
isinstance(event, str)
type(event) is Notice
match event:
    case Started() | PrefillProgress():
        pass
    case int():
        pass
"""
    assert sorted(sites(source)) == [2, 3, 4, 6, 8, 8]


def test_events_are_folded_in_one_place() -> None:
    found = {
        str(path.relative_to(ROOT)): n
        for folder in ("specllama", "tui", "models")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (n := len(list(sites(path.read_text("utf-8")))))
    }
    assert found.pop("specllama/told.py") == len(EVENT_TYPES)
    assert sum(found.values()) <= MOST - len(EVENT_TYPES), found

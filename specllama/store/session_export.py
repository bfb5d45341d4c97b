"""A stored conversation as a document: Markdown to read, JSON to work with."""

from __future__ import annotations

import json

from specllama.store.sessions import StoredSession
from specllama.store.tree import START, Tree


def to_markdown(session: StoredSession) -> str:
    """A conversation as Markdown, one heading per turn; its other versions follow it."""
    tree = session.tree
    path = tree.path
    parts = [f"# {session.title}"]
    if session.system:
        parts.append(f"## System\n\n{session.system}")
    for number in path:
        parts += _turn(tree, number)
    others = [number for number in tree.messages if number not in set(path)]
    if others:
        parts.append("# Other versions")
    for number in others:
        parts += _turn(tree, number, place=True)
    return "\n\n".join(parts) + "\n"


def _turn(tree: Tree, number: int, *, place: bool = False) -> list[str]:
    """The heading of a message, which says its place where that is asked, and what it says."""
    message = tree.messages[number]
    version, versions = tree.version(number)
    marks = [f"message {len(tree.path_to(number))}"] if place else []
    marks += [f"version {version} of {versions}"] if versions > 1 else []
    marks += ["interrupted"] if message.state == "partial" else []
    parts = [f"## {message.role.capitalize()}" + (f" ({', '.join(marks)})" if marks else "")]
    if message.reasoning:
        parts.append(f"<details><summary>Thought</summary>\n\n{message.reasoning}\n\n</details>")
    return [*parts, message.content]


def to_json(session: StoredSession) -> str:
    """A conversation as JSON, with settings, the counters of each reply and every version."""
    tree = session.tree
    path = tree.path
    data = {
        "id": session.id,
        "title": session.title,
        "created_s": session.created_s,
        "updated_s": session.updated_s,
        "system": session.system,
        "settings": session.settings,
        "messages": [_fields(tree, number) for number in path],
        "other_versions": [_fields(tree, n) for n in tree.messages if n not in set(path)],
    }
    return json.dumps(data, ensure_ascii=False, indent=2) + "\n"


def _fields(tree: Tree, number: int) -> dict[str, object]:
    """A message, its number, and the number of the one it follows (null: of none)."""
    message = tree.messages[number]
    parent = tree.parents[number]
    return {
        **message.message.to_dict(),
        "state": message.state,
        "stats": message.stats,
        "number": number,
        "follows": None if parent == START else parent,
    }

"""A stored conversation as a document: Markdown to read, JSON to work with."""

from __future__ import annotations

import json

from specllama.store.sessions import StoredSession


def to_markdown(session: StoredSession) -> str:
    """A conversation as Markdown, one heading per turn."""
    parts = [f"# {session.title}"]
    if session.system:
        parts.append(f"## System\n\n{session.system}")
    for message in session.messages:
        mark = " (interrupted)" if message.state == "partial" else ""
        parts.append(f"## {message.role.capitalize()}{mark}")
        if message.reasoning:
            parts.append(
                f"<details><summary>Thought</summary>\n\n{message.reasoning}\n\n</details>"
            )
        parts.append(message.content)
    return "\n\n".join(parts) + "\n"


def to_json(session: StoredSession) -> str:
    """A conversation as JSON, with settings and the counters of each reply."""
    data = {
        "id": session.id,
        "title": session.title,
        "created_s": session.created_s,
        "updated_s": session.updated_s,
        "system": session.system,
        "settings": session.settings,
        "messages": [
            {**m.message.to_dict(), "state": m.state, "stats": m.stats} for m in session.messages
        ],
    }
    return json.dumps(data, ensure_ascii=False, indent=2) + "\n"

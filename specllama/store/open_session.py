"""A conversation that is being written: the store keeps every change of it.

Where another process went on with the stored conversation meanwhile, this one goes on as a copy.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from specllama.errors import StoreError
from specllama.settings.params import GenerateParams
from specllama.store.codec import params_to_dict
from specllama.store.message_tree import START, StoredMessage, Tree
from specllama.store.sessions import UNTITLED, ContinuedElsewhere, SessionStore, StoredSession


class OpenSession:
    """One conversation and its place in the store from its first message on.

    Attributes:
        id: in the store; None until the first message.
        tree: its messages, in every version.
        system: its system prompt.
        chosen: settings that are stored with it, by name.
    """

    def __init__(
        self, store: SessionStore, system: str, chosen: dict[str, Any], title: str = ""
    ) -> None:
        self.id: str | None = None
        self.tree = Tree()
        self.system = system
        self.chosen = chosen
        self._store = store
        self._title = title
        self._seen: float | None = None  # when it was last written, by us

    @classmethod
    def stored(cls, store: SessionStore, selector: str) -> OpenSession:
        """Open the one stored conversation that fits, or raise StoreError or UsageError."""
        stored = store.get(store.find(selector))
        chosen = stored.settings.get("set")
        chosen = chosen if isinstance(chosen, dict) else {}
        one = cls(store, stored.system, chosen, stored.title)
        one.id, one._seen, one.tree = stored.id, stored.updated_s, stored.tree
        if one.tree.leaf == START:  # every turn was taken back
            one.tree.leaf = one.tree.end_of(START)
        return one

    @property
    def title(self) -> str:
        stored = "" if self.id is None else self._store.title(self.id)
        return stored or self._title or UNTITLED

    def configure(self, *, system: str | None = None, chosen: dict[str, Any] | None = None) -> None:
        if system is not None:
            self.system = system
        if chosen is not None:
            self.chosen = chosen
        if self.id is not None:
            settings = None if chosen is None else self._settings()
            self._store.configure(self.id, system=system, settings=settings)

    def put(self, number: int, after: int, message: StoredMessage) -> None:
        """Add or change a message; the path ends with it."""
        self.tree.put(number, after, message)
        self.keep(number, after, message)

    def keep(self, number: int, after: int, message: StoredMessage) -> None:
        """Store a message as it is now."""
        self._update(
            lambda store, at, seen: store.put(at, number, message, parent=after, seen=seen)
        )

    def choose(self, leaf: int) -> None:
        self.tree.leaf = leaf
        self._update(lambda store, at, seen: store.choose(at, leaf, seen=seen))

    def drop(self, number: int, leaf: int) -> None:
        """Remove a message that nothing follows; the path ends with ``leaf`` then."""
        self.tree.drop(number)
        self.tree.leaf = leaf
        self._update(lambda store, at, seen: store.drop(at, number, leaf, seen=seen))

    def export(self, form: Literal["md", "json"], params: GenerateParams, tree: Tree) -> str:
        """Write the conversation with these messages."""
        now = time.time()
        stored = StoredSession("", self.title, "", {}, now, now)
        with suppress(StoreError):  # where it could not be stored, what is here is all there is
            stored = self._store.get(self.id or "")
        settings = {"params": params_to_dict(params)}
        stored = replace(stored, system=self.system, settings=settings, tree=tree)
        return to_json(stored) if form == "json" else to_markdown(stored)

    def _update(self, write: Callable[[SessionStore, str, float | None], float]) -> None:
        """Write to the stored conversation, or to a copy if another process continued it."""
        store = self._store
        try:
            self._seen = write(store, self._stored_id(), self._seen)
        except ContinuedElsewhere:
            self._title = f"{self.title} (copy)"
            self.id = self._seen = None
            identity = self._stored_id()
            for number, message in self.tree.messages.items():
                parent = self.tree.parents[number]
                self._seen = store.put(identity, number, message, parent=parent, seen=self._seen)
            self._seen = write(store, identity, self._seen)
            store.notices.append(
                "this conversation was continued elsewhere at the same time: yours is now "
                f"“{self._title}” ({identity})"
            )

    def _stored_id(self) -> str:
        if self.id is None:
            self.id = self._store.create(
                title=self._title, system=self.system, settings=self._settings()
            )
        return self.id

    def _settings(self) -> dict[str, Any]:
        return {"set": self.chosen}


def to_markdown(session: StoredSession) -> str:
    """Write a conversation as Markdown, one heading per turn; its other versions follow it."""
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
    """Write the heading and text of a message; with ``place`` the heading gives its number."""
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
    """Write a conversation as JSON, with settings, the counters of each reply and every version."""
    tree = session.tree
    path = tree.path
    data = {
        "id": session.id, "title": session.title, "created_s": session.created_s,
        "updated_s": session.updated_s, "system": session.system, "settings": session.settings,
        "messages": [_fields(tree, number) for number in path],
        "other_versions": [_fields(tree, n) for n in tree.messages if n not in set(path)],
    }  # fmt: skip
    return json.dumps(data, ensure_ascii=False, indent=2) + "\n"


def _fields(tree: Tree, number: int) -> dict[str, object]:
    """Return a message, its number and that of the one before it (null for the first)."""
    message = tree.messages[number]
    parent = tree.parents[number]
    return {
        **message.message.to_dict(),
        "state": message.state,
        "stats": message.stats,
        "number": number,
        "follows": None if parent == START else parent,
    }

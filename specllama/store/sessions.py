"""Stored conversations, in one file (store/database.py).

A turn is stored before it is answered, and the reply is updated while it grows, so a killed process
loses at most the last update. Deleting only marks a session, so it can be undone; what was
deleted a month ago is removed when the store is opened.

A store never stops a conversation: where the file cannot be written (disk full, read-only, a newer
schema), the store continues in memory or without writing, and ``notices`` gets one line. While
another process has the file locked, what is to be written waits, and is written first the next time
and when the store is closed. A damaged file is moved aside, never deleted.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import sqlite3
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from specllama.errors import SpecllamaError, StoreError, UsageError
from specllama.files import DAMAGE
from specllama.interface import Closes
from specllama.paths import sessions_file
from specllama.replies import attach
from specllama.store import database, search, states
from specllama.store.message_tree import StoredMessage, Tree
from specllama.text import encodable

logger = logging.getLogger("specllama.store")

_NOWHERE = Path(":memory:")
UNTITLED = "untitled"
KEEP_DELETED_S = 30 * 86400.0  # how long a deleted session can be brought back
_TITLE_CHARS = 60
_PUT = "INSERT INTO messages"
_PATIENCE_MS = 5000  # how long a write waits for another process, unless one waits already
_HURRY_MS = 100


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """A line of the list.

    Attributes:
        found: of a search, the message with most of its words, around the first.
    """

    id: str
    title: str
    created_s: float
    updated_s: float
    messages: int
    found: str = ""


@dataclass(frozen=True, slots=True)
class StoredSession:
    id: str
    title: str
    system: str
    settings: dict[str, Any]
    created_s: float
    updated_s: float
    tree: Tree = field(default_factory=Tree)

    @property
    def messages(self) -> tuple[StoredMessage, ...]:
        """The messages of the chosen path."""
        return tuple(self.tree.chosen)


class ContinuedElsewhere(StoreError):
    """An error: another process has written to the session since it was read."""


class SessionStore(Closes):
    """The sessions file. Safe to use from several threads and processes."""

    def __init__(self, connection: sqlite3.Connection, path: Path, notices: Sequence[str]) -> None:
        self.path = path
        self.notices: list[str] = list(notices)
        self._db = connection
        self._lock = threading.RLock()
        self._writing = True
        self._fleeting = False  # in memory
        self._waiting: list[_Write] = []
        self._locked = False  # by another process, at the last try
        self._lost = ""  # why earlier conversations are missing
        connection.create_function("lowered", 1, str.lower, deterministic=True)

    @classmethod
    def open(cls, path: Path | None = None) -> SessionStore:
        """Open or create the file; never fails (see the module's first lines)."""
        path = path or sessions_file()
        notices: list[str] = []
        try:
            store = cls(database.opened(path, notices), path, notices)
        except (sqlite3.Error, OSError, StoreError) as error:
            notices.append(
                f"conversations cannot be stored in {path} ({error}); this one is kept in memory"
            )
            store = cls._to_read(path, notices)
            store._lost = notices[-1]
            return store
        if notices:  # the file was damaged
            store._lost = notices[-1]
        with suppress(StoreError):  # an unreadable table is reported when it is needed
            store.purge()
        return store

    @classmethod
    def unstored(cls) -> SessionStore:
        """Make a store in memory: nothing in it outlives the process."""
        store = cls(database.in_memory(), _NOWHERE, ())
        store._fleeting = True
        return store

    @property
    def keeps(self) -> bool:
        """True if the data written here outlives the process."""
        return self._writing and not self._fleeting

    @property
    def lacks(self) -> bool:
        """True if it lacks something that was to be stored here: the disk is full or cannot be
        written, or another program has the file locked."""
        return self.path != _NOWHERE and (not self.keeps or bool(self._waiting))

    @classmethod
    def peek(cls, path: Path | None = None) -> SessionStore:
        """Open the file for reading only: create, mend and move nothing."""
        return cls._to_read(path or sessions_file(), [])

    @classmethod
    def _to_read(cls, path: Path, notices: list[str]) -> SessionStore:
        """Open earlier conversations for reading if nothing can be written; there may be none."""
        connection = database.opened_to_read(path)
        store = cls(connection or database.in_memory(), path, notices)
        store._writing = store._fleeting = connection is None
        return store

    def close(self) -> None:
        with self._lock:
            if self._waiting:
                self._db.execute(f"PRAGMA busy_timeout = {_PATIENCE_MS}")
                with suppress(ContinuedElsewhere):
                    self._write_out()
                if self._waiting:  # the conversation has ended, so that no notice is read any more
                    logger.warning("the last messages were not stored: %s is locked", self.path)
            self._waiting.clear()
            self._db.close()

    def create(
        self, *, title: str = "", system: str = "", settings: dict[str, Any] | None = None
    ) -> str:
        """Create a session; return its id, eight hex digits."""
        identity = secrets.token_hex(4)
        now = time.time()
        self._write(
            (
                "INSERT INTO sessions (id, title, titled, system, settings, created_s, updated_s) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                identity,
                _clean(title) or UNTITLED,
                bool(title),
                encodable(system),
                json.dumps(settings or {}),
                now,
                now,
            )
        )
        return identity

    def put(
        self,
        session: str,
        seq: int,
        message: StoredMessage,
        *,
        parent: int | None = None,
        seen: float | None = None,
    ) -> float:
        """Store or replace message number ``seq``, with which the chosen path ends then; the first
        question names an untitled session.

        Args:
            parent: the message that it follows, by default the one before it.
            seen: ``updated_s`` of the session as the caller last saw it.

        Returns:
            ``updated_s`` as it is now.

        Raises:
            ContinuedElsewhere: it is not as ``seen``; nothing was written.
        """
        now = _later_than(seen)
        content = encodable(message.content)
        stats = json.dumps(message.stats) if message.stats else None
        seams = json.dumps(message.seams) if message.seams else None
        statements: list[tuple[Any, ...]] = [
            (
                f"{_PUT} VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET "
                "role = excluded.role, content = excluded.content, state = excluded.state, "
                "stats = excluded.stats, reasoning = excluded.reasoning, seams = excluded.seams",
                *(session, seq, message.role, content, message.state, stats, now),
                *(encodable(message.reasoning), seams, seq - 1 if parent is None else parent),
            ),
            _choose(session, seq, now),
        ]
        if message.role == "user" and (title := _title(content)):
            statements.append(
                (
                    "UPDATE sessions SET title = ?, titled = 1 WHERE id = ? AND titled = 0",
                    *(title, session),
                )
            )
        self._write(*statements, seen=(session, seen))
        return now

    def choose(self, session: str, leaf: int, *, seen: float | None = None) -> float:
        """Let the chosen path end with message ``leaf``; otherwise as ``put``."""
        now = _later_than(seen)
        self._write(_choose(session, leaf, now), seen=(session, seen))
        return now

    def drop(self, session: str, seq: int, leaf: int, *, seen: float | None = None) -> float:
        """Forget message ``seq``, which nothing follows, and choose ``leaf``; otherwise as
        ``put``. A session that it named, and that has no other, is untitled again."""
        now = _later_than(seen)
        where = "WHERE session_id = ? AND seq = ?"
        content = self._rows(f"SELECT content FROM messages {where}", (session, seq))
        self._write(
            (f"DELETE FROM messages {where}", session, seq),
            *(
                (
                    "UPDATE sessions SET title = ?, titled = 0 WHERE id = ? AND title = ? "
                    "AND NOT EXISTS (SELECT 1 FROM messages WHERE session_id = ?)",
                    *(UNTITLED, session, _title(text), session),
                )
                for (text,) in content
            ),
            _choose(session, leaf, now),
            seen=(session, seen),
        )
        return now

    def configure(
        self, session: str, *, system: str | None = None, settings: dict[str, Any] | None = None
    ) -> None:
        """Change the system prompt or the stored settings of a session."""
        if system is not None:
            self._write(("UPDATE sessions SET system = ? WHERE id = ?", encodable(system), session))
        if settings is not None:
            text = json.dumps(settings)
            self._write(("UPDATE sessions SET settings = ? WHERE id = ?", text, session))

    def rename(self, session: str, title: str) -> None:
        """Change the title; raise UsageError if it is empty."""
        if not _clean(title):
            raise UsageError("a session needs a title")
        self._write(
            ("UPDATE sessions SET title = ?, titled = 1 WHERE id = ?", _clean(title), session)
        )

    def delete(self, session: str) -> None:
        """Hide a session; ``undelete`` brings it back. Its states are deleted for good."""
        self._write(("UPDATE sessions SET deleted_s = ? WHERE id = ?", time.time(), session))
        if self.keeps:
            states.forget(session)

    def undelete(self) -> str | None:
        """Bring back the session that was deleted last; return its id."""
        last = "SELECT id FROM sessions WHERE deleted_s IS NOT NULL ORDER BY deleted_s DESC LIMIT 1"
        for (session,) in self._rows(last):
            self._write(("UPDATE sessions SET deleted_s = NULL WHERE id = ?", session))
            return str(session)
        return None

    def purge(self, older_than_s: float = KEEP_DELETED_S) -> None:
        """Delete for good the sessions that were deleted longer ago than this."""
        before = time.time() - older_than_s
        if self._rows("SELECT 1 FROM sessions WHERE deleted_s < ? LIMIT 1", (before,)):
            self._write(("DELETE FROM sessions WHERE deleted_s < ?", before))

    def summaries(self, *, query: str = "", limit: int = 100) -> list[SessionSummary]:
        """List sessions with at least one message, newest first. Messages are counted on the chosen
        path.

        Args:
            query: words, each of which is in the title or a text, of other versions, too.
        """
        wanted = search.terms(query)
        with self._lock:
            condition, values = search.condition(wanted)
            rows = self._rows(
                "SELECT id, title, created_s, updated_s, "
                "  (WITH RECURSIVE path(n) AS (SELECT leaf UNION SELECT parent FROM messages, path "
                "   WHERE session_id = id AND seq = n) SELECT count(*) - 1 FROM path) "
                "FROM sessions WHERE deleted_s IS NULL "
                f"AND EXISTS (SELECT 1 FROM messages WHERE session_id = id) AND {condition} "
                "ORDER BY updated_s DESC, created_s DESC LIMIT :limit",
                values | {"limit": limit},
            )
            found = [SessionSummary(*row) for row in rows]
            return [replace(one, found=self._excerpt(one.id, wanted)) for one in found]

    def _excerpt(self, session: str, wanted: Sequence[str]) -> str:
        """Return an excerpt of the message that has most of these words; "" if there is none."""
        if not wanted:
            return ""
        texts = "SELECT content, reasoning FROM messages WHERE session_id = ? ORDER BY seq"
        return search.best(chain.from_iterable(self._rows(texts, (session,))), wanted)

    def title(self, session: str) -> str:
        """Return the title alone; empty if there is no such session or it cannot be read."""
        with suppress(StoreError):
            for (title,) in self._rows("SELECT title FROM sessions WHERE id = ?", (session,)):
                return str(title)
        return ""

    def get(self, session: str) -> StoredSession:
        """Read a session; raise StoreError if there is none."""
        rows = self._rows(
            "SELECT id, title, system, settings, created_s, updated_s, leaf FROM sessions "
            "WHERE id = ?",
            (session,),
        )
        if not rows:
            raise StoreError(f"there is no session {session!r}", "list them: /sessions")
        identity, title, system, settings, created_s, updated_s, leaf = rows[0]
        messages = self._rows(
            "SELECT seq, parent, role, content, state, stats, reasoning, seams FROM messages "
            "WHERE session_id = ? ORDER BY seq",
            (session,),
        )
        tree = Tree()
        for seq, parent, role, content, state, stats, reasoning, seams in messages:
            stored = StoredMessage(
                role, content, state, _read(stats, _OBJECT), reasoning, _read(seams, _PAIR)
            )
            tree.put(seq, parent, stored)
        tree.leaf = leaf
        return StoredSession(
            identity, title, system, _read(settings, _OBJECT) or {}, created_s, updated_s, tree
        )

    def find(self, selector: str = "last") -> str:
        """Find the id of a session by ``last``, by the start of its id, or by its exact title.

        Raises:
            StoreError: nothing matches.
            UsageError: more than one matches.
        """
        if selector == "last":
            if not (newest := self.summaries(limit=1)):
                raise StoreError(self._lost or "there is no stored session yet")
            return newest[0].id
        rows = self._rows(
            "SELECT id FROM sessions WHERE deleted_s IS NULL "
            "AND (substr(id, 1, ?) = ? OR title = ?)",
            (len(selector), selector, selector),
        )
        if not rows and self._lost:
            raise StoreError(self._lost)
        if not rows or not selector:
            raise StoreError(f"there is no session {selector!r}", "list them: /sessions")
        if len(rows) > 1:
            raise UsageError(f"{selector!r} fits {len(rows)} sessions", "give more of the id")
        return str(rows[0][0])

    def _write(
        self, *statements: tuple[Any, ...], seen: tuple[str, float | None] = ("", None)
    ) -> None:
        """Write one transaction of (SQL, values...); when the disk refuses, stop writing.

        With ``seen``, a session and its ``updated_s``, only if that has not changed.
        """
        with self._lock:
            if self._writing:
                self._waiting.append(_Write(statements, *seen))
                self._write_out()

    def _write_out(self) -> None:
        """Write the waiting transactions, in order, until one fails."""
        while self._waiting:
            first = self._waiting[0]
            try:
                with database.transaction(self._db):
                    first.run(self._db)
            except ContinuedElsewhere:
                # the next writer to the session is told, and makes a copy of all of it
                last = self._waiting[-1]
                self._waiting = [one for one in self._waiting if one.session != first.session]
                if last.session == first.session:
                    raise
            except sqlite3.Error as error:
                code = getattr(error, "sqlite_errorcode", 0) & 0xFF
                if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):  # others are permanent
                    self._put_off(error)
                    return
                self._writing = False
                self._waiting.clear()
                self.notices.append(
                    f"conversations are no longer stored in {self.path} ({error}); "
                    "this one continues without a store"
                )
            else:
                self._waiting.pop(0)
        if self._locked:
            self._locked = False
            self._db.execute(f"PRAGMA busy_timeout = {_PATIENCE_MS}")

    def _put_off(self, error: sqlite3.Error) -> None:
        """Keep the transactions that could not be written; of two versions of one message only the
        newer."""
        if not self._locked:
            self._locked = True
            self.notices.append(
                f"another program has {self.path} locked ({error}); what is said is stored as soon "
                "as it lets go"
            )
            self._db.execute(f"PRAGMA busy_timeout = {_HURRY_MS}")
        if len(self._waiting) > 1 and self._waiting[-1].replaces(self._waiting[-2]):
            newer, older = self._waiting.pop(), self._waiting.pop()
            self._waiting.append(_Write(newer.statements, newer.session, older.seen))

    def _rows(self, query: str, values: Any = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                return self._db.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise StoreError(f"cannot read {self.path}: {error}") from None


@dataclass(frozen=True, slots=True)
class _Write:
    """One transaction: (SQL, values...), of a session that must not have changed since ``seen``."""

    statements: tuple[tuple[Any, ...], ...]
    session: str = ""
    seen: float | None = None

    def run(self, db: sqlite3.Connection) -> None:
        """Run the statements; raise ContinuedElsewhere if the session has changed."""
        if self.seen is not None:
            query = "SELECT updated_s FROM sessions WHERE id = ?"
            if db.execute(query, (self.session,)).fetchone() != (self.seen,):
                raise ContinuedElsewhere(f"session {self.session!r} was continued elsewhere")
        for sql, *values in self.statements:
            db.execute(sql, values)

    def replaces(self, older: _Write) -> bool:
        """True if both put the same message: session and number are its first values."""
        mine, theirs = self.statements[0], older.statements[0]
        return bool(self.session) and mine[:3] == theirs[:3] and mine[0].startswith(_PUT)


def last_replies(most: int = 1 << 20, path: Path | None = None) -> list[str]:
    """Return the newest stored replies, ``most`` characters at most."""
    found: list[str] = []
    with suppress(SpecllamaError), SessionStore.peek(path) as store:
        for one in store.summaries(limit=200):
            replies = [m.content for m in store.get(one.id).messages if m.role == "assistant"]
            most -= sum(map(len, replies))
            if most < 0:
                break
            found += replies
    return found


def is_stored(session: str, path: Path | None = None) -> bool:
    """True if a conversation is there and not deleted; False also if the store cannot be read."""
    with suppress(SpecllamaError, sqlite3.Error), SessionStore.peek(path) as store:
        return bool(
            store._rows("SELECT 1 FROM sessions WHERE id = ? AND deleted_s IS NULL", (session,))
        )
    return False


def _choose(session: str, leaf: int, now: float) -> tuple[Any, ...]:
    return "UPDATE sessions SET leaf = ?, updated_s = ? WHERE id = ?", leaf, now, session


def _later_than(seen: float | None) -> float:
    """Return now, but always later than ``seen``: two writes within a clock tick must differ."""
    return time.time() if seen is None else max(time.time(), math.nextafter(seen, math.inf))


def _clean(title: str) -> str:
    line = " ".join(encodable(title).split())
    return line if len(line) <= _TITLE_CHARS else line[: _TITLE_CHARS - 1].rstrip() + "…"


def _title(question: str) -> str:
    """Make a title of the typed question, without its attached files."""
    return _clean(attach.split(question)[0])


_OBJECT, _PAIR = dict[str, Any], tuple[str, str]


def _read(text: str | None, kind: Any) -> Any:
    """Read JSON of this kind; return None if there is none, or it is damaged."""
    try:
        return msgspec.convert(json.loads(text), kind) if text else None
    except DAMAGE:
        return None

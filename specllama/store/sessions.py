"""Stored conversations: one SQLite file, write-ahead logging, ordered migrations.

A turn is stored before it is answered, and the reply is updated while it grows, so a killed process
loses at most the last update. Deleting only marks a session, so it can be undone; what was
deleted a month ago is removed when the store is opened.

A store never stops a conversation: where the file cannot be written (disk full, read-only, a newer
schema), the store continues in memory or without writing, and ``notices`` says so once. While
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specllama.errors import SpecllamaError, StoreError, UsageError
from specllama.paths import private_file, private_folder, sessions_file
from specllama.store import states
from specllama.store.tree import START, StoredMessage, Tree

logger = logging.getLogger("specllama.store")

_NOWHERE = Path(":memory:")
_SPACE = "' ' || char(9, 10, 13)"
# Append only; a database is at version n once the first n have run.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE sessions (
            id TEXT PRIMARY KEY,
            title TEXT NOT NULL,
            titled INTEGER NOT NULL DEFAULT 0,
            system TEXT NOT NULL DEFAULT '',
            settings TEXT NOT NULL DEFAULT '{}',
            created_s REAL NOT NULL,
            updated_s REAL NOT NULL,
            deleted_s REAL
        )""",
        """CREATE TABLE messages (
            session_id TEXT NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
            seq INTEGER NOT NULL,
            role TEXT NOT NULL,
            content TEXT NOT NULL,
            state TEXT NOT NULL DEFAULT 'done',
            stats TEXT,
            created_s REAL NOT NULL,
            PRIMARY KEY (session_id, seq)
        ) WITHOUT ROWID""",
        "CREATE INDEX sessions_updated ON sessions(updated_s)",
    ),
    (
        "ALTER TABLE messages ADD COLUMN reasoning TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE messages ADD COLUMN seams TEXT",
        # thoughts stood in the text, between tags
        f"""UPDATE messages SET content = ltrim(content, {_SPACE})
            WHERE role = 'assistant' AND ltrim(content, {_SPACE}) GLOB '<think>*'""",
        f"""UPDATE messages SET
                reasoning = trim(substr(content, 8, instr(content, '</think>') - 8), {_SPACE}),
                content = ltrim(substr(content, instr(content, '</think>') + 8), char(10))
            WHERE role = 'assistant' AND content GLOB '<think>*</think>*'""",
        """UPDATE messages SET reasoning = ltrim(substr(content, 8), char(10)), content = ''
            WHERE role = 'assistant' AND content GLOB '<think>*'""",
    ),
    (
        # versions: the message that each follows, and where the chosen path ends
        f"ALTER TABLE messages ADD COLUMN parent INTEGER NOT NULL DEFAULT {START}",
        f"ALTER TABLE sessions ADD COLUMN leaf INTEGER NOT NULL DEFAULT {START}",
        f"""UPDATE messages SET parent = coalesce(
            (SELECT max(seq) FROM messages AS earlier
             WHERE earlier.session_id = messages.session_id AND earlier.seq < messages.seq),
            {START})""",
        f"""UPDATE sessions SET leaf = coalesce(
            (SELECT max(seq) FROM messages WHERE session_id = id), {START})""",
    ),
)
UNTITLED = "untitled"
KEEP_DELETED_S = 30 * 86400.0  # how long a deleted session can be brought back
_TITLE_CHARS = 60
_CHECK_BYTES = 32 * 2**20
_PUT = "INSERT INTO messages"
_BESIDE = ("-wal", "-shm")
_PATIENCE_MS = 5000  # how long a write waits for another process, unless one waits already
_HURRY_MS = 100


@dataclass(frozen=True, slots=True)
class SessionSummary:
    id: str
    title: str
    created_s: float
    updated_s: float
    messages: int
    deleted: bool = False


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
        """Those of the chosen path."""
        return tuple(self.tree.chosen)


class ContinuedElsewhere(StoreError):
    """Another process has written to the session since it was read."""


class SessionStore:
    """The sessions file. Safe to use from several threads and processes."""

    def __init__(self, connection: sqlite3.Connection, path: Path, notices: Sequence[str]) -> None:
        self.path = path
        self.notices: list[str] = list(notices)
        self._db = connection
        self._lock = threading.RLock()
        self._writing = True
        self._waiting: list[_Write] = []
        self._locked = False  # by another process, at the last try
        self._lost = ""  # why earlier conversations are missing

    @classmethod
    def open(cls, path: Path | None = None) -> SessionStore:
        """Open or create the file; never fails (see the module's first lines)."""
        path = path or sessions_file()
        notices: list[str] = []
        try:
            store = cls(_open_file(path, notices), path, notices)
        except (sqlite3.Error, OSError, StoreError) as error:
            notices.append(
                f"conversations cannot be stored in {path} ({error}); this one is kept in memory"
            )
            store = _open_for_reading(cls, path, notices)
            store._lost = notices[-1]
            return store
        if notices:  # the file was damaged
            store._lost = notices[-1]
        with suppress(StoreError):  # an unreadable table is reported when it is needed
            store.purge()
        return store

    @classmethod
    def unstored(cls) -> SessionStore:
        """A store in memory: nothing in it outlives the process."""
        connection = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        _prepare(connection)
        return cls(connection, _NOWHERE, ())

    @property
    def keeps(self) -> bool:
        """Whether what is written here outlives the process."""
        return self._writing and self.path != _NOWHERE

    @classmethod
    def peek(cls, path: Path | None = None) -> SessionStore:
        """What is there to read: nothing is made, mended or moved aside."""
        return _open_for_reading(cls, path or sessions_file(), [])

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

    def __enter__(self) -> SessionStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def create(
        self, *, title: str = "", system: str = "", settings: dict[str, Any] | None = None
    ) -> str:
        """A new session; returns its id, eight hex digits."""
        identity = secrets.token_hex(4)
        now = time.time()
        self._write(
            (
                "INSERT INTO sessions (id, title, titled, system, settings, created_s, updated_s) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                identity,
                _clean(title) or UNTITLED,
                bool(title),
                _text(system),
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
        content = _text(message.content)
        stats = json.dumps(message.stats) if message.stats else None
        seams = json.dumps(message.seams) if message.seams else None
        statements: list[tuple[Any, ...]] = [
            (
                f"{_PUT} VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET "
                "role = excluded.role, content = excluded.content, state = excluded.state, "
                "stats = excluded.stats, reasoning = excluded.reasoning, seams = excluded.seams",
                *(session, seq, message.role, content, message.state, stats, now),
                *(_text(message.reasoning), seams, seq - 1 if parent is None else parent),
            ),
            _choose(session, seq, now),
        ]
        if message.role == "user" and (title := _clean(content)):
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
                    *(UNTITLED, session, _clean(text), session),
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
            self._write(("UPDATE sessions SET system = ? WHERE id = ?", _text(system), session))
        if settings is not None:
            text = json.dumps(settings)
            self._write(("UPDATE sessions SET settings = ? WHERE id = ?", text, session))

    def rename(self, session: str, title: str) -> None:
        """Raises UsageError for an empty title."""
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

    def undelete(self, session: str | None = None) -> str | None:
        """Bring back a deleted session, by default the one deleted last; returns its id."""
        if session is None:
            rows = self._rows(
                "SELECT id FROM sessions WHERE deleted_s IS NOT NULL "
                "ORDER BY deleted_s DESC LIMIT 1"
            )
            if not rows:
                return None
            session = str(rows[0][0])
        self._write(("UPDATE sessions SET deleted_s = NULL WHERE id = ?", session))
        return session

    def purge(self, older_than_s: float = KEEP_DELETED_S) -> None:
        """Really remove sessions that were deleted longer ago than this."""
        if not self._rows("SELECT 1 FROM sessions WHERE deleted_s IS NOT NULL LIMIT 1"):
            return
        self._write(("DELETE FROM sessions WHERE deleted_s < ?", time.time() - older_than_s))

    def summaries(self, *, query: str = "", limit: int = 100) -> list[SessionSummary]:
        """Sessions with at least one message, newest first; ``query`` searches titles and texts, of
        other versions, too. Messages are counted on the chosen path."""
        pattern = "%" + query.translate({ord(c): f"\\{c}" for c in "\\%_"}) + "%"
        rows = self._rows(
            "SELECT id, title, created_s, updated_s, "
            "  (WITH RECURSIVE path(n) AS (SELECT leaf UNION SELECT parent FROM messages, path "
            "   WHERE session_id = id AND seq = n) SELECT count(*) - 1 FROM path) "
            "FROM sessions WHERE deleted_s IS NULL "
            "AND EXISTS (SELECT 1 FROM messages WHERE session_id = id) "
            "AND (title LIKE :q ESCAPE '\\' OR EXISTS "
            "  (SELECT 1 FROM messages WHERE session_id = id AND "
            "   (content LIKE :q ESCAPE '\\' OR reasoning LIKE :q ESCAPE '\\'))) "
            "ORDER BY updated_s DESC, created_s DESC LIMIT :limit",
            {"q": pattern, "limit": limit},
        )
        return [SessionSummary(*row) for row in rows]

    def title(self, session: str) -> str:
        """The title alone; empty if there is no such session or it cannot be read."""
        try:
            rows = self._rows("SELECT title FROM sessions WHERE id = ?", (session,))
        except StoreError:
            return ""
        return str(rows[0][0]) if rows else ""

    def get(self, session: str) -> StoredSession:
        """Raises StoreError if there is no such session."""
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
                role, content, state, _dictionary(stats), reasoning, _pair(seams)
            )
            tree.put(seq, parent, stored)
        tree.leaf = leaf
        return StoredSession(
            identity, title, system, _dictionary(settings) or {}, created_s, updated_s, tree
        )

    def find(self, selector: str = "last") -> str:
        """The id of a session by ``last``, by the start of its id, or by its exact title.

        Raises:
            StoreError: nothing matches.
            UsageError: more than one matches.
        """
        if selector == "last":
            newest = self.summaries(limit=1)
            if not newest and self._lost:
                raise StoreError(self._lost)
            if not newest:
                raise StoreError("there is no stored session yet")
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
        """One transaction of (SQL, values...); when the disk refuses, writing stops.

        With ``seen``, a session and its ``updated_s``, only if that has not changed.
        """
        with self._lock:
            if self._writing:
                self._waiting.append(_Write(statements, *seen))
                self._write_out()

    def _write_out(self) -> None:
        """Write what waits, in order, as far as it goes."""
        while self._waiting:
            first = self._waiting[0]
            try:
                with _transaction(self._db):
                    first.run(self._db)
            except ContinuedElsewhere:
                # the next writer to the session is told, and makes a copy of all of it
                last = self._waiting[-1]
                self._waiting = [one for one in self._waiting if one.session != first.session]
                if last.session == first.session:
                    raise
            except sqlite3.Error as error:
                if _is_locked(error):
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
        """Keep what could not be written; of two versions of one message only the newer."""
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
        """Raises ContinuedElsewhere."""
        if self.seen is not None:
            query = "SELECT updated_s FROM sessions WHERE id = ?"
            if db.execute(query, (self.session,)).fetchone() != (self.seen,):
                raise ContinuedElsewhere(f"session {self.session!r} was continued elsewhere")
        for sql, *values in self.statements:
            db.execute(sql, values)

    def replaces(self, older: _Write) -> bool:
        """Whether both put the same message: session and number are its first values."""
        mine, theirs = self.statements[0], older.statements[0]
        return bool(self.session) and mine[:3] == theirs[:3] and mine[0].startswith(_PUT)


def is_stored(session: str, path: Path | None = None) -> bool:
    """Whether a conversation is there, and not deleted; False where that cannot be told."""
    with suppress(SpecllamaError, sqlite3.Error), SessionStore.peek(path) as store:
        return bool(
            store._rows("SELECT 1 FROM sessions WHERE id = ? AND deleted_s IS NULL", (session,))
        )
    return False


def _is_locked(error: sqlite3.Error) -> bool:
    """Whether another process has the file; anything else is there to stay."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _open_for_reading(make: type[SessionStore], path: Path, notices: list[str]) -> SessionStore:
    """What can be read if nothing can be written: earlier conversations, or none."""
    for how in ("mode=ro", "mode=ro&immutable=1"):  # immutable: where not even a lock can be taken
        with suppress(sqlite3.Error, StoreError, OSError):
            connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?{how}",
                uri=True,
                check_same_thread=False,
                isolation_level=None,
            )
            try:
                (version,) = connection.execute("PRAGMA user_version").fetchone()
                connection.execute("SELECT count(*) FROM messages").fetchone()
                if version != len(MIGRATIONS):
                    raise StoreError("another version wrote it")
            except BaseException:
                connection.close()
                raise
            store = make(connection, path, notices)
            store._writing = False
            return store
    connection = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
    _prepare(connection)
    return make(connection, path, notices)


def _open_file(path: Path, notices: list[str]) -> sqlite3.Connection:
    private_folder(path.parent)
    try:
        return _connect(path)
    except sqlite3.DatabaseError as error:
        # A locked, read-only or full file (OperationalError) is sound and must stay in place.
        if isinstance(error, sqlite3.OperationalError):
            raise
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
    path.replace(aside)
    for suffix in _BESIDE:
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    notices.append(f"the sessions file was damaged; it was moved to {aside}, and a new one made")
    return _connect(path)


def _connect(path: Path) -> sqlite3.Connection:
    with suppress(OSError):  # SQLite has the better message
        private_file(path)  # files that SQLite adds get the permissions of this one
    for suffix in _BESIDE:
        if (beside := path.with_name(path.name + suffix)).exists():
            with suppress(OSError):
                private_file(beside)
    connection = sqlite3.connect(path, timeout=5.0, check_same_thread=False, isolation_level=None)
    try:
        if path.stat().st_size < _CHECK_BYTES:
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA secure_delete = ON")  # what is deleted is overwritten
        _prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    """Bring the schema up to date.

    Raises:
        StoreError: a newer specllama wrote it.
    """
    connection.execute("PRAGMA foreign_keys = ON")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise StoreError("a newer specllama wrote it")
    for number in range(version, len(MIGRATIONS)):
        with _transaction(connection):
            # Another process may have migrated while this one waited for the lock.
            if connection.execute("PRAGMA user_version").fetchone()[0] == number:
                for statement in MIGRATIONS[number]:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {number + 1}")


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _choose(session: str, leaf: int, now: float) -> tuple[Any, ...]:
    return "UPDATE sessions SET leaf = ?, updated_s = ? WHERE id = ?", leaf, now, session


def _later_than(seen: float | None) -> float:
    """Now, but always later than ``seen``: two writes within a clock tick must differ."""
    return time.time() if seen is None else max(time.time(), math.nextafter(seen, math.inf))


def _text(value: str) -> str:
    """SQLite stores UTF-8: lone surrogates cannot be kept."""
    return value.encode("utf-8", "replace").decode("utf-8")


def _clean(title: str) -> str:
    line = " ".join(_text(title).split())
    return line if len(line) <= _TITLE_CHARS else line[: _TITLE_CHARS - 1].rstrip() + "…"


def _dictionary(text: str | None) -> dict[str, Any] | None:
    try:
        value = json.loads(text) if text else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _pair(text: str | None) -> tuple[str, str] | None:
    try:
        value = json.loads(text) if text else None
    except ValueError:
        return None
    if isinstance(value, list) and len(value) == 2 and all(isinstance(v, str) for v in value):
        return value[0], value[1]
    return None

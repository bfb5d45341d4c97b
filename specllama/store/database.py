"""The file of the stored conversations: its opening and its tables.

SQLite with write-ahead logging and ordered migrations. A damaged file is moved aside, never
deleted. Only the file's owner may read it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path

from specllama.errors import StoreError
from specllama.paths import private_file, private_folder
from specllama.store.message_tree import START

_CHECK_BYTES = 32 * 2**20
_BESIDE = ("-wal", "-shm")
_SQL = files("specllama.store").joinpath("migrations.sql").read_text("utf-8")
_SQL = _SQL.replace("${START}", str(START)).replace("${SPACE}", "' ' || char(9, 10, 13)")
MIGRATIONS = tuple(tuple(one.split(";\n")[:-1]) for one in _SQL.split("-- version\n"))


def in_memory() -> sqlite3.Connection:
    """Open an empty database that ends with the process."""
    connection = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
    _prepare(connection)
    return connection


def opened_to_read(path: Path) -> sqlite3.Connection | None:
    """Open the file for reading only; return None if that fails."""
    for how in ("mode=ro", "mode=ro&immutable=1"):  # immutable: where not even a lock can be taken
        with suppress(sqlite3.Error, StoreError, OSError):
            uri = f"{path.absolute().as_uri()}?{how}"
            connection = sqlite3.connect(
                uri, uri=True, check_same_thread=False, isolation_level=None
            )
            try:
                (version,) = connection.execute("PRAGMA user_version").fetchone()
                connection.execute("SELECT count(*) FROM messages").fetchone()
                if version != len(MIGRATIONS):
                    raise StoreError("another version wrote it")
            except BaseException:
                connection.close()
                raise
            return connection
    return None


def opened(path: Path, notices: list[str]) -> sqlite3.Connection:
    """Open or make the file; a damaged one is moved aside, with a notice.

    Raises:
        sqlite3.Error, OSError, StoreError: it cannot be used.
    """
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
        with suppress(sqlite3.Error):  # words of an index that there was; SQLite may lack FTS5
            connection.execute("DROP TABLE IF EXISTS found")
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
        with transaction(connection):
            # Another process may have migrated while this one waited for the lock.
            if connection.execute("PRAGMA user_version").fetchone()[0] == number:
                for statement in MIGRATIONS[number]:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {number + 1}")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run the block as one transaction: all of it or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise

"""Search for words in stored conversations: in a title or a message of any version.

An index (FTS5 of SQLite, by trigrams) knows which messages hold them. It is brought up to date in
small steps. A conversation that it does not know as it is now is read instead, and so are all where
SQLite has no such index. Both ways find the same: parts of words, whatever their case.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from specllama.store.database import transaction

_LEAST = 3  # characters that a trigram has
_TABLE = "CREATE VIRTUAL TABLE IF NOT EXISTS found USING fts5(content, reasoning, tokenize=trigram)"
_KNOWN = "(SELECT session_id FROM indexed WHERE number IN (SELECT rowid FROM found WHERE {}))"
_READ = (
    "(SELECT 1 FROM messages WHERE session_id = id "
    "AND (instr(lowered(content), {0}) OR instr(lowered(reasoning), {0})))"
)
_EXCERPT = 400
_LEAD = 3  # one part in so many of an excerpt stands before the first hit
_TERMS = 12


def terms(query: str) -> list[str]:
    """Split a query into its words and its "several words in quotes"."""
    found = re.findall(r'"([^"]+)"|(\S+)', query.lower().replace("\0", ""))
    return list(dict.fromkeys(quoted or word for quoted, word in found))[:_TERMS]


def hits(text: str, wanted: Sequence[str]) -> list[tuple[int, int]]:
    """Find these terms in a text, ignoring case: [begin, end), in order, not overlapping."""
    some = "|".join(re.escape(term) for term in sorted(wanted, key=len, reverse=True))
    return [found.span() for found in re.finditer(some, text, re.IGNORECASE)] if some else []


def excerpt(text: str, wanted: Sequence[str], room: int = _EXCERPT) -> str:
    """Return one line of a text, around the first hit."""
    line = " ".join(text.split())
    at = next((begin for begin, _ in hits(line, wanted)), 0)
    begin = max(0, min(at - room // _LEAD, len(line) - room))
    if begin and (space := line.find(" ", begin, at)) >= 0:
        begin = space + 1
    before = "…" if begin else ""
    part = line[begin : begin + room - len(before)]
    if begin + len(part) < len(line):
        part = part[:-1].rstrip() + "…"
    return before + part


def best(texts: Iterable[str], wanted: Sequence[str]) -> str:
    """Return an excerpt of the text that has most of these; "" if none has one."""
    score, found = 0, ""
    for text in texts:
        lowered = text.lower()
        if (here := sum(term in lowered for term in wanted)) > score:
            score, found = here, text
    return excerpt(found, wanted)


class Index:
    """Word search in the tables of a connection.

    Attributes:
        lacking: why words are found by reading alone, "" if they are not.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.lacking = ""
        self._there = False
        db.create_function("lowered", 1, str.lower, deterministic=True)

    def condition(self, wanted: Sequence[str]) -> tuple[str, dict[str, str]]:
        """Return SQL that holds for a row of ``sessions`` with all of these, and its values."""
        parts, values = ["1"], {}
        for i, term in enumerate(wanted):
            value, match = f":term{i}", f":match{i}"
            values[value[1:]] = term
            inside = f"EXISTS {_READ.format(value)}"
            if len(term) >= _LEAST and self._has():
                values[match[1:]] = '"' + term.replace('"', '""') + '"'
                known = f"id IN {_KNOWN.format(f'found MATCH {match}')}"
                inside = f"CASE WHEN indexed_s = updated_s THEN {known} ELSE {inside} END"
            parts.append(f"(instr(lowered(title), {value}) OR {inside})")
        return " AND ".join(parts), values

    def update(self, for_s: float) -> bool:
        """Index changes for about this long; return whether all are indexed then.

        Raises:
            sqlite3.Error: another process has the file, or it cannot be written.
        """
        until = time.monotonic() + for_s
        if not self._made():
            return True
        with transaction(self._db):
            self._forget_gone()
            stale = self._db.execute(
                "SELECT id, updated_s FROM sessions WHERE deleted_s IS NULL "
                "AND indexed_s IS NOT updated_s ORDER BY updated_s DESC"
            )
            for session, updated_s in stale.fetchall():
                if not self._learn(session, until):
                    return False
                self._db.execute(
                    "UPDATE sessions SET indexed_s = ? WHERE id = ?", (updated_s, session)
                )
                if time.monotonic() >= until:
                    return False
        return True

    def forget_gone(self, *, wipe: bool) -> None:
        """Forget the texts of sessions that were deleted.

        Args:
            wipe: leave no trace of them in the file.
        """
        if self._has():
            with suppress(sqlite3.Error), transaction(self._db):
                self._forget_gone()
                if wipe:  # what is deleted stays in its segments until they are merged
                    self._db.execute("INSERT INTO found(found) VALUES ('optimize')")

    def _forget_gone(self) -> None:
        gone = "session_id NOT IN (SELECT id FROM sessions WHERE deleted_s IS NULL)"
        numbers = self._db.execute(f"SELECT number FROM indexed WHERE {gone}").fetchall()
        if numbers:
            self._drop(numbers)
            self._db.execute("UPDATE sessions SET indexed_s = NULL WHERE deleted_s IS NOT NULL")

    def _drop(self, numbers: Sequence[tuple[int]]) -> None:
        self._db.executemany("DELETE FROM found WHERE rowid = ?", numbers)
        self._db.executemany("DELETE FROM indexed WHERE number = ?", numbers)

    def _learn(self, session: str, until: float) -> bool:
        """Index the changes of a session; return whether there was time for all of them."""
        db = self._db
        gone = db.execute(
            "SELECT number FROM indexed WHERE session_id = :id "
            "AND seq NOT IN (SELECT seq FROM messages WHERE session_id = :id)",
            {"id": session},
        )
        self._drop(gone.fetchall())
        texts = db.execute(
            "SELECT messages.seq, number, messages.content, messages.reasoning, "
            "  messages.content IS NOT found.content OR messages.reasoning IS NOT found.reasoning "
            "FROM messages LEFT JOIN indexed USING (session_id, seq) "
            "LEFT JOIN found ON found.rowid = number WHERE session_id = ?",
            (session,),
        )
        changed = [row[:4] for row in texts.fetchall() if row[4]]
        for i, (seq, number, *text) in enumerate(changed):
            if number is None:
                values = session, seq
                made = db.execute("INSERT INTO indexed (session_id, seq) VALUES (?, ?)", values)
                number = made.lastrowid
            else:
                db.execute("DELETE FROM found WHERE rowid = ?", (number,))
            db.execute(
                "INSERT INTO found (rowid, content, reasoning) VALUES (?, ?, ?)", (number, *text)
            )
            if time.monotonic() >= until:
                return i + 1 == len(changed)
        return True

    def _has(self) -> bool:
        """True if there is an index to search."""
        if not self._there and not self.lacking:
            try:
                self._db.execute("SELECT 1 FROM found LIMIT 1").fetchone()
                self._there = True
            except sqlite3.Error as error:
                if "no such table" not in str(error):
                    self.lacking = str(error)
        return self._there

    def _made(self) -> bool:
        """Make the index, unless it is there; whether it is."""
        if not self._has() and not self.lacking:
            try:
                self._db.execute(_TABLE)
                self._there = True
            except sqlite3.Error as error:
                if not ("no such module" in str(error) or "no such tokenizer" in str(error)):
                    raise
                self.lacking = str(error)
        return self._there

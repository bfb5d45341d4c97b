"""Search for words in stored conversations: in a title or a message of any version.

Parts of words count, whatever their case. All texts are read: 10,000 messages in 0.06 s, and an
index (FTS5, by trigrams) would take nearly three times the room of the file itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_HOLDS = (
    "(instr(lowered(title), {0}) OR EXISTS (SELECT 1 FROM messages WHERE session_id = id "
    "AND (instr(lowered(content), {0}) OR instr(lowered(reasoning), {0}))))"
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


def condition(wanted: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return SQL that holds for a row of ``sessions`` with all of these, and its values.

    Its function ``lowered`` is ``str.lower``.
    """
    values = {f"term{i}": term for i, term in enumerate(wanted)}
    parts = [_HOLDS.format(f":{name}") for name in values]
    return " AND ".join(["1", *parts]), values

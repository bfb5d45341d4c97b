"""``--json``: one object on one line, streams as JSON Lines, every field on the page about it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("nobody_else")

PAGE = Path(__file__).parents[2] / ".github" / "json.md"
# Their keys are data, or stand elsewhere: in the table of events, and in docstrings.
MAPS = {"by_source", "memory", "report"}

DOCUMENTS = (
    "log ls", "log stats", "log plot", "hub ls",
    "hub info tiny", "hub verify", "hub pairs", "pair tiny", "config show",
    "doctor", "history ls",
)  # fmt: skip


def table(heading: str) -> dict[str, str]:
    """The rows of a table of the page by what their first cell names."""
    part = PAGE.read_text("utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows: dict[str, str] = {}
    for line in part.splitlines():
        if line.startswith("| ") and not line.startswith("|-"):
            first, rest = line[2:].split(" | ", 1)
            for name in re.findall(r"[`*]([^`*]+)[`*]", first):
                rows[name] = rest
    return rows


def words(row: str, rows: dict[str, str]) -> set[str]:
    """The fields that a row names, those of the rows that it refers to included."""
    found = {word for code in re.findall(r"`([^`]+)`", row) for word in code.split()}
    for name in re.findall(r"\*(\w+)\*", row):
        found |= words(rows[name], rows)
    return found


def fields(value: dict[str, Any], depth: int = 2) -> set[str]:
    """Keys of an object, and of the objects in it."""
    found = set(value)
    for key, inner in value.items():
        items = inner if isinstance(inner, list) else [inner]
        if depth and key not in MAPS:
            for item in items:
                found |= fields(item, depth - 1) if isinstance(item, dict) else set()
    return found


@pytest.mark.parametrize("command", DOCUMENTS)
def test_a_document_is_one_object_and_its_fields_are_documented(cli, command: str) -> None:
    cli("run", "Hello")
    result = cli(*command.split(), "--json")
    assert len(result.out.splitlines()) == 1, result.err
    data = json.loads(result.out)
    assert isinstance(data, dict)
    rows = table("Documents")
    name = next(name for name in (command, *command.rsplit(" ", 1)) if name in rows)
    assert fields(data) - words(rows[name], rows) == set()


def test_streams_are_lines_and_their_fields_are_documented(cli) -> None:
    lines = cli("run", "Hello", "--json").json
    rows = table("Events")
    for line in lines:
        assert set(line) - {"type"} - words(rows[line["type"]], rows) == set()
    assert cli("log", "show", "--json").json[0]["type"] == "run"


def test_log_stats_fits_eighty_columns(cli) -> None:
    cli("run", "Hello")
    cli("run", "Hello again")
    for arguments in ((), ("--all",)):
        assert max(map(len, cli("log", "stats", *arguments).out.splitlines())) <= 80

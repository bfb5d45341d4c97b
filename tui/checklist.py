"""What a careful person checks of a pair before trusting drafting: what holds, and what is left.

A check is asked for again when something that it rests on has changed: see ``store/checks.py``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from textual.content import Content

from specllama.errors import SpecllamaError
from specllama.interface import EngineInfo
from specllama.models import memory
from specllama.paths import checks_file
from specllama.store.checks import Check, day, newest, rests_on, unreadable
from specllama.store.rounds import list_runs
from specllama.text import number_of, sanitize_line
from specllama.tui.themes import Glyphs, Ink

State = Literal["holds", "fails", "again", "open"]
MARKS: dict[State, str] = {"holds": "✓", "fails": "✗", "again": "!", "open": "?"}
TITLE_WIDTH = 15
SPARE = 0.05  # of the memory: with less free, systems begin to swap
GB = 1e9


@dataclass(frozen=True, slots=True)
class ChecklistItem:
    """One thing to check: on which tab of the race, and with which command."""

    what: str
    title: str
    tab: str
    command: str


ITEMS = (
    ChecklistItem("text", "Same text", "race", "specllama prove"),
    ChecklistItem("speed", "Not slower", "race", "specllama bench run"),
    ChecklistItem("length", "Draft length", "sweep", "specllama tune"),
    ChecklistItem("methods", "Methods", "methods", ""),
    ChecklistItem("kinds", "Kinds of text", "slices", "specllama bench run"),
)


@dataclass(frozen=True, slots=True)
class ChecklistLine:
    """One row of the list; ``tab`` is where it can be checked, "" where nothing need be run."""

    title: str
    state: State
    words: str
    tab: str = ""


def checklist(info: EngineInfo, tabs: Sequence[str], *, logging: bool) -> list[ChecklistLine]:
    """The list as it stands now. ``tabs`` are those of the race, in the order of their keys."""
    found, now_on, now_s = newest(info), rests_on(info), time.time()
    out: list[ChecklistLine] = []
    for item in ITEMS:
        key = f"press {tabs.index(item.tab) + 1}, then Enter"
        how = f"{key}, or run {item.command}" if item.command else key
        check = found.get(item.what)
        if check is None:
            out.append(ChecklistLine(item.title, "open", f"Not yet: {how}", item.tab))
        elif changes := check.changes(now_on):
            since = day(check.when_s, now_s)
            words = f"Test again: {changes[0]} since {since}; {key}"
            out.append(ChecklistLine(item.title, "again", words, item.tab))
        else:
            out.append(_checked(item, check, now_s, key))
    if skipped := unreadable():
        lines = number_of(skipped, "damaged line")
        words = f"{lines} in {sanitize_line(str(checks_file()))} skipped: make those checks again"
        out.append(ChecklistLine("Kept checks", "fails", words))
    return [*out, _memory(info), _log(logging)]


def _checked(item: ChecklistItem, check: Check, now_s: float, again: str) -> ChecklistLine:
    finding = check.finding
    words = (
        f"{sanitize_line(finding.words)} ({sanitize_line(check.by)}, {day(check.when_s, now_s)})"
    )
    if not finding.known:
        return ChecklistLine(item.title, "open", f"Cannot tell yet: {words}; {again}", item.tab)
    return ChecklistLine(item.title, "holds" if finding.ok else "fails", words, item.tab)


def _memory(info: EngineInfo) -> ChecklistLine:
    """Whether the loaded pair leaves room, and how long its context is."""
    free, total, target = memory.available_memory(), memory.total_memory(), info.target
    room = f"{free / GB:.1f} of {total / GB:.1f} GB free beside the pair"
    context = f"context {target.n_ctx} of {max(target.n_ctx_train, target.n_ctx)} tokens"
    enough = free >= SPARE * total
    return ChecklistLine("Memory", "holds" if enough else "fails", f"{room}, {context}")


def _log(logging: bool) -> ChecklistLine:
    if not logging:
        return ChecklistLine("Log", "fails", "Rounds are not logged: --no-log says so")
    try:
        count = len(list_runs())
    except SpecllamaError as error:
        return ChecklistLine("Log", "fails", sanitize_line(error.message))
    runs = f"{count} {'run' if count == 1 else 'runs'}"
    return ChecklistLine("Log", "holds", f"{runs} logged: see specllama log")


def counted(lines: Sequence[ChecklistLine]) -> str:
    """ "4/7": how many hold."""
    return f"{sum(line.state == 'holds' for line in lines)}/{len(lines)}"


def next_tab(lines: Sequence[ChecklistLine]) -> str:
    """Where the first check is made that is open or to be made again; "" when there is none."""
    return next((line.tab for line in lines if line.state in ("open", "again")), "")


def draw(lines: Sequence[ChecklistLine], glyphs: Glyphs, ink: Ink, width: int) -> Content:
    """The list in ``width`` columns; long words continue on the next line."""
    inks = {"holds": ink.good, "fails": ink.bad, "again": ink.warn, "open": ink.muted}
    rows: list[Content] = []
    indent = TITLE_WIDTH + 4
    for line in lines:
        style = inks[line.state]
        mark = glyphs.text(MARKS[line.state])
        said = Content.assemble(
            (glyphs.text(line.words), "" if line.state in ("holds", "fails") else style)
        )
        head = Content.assemble((f"{mark:<3}", style), (f"{line.title:<{TITLE_WIDTH}} ", "bold"))
        for i, part in enumerate(said.wrap(max(width - indent, 20))):
            rows.append(Content.assemble(head if i == 0 else " " * indent, part))
    tab = next_tab(lines)
    failed = sum(line.state == "fails" for line in lines)
    every = f"Everything was checked, and fails in {failed} of {len(lines)} points."
    closing = "Enter makes the next check." if tab else every if failed else "Everything holds."
    after = Content.assemble((f"{closing} After an upgrade, the list asks again.", ink.muted))
    return Content("\n").join([*rows, Content(""), after])

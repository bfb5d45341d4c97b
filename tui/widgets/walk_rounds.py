"""The rounds of a reply around the one that is inspected: as rows, or as a line of glyphs."""

from __future__ import annotations

from textual.content import Content

from specllama.events import RoundDone
from specllama.tui.record import fate_of, glyph_run
from specllama.tui.themes import Glyphs, Ink
from specllama.tui.widgets.walk import children_of


def rounds_rows(
    rounds: list[RoundDone], at: int, glyphs: Glyphs, ink: Ink, width: int, height: int
) -> Content:
    """Draw a row for each round: as long as it took, green if it won time, amber and shaded if it
    lost some; then the tokens that it wrote. The branches of a tree stand below its row."""
    if not rounds or height < 1:
        return Content("")
    rows = [Content.assemble(("round  time, tokens", ink.muted))] if height > 1 else []
    height -= len(rows)
    branches = {at: tree_lines(rounds[at], glyphs)[: height - 1]}
    first = last = at
    used = 1 + len(branches[at])
    while True:  # in turn before and after the present round, as far as there is room
        before = used
        for i in (first - 1, last + 1):
            if 0 <= i < len(rounds):
                lines = tree_lines(rounds[i], glyphs)
                if used + 1 + len(lines) <= height:
                    branches[i] = lines
                    first, last, used = min(first, i), max(last, i), used + 1 + len(lines)
        if used == before:
            break
    shown = rounds[first : last + 1]
    times = [done.took_ms for done in shown]
    room = max(4, width - 12)
    longest = max(sorted(times)[int(0.9 * (len(times) - 1))], 1e-9)  # a hiccup hides no other
    for i, (done, ms) in enumerate(zip(shown, times, strict=True), first):
        won = None if done.plain_ms is None else done.plain_ms * len(done.emitted) - ms
        lost = won is not None and won <= 0
        style = ink.muted if won is None else ink.warn if lost else ink.good
        length = max(1, min(room, round(room * ms / longest)))
        mark = glyphs.play if i == at else " "
        rows.append(
            Content.assemble(
                (f"{mark}{i + 1:>4} ", "bold" if i == at else ink.muted),
                ((glyphs.shade if lost else glyphs.full) * length, style),
                (f" {len(done.emitted)}", ink.muted),
            )
        )
        branch = ink.source(done.source) if i == at else ink.muted
        rows += [Content.assemble((f"      {line}"[:width], branch)) for line in branches[i]]
    return Content("\n").join(rows)


def tree_lines(done: RoundDone, glyphs: Glyphs) -> list[str]:
    """Draw the branches of a draft tree, a line for each leaf; [] for a chain."""
    if done.is_chain:
        return []
    children = children_of(done)
    marks = {
        "accepted": glyphs.accepted,
        "rejected": glyphs.rejected,
        "untested": glyphs.untested,
    }
    fates = [marks[fate] for fate in fate_of(done)]
    lines: list[str] = []

    def grow(node: int, indent: str, line: str) -> None:
        below = children.get(node, [])
        for i, child in enumerate(below):
            further = i + 1 < len(below)
            start = line if i == 0 else indent + (glyphs.branch if further else glyphs.last)[0]
            grow(child, indent + (glyphs.pipe[0] if further else " "), start + fates[child])
        if not below:
            lines.append(line)

    roots = children.get(-1, [])
    grow(-1, "", (glyphs.branch if len(roots) > 1 else glyphs.last)[0])
    return lines


def rounds_line(rounds: list[RoundDone], at: int, glyphs: Glyphs, ink: Ink, width: int) -> Content:
    """Draw the rounds around the current one as glyphs, the current one in brackets."""
    if not rounds:
        return Content("")
    groups = ["".join(run for _, run in glyph_run(r, glyphs)) or glyphs.target for r in rounds]
    first = last = at
    used = len(groups[at]) + 3
    while True:
        grew = False
        if first > 0 and used + len(groups[first - 1]) + 1 <= width:
            first -= 1
            used += len(groups[first]) + 1
            grew = True
        if last < len(groups) - 1 and used + len(groups[last + 1]) + 1 <= width:
            last += 1
            used += len(groups[last]) + 1
            grew = True
        if not grew:
            break
    parts: list[tuple[str, str]] = []
    for i in range(first, last + 1):
        style = ink.source(rounds[i].source) if rounds[i].drafted else ink.muted
        if i == at:
            # Reverse video would turn full squares into hollow ones.
            parts += [("[", "bold"), (groups[i], f"{style} bold"), ("]", "bold")]
        else:
            parts.append((groups[i], style))
        parts.append((" ", ""))
    return Content.assemble(*parts)

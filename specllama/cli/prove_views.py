"""Views of ``specllama prove``: progress on stderr, the table and the verdict on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from specllama.cli import diagnostics, output
from specllama.cli.listing import Column, number, show_table
from specllama.cli.progress import Redrawn
from specllama.text import sanitize_line

if TYPE_CHECKING:
    from specllama.bench.proof import Case, RowProbe, Way
    from specllama.engine.engine import Engine

COLUMNS: dict[Way, str] = {
    "cold": "cold",
    "behind": "after another prompt",
    "turns": "second turn",
    "beside": "beside others",
}
QUIET_S = 30.0  # between lines of progress where there is no terminal


class ProofWatch(Redrawn):
    """The progress of a proof and its remaining time, from the comparisons so far.

    On a terminal, one line that is redrawn; elsewhere, a line every half minute.

    Args:
        prompts: how many there are.
        per_prompt: comparisons of one prompt.
    """

    def __init__(self, prompts: int, per_prompt: int) -> None:
        super().__init__()
        self._total = prompts * per_prompt
        self._live = sys.stderr.isatty()
        self._begin = time.monotonic()
        self._said = self._begin
        self._done = 0

    def advanced(self) -> None:
        """Count one more comparison."""
        self._done += 1
        now = time.monotonic()
        if not self._live and now - self._said < QUIET_S:
            return
        self._said = now
        text = f"{self._done} of {self._total} comparisons, about {self._left(now)} left"
        if self._live:
            self.show(text)
        else:
            diagnostics.note(text)

    def say(self, line: str) -> None:
        """Show a line of its own, above the progress."""
        self.clear()
        diagnostics.say(sanitize_line(line))

    def _left(self, now: float) -> str:
        seconds = (now - self._begin) / self._done * max(self._total - self._done, 0)
        return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def headline(engine: Engine, proposers: Sequence[str], prompts: int) -> str:
    """Write the pair, the machine and the coming comparison in one line."""
    info = engine.info
    draft = f" + {info.draft.label}" if info.draft else ""
    return sanitize_line(
        f"{info.target.label}{draft} on {info.device}, "
        f"{info.exactness}; {prompts} {'prompt' if prompts == 1 else 'prompts'}, "
        f"methods {', '.join(proposers)}; "
        "one plain text per prompt and temperature for all of them"
    )


def show_difference(case: Case, watch: ProofWatch) -> None:
    """Report a comparison whose texts differ; nothing for the others."""
    if (d := case.difference) is not None:
        kind = "near-tie" if d.explained and not case.bitwise else "DIFFERENT"
        exact = ", although its passes are bit-exact here" if case.bitwise else ""
        where = "" if case.way == "cold" else f", {COLUMNS[case.way]}"
        bound = f", rounding explains {d.bound:.2g} here" if d.bound else ""
        parted = (
            f"logprobs of {d.plain_text!r} differ by {d.gap:.2g}"
            if d.of_logprobs
            else f"{d.plain_text!r} or {d.spec_text!r}, gap {d.gap:.4f}{bound}"
        )
        watch.say(
            f"{kind}: prompt {case.prompt} ({case.slice}), {case.proposer}, "
            f"temperature {case.temperature:g}, draft-max {case.draft_max}{where}, "
            f"token {d.position}: {parted}{exact}"
        )
    if not case.law_holds:
        watch.say(
            f"COUNTERS: prompt {case.prompt}, {case.proposer}: "
            "emitted is not accepted + rounds - cut"
        )


def table(cases: Sequence[Case]) -> None:
    """Show one row per proposer and temperature, one column per way."""
    rows: dict[tuple[float, str], list[Case]] = {}
    for case in cases:
        rows.setdefault((case.temperature, case.proposer), []).append(case)
    ways = [way for way in COLUMNS if any(case.way == way for case in cases)]
    columns = [
        Column("proposer", lambda group: group[0].proposer),
        number("temperature", lambda group: f"{group[0].temperature:g}"),
        *(number(COLUMNS[way], partial(_identical, way)) for way in ways),
        number("tokens", lambda group: sum(case.tokens for case in group)),
        number("accepted", _accepted),
    ]
    order = sorted(rows, key=lambda row: (row[0], row[1] == "none"))
    show_table([rows[row] for row in order], columns)


def _accepted(cases: Sequence[Case]) -> str:
    drafted = sum(case.drafted for case in cases)
    return f"{sum(case.accepted for case in cases) / drafted:.0%}" if drafted else "–"


def _identical(way: Way, cases: Sequence[Case]) -> str:
    found = [case.identical for case in cases if case.way == way]
    return f"{sum(found)}/{len(found)}" if found else "–"


def rows_alike(probes: Sequence[RowProbe]) -> None:
    """Show up to which width passes equal single steps bit for bit here, if that was measured."""
    differ = next((probe for probe in probes if probe.difference > 0.0), None)
    if differ is not None:
        exact = max((probe.rows for probe in probes if probe.rows < differ.rows), default=1)
        output.line(
            f"rows: a pass of {differ.rows} differs from single steps by up to "
            f"{differ.difference:.1g} here; --draft-max {exact - 1} stays exact"
        )
    elif probes:
        output.line(f"passes of up to {probes[-1].rows} tokens are bit-identical here")


def verdict(summary: Mapping[str, object]) -> None:
    """Show the last line: lossless, lossless up to near-ties, or not."""
    if summary["rows_differ"]:
        output.line("NOT bit-exact here: rows differ where passes were measured to be equal")
    elif summary["unexplained"]:
        output.line(f"NOT lossless here: {summary['unexplained']} unexplained differences")
    elif summary["near_ties"]:
        output.line(
            f"lossless up to {summary['near_ties']} near-ties of the target's own arithmetic"
        )
    else:
        output.line(
            f"lossless: {summary['identical']} of {summary['cases']} identical, token for token"
        )

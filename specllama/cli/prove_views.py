"""A proof as ``specllama prove`` runs it: progress on stderr, the table and verdict on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from specllama.cli import diagnostics, output
from specllama.cli.listing import Column, number, show_table
from specllama.cli.progress import Redrawn
from specllama.rates import share
from specllama.text import number_of, percent, sanitize_line

if TYPE_CHECKING:
    from specllama.bench.prompts import BenchPrompt
    from specllama.bench.proof import Case, Way
    from specllama.bench.rounding import RowProbe
    from specllama.engine.engine import Engine

COLUMNS: dict[Way, str] = {
    "cold": "cold",
    "behind": "after another prompt",
    "turns": "second turn",
    "beside": "beside others",
}
QUIET_S = 30.0  # between lines of progress where there is no terminal


class Proof:
    """A proof in progress, and its reports. The remaining time follows from the comparisons so far:
    on a terminal, one line that is redrawn; elsewhere, a line every half minute.

    Args:
        total: comparisons to come.
        skipped: methods that are left out, and why.
    """

    def __init__(
        self, engine: Engine, total: int, skipped: dict[str, str], *, as_json: bool
    ) -> None:
        self.engine, self.skipped, self.as_json = engine, skipped, as_json
        self.cases: list[Case] = []
        self.probes: list[RowProbe] = []
        self.finished = False
        self._total, self._line = total, Redrawn()
        self._live = sys.stderr.isatty()
        self._begin = self._said = time.monotonic()

    def leave_out(self, name: str, reason: str) -> None:
        self.skipped[name] = reason
        self._say(f"skipped {name}: {reason}")

    def run(
        self, cases: Iterable[Case], prompts: Sequence[BenchPrompt], skip: int, end: int
    ) -> None:
        """Show each comparison as it comes, and then the outcome; exit with status 1 if it is not
        lossless. Prompts ``skip`` to ``end`` were asked for."""
        from specllama.bench.rounding import probe_stated_rows

        try:
            for case in cases:
                self.cases.append(case)
                if self.as_json:
                    output.json_line(case.to_dict())
                else:
                    for line in differences(case):
                        self._say(line)
                self._advanced()
            self.probes = probe_stated_rows(self.engine, prompts)
            self.finished = True
        finally:
            self._tell(skip, end)
        told = self.summary()
        if told["unexplained"] or told["rows_differ"]:
            raise SystemExit(1)

    def _advanced(self) -> None:
        now, done = time.monotonic(), len(self.cases)
        if not self._live and now - self._said < QUIET_S:
            return
        self._said = now
        left = (now - self._begin) / done * max(self._total - done, 0)
        shown = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min"
        text = f"{done} of {self._total} comparisons, about {shown} left"
        if self._live:
            self._line.show(text)
        else:
            diagnostics.note(text)

    def _say(self, line: str) -> None:
        """Show a line of its own, above the progress."""
        self._line.clear()
        diagnostics.say(sanitize_line(line))

    def _tell(self, skip: int, end: int) -> None:
        """Report the outcome, or how to continue."""
        self._line.clear()
        summary = self.summary()
        if not self.finished and self.cases:
            done = skip + len({case.prompt for case in self.cases}) - 1
            diagnostics.say(f"ended early; continue with --skip {done} -n {end - done}")
        if self.as_json:
            output.json_line({**summary, "finished": self.finished})
        elif self.cases:
            table(self.cases)
            if self.finished:
                rows_alike(self.probes)
                verdict(summary)

    def summary(self) -> dict[str, object]:
        cases, info = self.cases, self.engine.info
        return {
            "type": "summary",
            "cases": len(cases),
            "identical": sum(c.identical for c in cases),
            "near_ties": sum(not c.identical and c.ok for c in cases),
            "unexplained": sum(not c.ok for c in cases),
            "tokens": sum(c.tokens for c in cases),
            "drafted": sum(c.drafted for c in cases),
            "accepted": sum(c.accepted for c in cases),
            "skipped": self.skipped,
            "bitwise": sum(c.bitwise for c in cases),
            "ways": {
                way: {"cases": len(found), "identical": sum(c.identical for c in found)}
                for way in dict.fromkeys(c.way for c in cases)
                for found in [[c for c in cases if c.way == way]]
            },
            "exactness": info.exactness,
            "measured": info.measured,
            "rows_differ": any(probe.difference > 0.0 for probe in self.probes),
            "rows": {str(probe.rows): probe.difference for probe in self.probes},
        }


def headline(engine: Engine, proposers: Sequence[str], prompts: int) -> str:
    """Write the pair, the machine and the coming comparison in one line."""
    info = engine.info
    draft = f" + {info.draft.label}" if info.draft else ""
    return sanitize_line(
        f"{info.target.label}{draft} on {info.device}, "
        f"{info.exactness}; {number_of(prompts, 'prompt')}, "
        f"methods {', '.join(proposers)}; "
        "one plain text per prompt and temperature for all of them"
    )


def differences(case: Case) -> Iterator[str]:
    """Describe a comparison whose texts differ; nothing for the others."""
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
        yield (
            f"{kind}: prompt {case.prompt} ({case.slice}), {case.proposer}, "
            f"temperature {case.temperature:g}, draft-max {case.draft_max}{where}, "
            f"token {d.position}: {parted}{exact}"
        )
    if not case.law_holds:
        yield (
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
    drafted, accepted = (sum(getattr(c, name) for c in cases) for name in ("drafted", "accepted"))
    return percent(share(accepted, drafted))


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

"""Summaries of a round log: its runs, over time, and flat rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from specllama.events import RoundDone
from specllama.figures import Figures, SpecStats
from specllama.rates import share
from specllama.store.rounds import RunRecord
from specllama.verdict import judge, passes_of


@dataclass(frozen=True, slots=True)
class Slice:
    """Rounds that ended in [begin_s, end_s)."""

    begin_s: float
    end_s: float
    stats: SpecStats = field(default_factory=SpecStats)

    @property
    def tok_per_s(self) -> float | None:
        written = self.stats.emitted if self.stats.rounds else None
        return share(written, max(self.end_s - self.begin_s, 0.0))


def _ends(record: RunRecord) -> Iterator[tuple[RoundDone, float]]:
    """Yield every round with its end in seconds, on one time axis: the requests of a run one after
    another, without the time between turns."""
    offset = 0.0
    for turn in record.turns:
        before = offset
        for done in turn.rounds:
            # A clock that jumps, or a damaged line, must not make time run backwards.
            before = max(before, offset + done.t_s)
            yield done, before
        offset = before


def replies_of(records: Iterable[RunRecord]) -> list[Figures]:
    """Return the figures of every reply."""
    turns = (turn for record in records for turn in record.turns)
    return [found for turn in turns if (found := turn.figures) is not None]


def generated(records: Iterable[RunRecord]) -> Figures:
    """Sum the figures of the replies that wrote more than one token."""
    return Figures.together([one for one in replies_of(records) if one.tok_per_s])


def by_time(record: RunRecord, n: int) -> list[Slice]:
    """Cut the run into at most ``n`` slices of equal length; those without a round hold zeros."""
    rounds = list(_ends(record))
    if not rounds or n < 1:
        return []
    first, began = rounds[0]
    begin, end = max(0.0, began - first.took_ms / 1000), rounds[-1][1]
    if (length := (end - begin) / n) <= 0:
        return [Slice(begin, end, SpecStats.of(record.rounds))]
    slices = [Slice(begin + i * length, begin + (i + 1) * length) for i in range(n)]
    for done, at in rounds:
        slices[min(int((at - begin) / length), n - 1)].stats.observe(done)
    return slices


def stats_dict(stats: SpecStats) -> dict[str, Any]:
    """Return counters and rates of one group, for ``--json``."""
    names = ("rounds", "drafted", "accepted", "emitted", "cut", "near_ties", "acceptance_rate",
             "mean_acceptance_length", "draft_ms", "verify_ms", "other_ms", "wait_ms")  # fmt: skip
    return {name: getattr(stats, name) for name in names}


def run_dict(record: RunRecord) -> dict[str, Any]:
    """Return one run in a line: its pair, its amount and its rates."""
    wrote, header = generated([record]), record.header
    figures = stats_dict(SpecStats.of(record.rounds))
    if elsewhere := [one for one in replies_of([record]) if one.engine]:
        told = Figures.together(elsewhere)
        figures = {
            **dict.fromkeys(figures),
            "emitted": told.tokens,
            "drafted": told.drafted,
            "accepted": told.accepted,
            "acceptance_rate": None if told.at_most else told.acceptance_rate or None,
        }
    return {
        "run": record.run,
        "path": str(record.path),
        "started": header.get("started"),
        "command": header.get("command"),
        "target": _model_name(header.get("target")),
        "draft": _model_name(header.get("draft")),
        "turns": len(record.turns),
        "complete": bool(record.turns) and all(turn.finished for turn in record.turns),
        "skipped_lines": record.skipped,
        "generation_s": wrote.decode_ms / 1e3,
        "tok_per_s": wrote.tok_per_s,
        "verdict": judge(passes_of(record.rounds)).to_dict(),
        **figures,
    }


def _model_name(model: Any) -> str | None:
    if not isinstance(model, dict):
        return None
    name, quantization = model.get("name"), model.get("quantization")
    return f"{name} {quantization}" if quantization else str(name)

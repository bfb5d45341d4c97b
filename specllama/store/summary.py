"""Summaries of a round log: its runs, over time, and flat rows."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any

from specllama.figures import Figures, SpecStats
from specllama.store.rounds import RunRecord
from specllama.verdict import judge, passes_of


def replies_of(records: Iterable[RunRecord]) -> list[Figures]:
    """Return the figures of every reply."""
    turns = (turn for record in records for turn in record.turns)
    return [found for turn in turns if (found := turn.figures) is not None]


def generated(records: Iterable[RunRecord]) -> Figures:
    """Sum the figures of the replies that wrote more than one token."""
    return Figures.together([one for one in replies_of(records) if one.tok_per_s])


def over_time(record: RunRecord, n: int) -> list[tuple[float, float, float | None]]:
    """Cut a run that has rounds into ``n`` slices of equal length; return when each begins and
    ends, in seconds, and its acceptance rate.

    The requests follow one another, without the time between turns.
    """
    ends = [0.0]
    for turn in record.turns:
        ends += [ends[-1] + done.t_s for done in turn.rounds]
    _, *ends = accumulate(ends, max)  # a damaged line must not make time run backwards
    begin = max(ends[0] - record.rounds[0].took_ms / 1e3, 0.0)
    length = (ends[-1] - begin) / n or 1.0
    slices = [SpecStats() for _ in range(n)]
    for done, end in zip(record.rounds, ends, strict=True):
        slices[min(int((end - begin) / length), n - 1)].observe(done)
    edges = [begin + i * length for i in range(n + 1)]
    return [(*pair, one.acceptance_rate) for pair, one in zip(pairwise(edges), slices, strict=True)]


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
        "run": record.run, "path": str(record.path), "started": header.get("started"),
        "command": header.get("command"), "target": _model_name(header.get("target")),
        "draft": _model_name(header.get("draft")), "turns": len(record.turns),
        "complete": bool(record.turns) and all(turn.finished for turn in record.turns),
        "skipped_lines": record.skipped, "generation_s": wrote.decode_ms / 1e3,
        "tok_per_s": wrote.tok_per_s, "verdict": judge(passes_of(record.rounds)).to_dict(),
        **figures,
    }  # fmt: skip


def _model_name(model: Any) -> str | None:
    if not isinstance(model, dict):
        return None
    name, quantization = model.get("name"), model.get("quantization")
    return f"{name} {quantization}" if quantization else str(name)

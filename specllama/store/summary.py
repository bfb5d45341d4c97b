"""Summaries of a round log: its runs, and flat rows."""

from __future__ import annotations

from collections.abc import Iterable
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

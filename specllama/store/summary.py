"""Summaries of a round log: totals, by position, by source, over time; flat rows for export."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from specllama.events import Finished, RoundDone
from specllama.stats import SpecStats
from specllama.store.rounds import RunRecord
from specllama.verdict import TimedRound, judge

CSV_COLUMNS = ("run", "turn", "index", "t_s", "n_past", "source", "draft_max", "window_reason",
               "drafted", "accepted", "emitted", "cut", "target_kind", "near_tie", "draft_ms",
               "verify_ms", "other_ms", "wait_ms", "drafted_text", "emitted_text")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Moment:
    """One round with its place in the run, in seconds; prompts are read between turns."""

    turn: int
    done: RoundDone
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Slice:
    """Rounds that ended in [begin_s, end_s)."""

    begin_s: float
    end_s: float
    stats: SpecStats

    @property
    def tok_per_s(self) -> float | None:
        seconds = self.end_s - self.begin_s
        return self.stats.emitted / seconds if seconds > 0 and self.stats.rounds else None


@dataclass(frozen=True, slots=True)
class Position:
    """Drafts at one depth: how many were sent to the target, how many were accepted."""

    depth: int
    rounds: int
    drafted: int
    accepted: int

    @property
    def of_rounds(self) -> float | None:
        """Unconditional acceptance: over all rounds, including those that drafted less far."""
        return self.accepted / self.rounds if self.rounds else None

    @property
    def of_drafted(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None


def moments(record: RunRecord) -> list[Moment]:
    """Return every round on one time axis: the requests of a run one after another."""
    out: list[Moment] = []
    offset = 0.0
    for turn in record.turns:
        before = offset
        for done in turn.rounds:
            # A clock that jumps, or a damaged line, must not make time run backwards.
            end = max(before, offset + done.t_s)
            length = done.took_ms / 1000
            out.append(Moment(turn.index, done, max(before, end - length), end))
            before = end
        offset = before
    return out


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens that replies wrote after their first one, and the seconds they took."""

    tokens: int
    seconds: float

    @property
    def tok_per_s(self) -> float | None:
        return self.tokens / self.seconds if self.tokens else None


def generated(records: Iterable[RunRecord]) -> Generated:
    """Sum this over the replies of all records."""
    turns = (turn for record in records for turn in record.turns)
    replies = [one for turn in turns if (one := turn.figures) is not None and one.tok_per_s]
    return Generated(
        sum((one.tokens or 1) - 1 for one in replies), sum(one.decode_ms for one in replies) / 1e3
    )


def totals(rounds: Iterable[RoundDone]) -> SpecStats:
    stats = SpecStats()
    for done in rounds:
        stats.observe(done)
    return stats


def passes(rounds: Iterable[RoundDone]) -> list[TimedRound]:
    """Return the rounds that a verdict is made of."""
    return [TimedRound.of(done) for done in rounds if done.index]


def by_source(rounds: Iterable[RoundDone]) -> dict[str, SpecStats]:
    """Count per drafting source, in order of appearance; "none" are plain rounds."""
    out: dict[str, SpecStats] = {}
    for done in rounds:
        out.setdefault(done.source, SpecStats()).observe(done)
    return out


def by_position(stats: SpecStats) -> list[Position]:
    return [
        Position(i + 1, stats.rounds, drafted, accepted)
        for i, (drafted, accepted) in enumerate(
            zip(stats.drafted_at, stats.accepted_at, strict=True)
        )
    ]


def by_time(items: Sequence[Moment], n: int) -> list[Slice]:
    """Cut the run into at most ``n`` slices of equal length; those without a round hold zeros."""
    if not items or n < 1:
        return []
    begin, end = items[0].begin_s, items[-1].end_s
    length = (end - begin) / n
    if length <= 0:
        return [Slice(begin, end, totals(m.done for m in items))]
    slices = [Slice(begin + i * length, begin + (i + 1) * length, SpecStats()) for i in range(n)]
    for moment in items:
        at = min(int((moment.end_s - begin) / length), n - 1)
        slices[at].stats.observe(moment.done)
    return slices


def stats_dict(stats: SpecStats) -> dict[str, Any]:
    """Return counters and rates of one group, for ``--json``."""
    names = ("rounds", "drafted", "accepted", "emitted", "cut", "near_ties", "acceptance_rate",
             "mean_acceptance_length", "draft_ms", "verify_ms", "other_ms", "wait_ms")  # fmt: skip
    return {name: getattr(stats, name) for name in names}


def told_elsewhere(ends: Sequence[Finished]) -> dict[str, Any]:
    """Sum over replies of another engine; a sum is None if it did not report each reply."""

    def total(counts: Sequence[int | None]) -> int | None:
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    drafted = total([end.known("draft_n") for end in ends])
    accepted = total([end.known("draft_n_accepted") for end in ends])
    sure = drafted and accepted is not None and not any(end.draft_at_most for end in ends)
    return {
        "emitted": total([end.tokens for end in ends]),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if sure and drafted and accepted else None,
    }


def run_dict(record: RunRecord) -> dict[str, Any]:
    """Return one run in a line: its pair, its amount and its rates."""
    stats = totals(record.rounds)
    wrote = generated([record])
    header = record.header
    figures = stats_dict(stats)
    if elsewhere := [end for turn in record.turns if (end := turn.finished) and end.engine]:
        figures = {**dict.fromkeys(figures), **told_elsewhere(elsewhere)}
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
        "generation_s": wrote.seconds,
        "tok_per_s": wrote.tok_per_s,
        "verdict": judge(passes(record.rounds)).to_dict(),
        **figures,
    }


def csv_rows(record: RunRecord) -> list[list[Any]]:
    """Return one row per round, in the order of CSV_COLUMNS; token columns hold their number."""

    def cell(done: RoundDone, name: str) -> Any:
        value = getattr(done, name)
        if isinstance(value, tuple):
            return "".join(value) if name.endswith("_text") else len(value)
        return int(value) if isinstance(value, bool) else value

    return [
        [record.run, turn.index, *(cell(done, name) for name in CSV_COLUMNS[2:])]
        for turn in record.turns
        for done in turn.rounds
    ]


def run_json(record: RunRecord) -> dict[str, Any]:
    """Return a whole run as one document."""
    return {
        **run_dict(record),
        "header": record.header,
        "requests": [
            {
                "turn": turn.index,
                "start": turn.started.to_dict() if turn.started else None,
                "rounds": [done.to_dict() for done in turn.rounds],
                "finish": turn.finished.to_dict() if turn.finished else None,
            }
            for turn in record.turns
        ],
    }


def _model_name(model: Any) -> str | None:
    if not isinstance(model, dict):
        return None
    name, quantization = model.get("name"), model.get("quantization")
    return f"{name} {quantization}" if quantization else str(name)

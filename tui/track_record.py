"""The track record of each method with a pair on this machine, from the round logs.

Only logs of the same two files, device and threads count, and only methods that were really used:
nothing is predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from specllama.errors import SpecllamaError
from specllama.events import Payoff
from specllama.interface import EngineInfo, ModelInfo
from specllama.store.rounds import RunRecord, list_runs, read_run
from specllama.text import number_of
from specllama.verdict import SINGLES, TimedRound, judge, passes_of, singles_of, words

NEWEST = 40  # logs that are read
BYTES = 24 << 20  # and at most this much of them: the screen must not wait for old runs


@dataclass(slots=True)
class Achieved:
    """The rounds that one method wrote, in replies of conversations and in runs of races."""

    replies: int = 0
    raced: int = 0
    passes: list[TimedRound] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TrackRecord:
    by_method: Mapping[str, Achieved]

    @property
    def plain_ms(self) -> list[float]:
        """The plain steps of this pair, of every reply."""
        return singles_of(one for achieved in self.by_method.values() for one in achieved.passes)

    def verdict(self, method: str) -> Payoff | None:
        """Judge a method; return None for plain decoding and for one that was never used."""
        achieved = self.by_method.get(method)
        if achieved is None or method == "none":
            return None
        known = any(one.plain_ms for one in achieved.passes)
        return judge(achieved.passes, () if known else self.plain_ms)

    def words(self, method: str) -> str:
        """Describe a method: "1.24× faster (1.20–1.28) · 2.6 tokens a pass · 61% of guesses kept
        (12 replies)"; or "" if never measured."""
        achieved = self.by_method.get(method)
        verdict = self.verdict(method)
        if achieved is None:
            return ""
        if verdict is not None:
            told = verdict.drafted or verdict.answer == "off"
            said = words(verdict, "too few rounds") if told else ""
        else:
            steps = self.plain_ms
            said = f"{1000 / median(steps):.0f} tok/s" if len(steps) >= SINGLES else ""
        n, raced = achieved.replies, achieved.raced
        counts = [f"{n} {'reply' if n == 1 else 'replies'}"] if n or not raced else []
        counts += [number_of(raced, "raced run")] if raced else []
        return f"{said} ({', '.join(counts)})" if said else ""


def track_record(info: EngineInfo, folder: Path | None = None) -> TrackRecord:
    """Read the newest logs of this pair. A folder or a log that cannot be read counts as none."""
    found: dict[str, Achieved] = {}
    budget = BYTES
    try:
        paths = list_runs(folder)[:NEWEST]
    except SpecllamaError:
        return TrackRecord(found)
    for path in paths:
        try:
            budget -= path.stat().st_size
            if budget < 0:
                break
            record = read_run(path)
        except (OSError, SpecllamaError):
            continue
        raced = record.header.get("command") == "race"
        for turn in record.turns if _same_pair(record, info) else ():
            if turn.started is not None and turn.rounds:
                mine = found.setdefault(turn.started.proposer, Achieved())
                mine.raced += raced
                mine.replies += not raced
                mine.passes += passes_of(turn.rounds)
    return TrackRecord(found)


def _same_pair(record: RunRecord, info: EngineInfo) -> bool:
    header = record.header
    return (
        _same_model(header.get("target"), info.target)
        and _same_model(header.get("draft"), info.draft)
        and header.get("device") == info.device
        and header.get("threads") == info.threads
    )


def _same_model(logged: Any, model: ModelInfo | None) -> bool:
    if model is None or not isinstance(logged, dict):
        return model is None and logged is None
    return (logged.get("name"), logged.get("quantization"), logged.get("file_bytes")) == (
        model.name,
        model.quantization,
        model.file_bytes,
    )

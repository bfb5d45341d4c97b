"""What each way to draft has achieved with a pair on this machine, from the round logs.

Only logs of the same two files on the same device and threads count, and only methods that were
really used: nothing is predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from specllama.errors import SpecllamaError
from specllama.events import RoundDone
from specllama.interface import EngineInfo, ModelInfo
from specllama.store.rounds import RunRecord, list_runs, read_run

NEWEST = 40  # logs that are read
BYTES = 24 << 20  # and how much of them at most: the screen must not wait for old runs
ENOUGH = 8  # rounds that drafted before their mean is worth showing
ENOUGH_FOR_SPEED = 64  # rounds before a ratio of times is: one hiccup of the machine must not show


@dataclass(slots=True)
class Achieved:
    """Sums over the replies that one method wrote."""

    replies: int = 0
    rounds: int = 0
    tokens: int = 0
    drafting_rounds: int = 0
    accepted: int = 0
    ms: float = 0.0
    plain_ms: list[float] = field(default_factory=list)

    def observe(self, rounds: Iterable[RoundDone]) -> None:
        self.replies += 1
        for done in rounds:
            if done.index == 0:
                continue  # the step over the last prompt token belongs to reading the prompt
            took = done.draft_ms + done.verify_ms + done.other_ms
            self.rounds += 1
            self.ms += took
            self.tokens += len(done.emitted)
            if done.drafted:
                self.drafting_rounds += 1
                self.accepted += done.accepted
            else:
                self.plain_ms.append(took)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per round that drafted: 1 + accepted ÷ rounds."""
        if self.drafting_rounds < ENOUGH:
            return None
        return 1.0 + self.accepted / self.drafting_rounds

    def speedup(self, plain_ms: float | None) -> float | None:
        """Speed over plain steps of ``plain_ms``, all rounds counted, plain ones too."""
        if (
            self.rounds < ENOUGH_FOR_SPEED
            or not self.drafting_rounds
            or not plain_ms
            or self.ms <= 0
        ):
            return None
        return self.tokens * plain_ms / self.ms


@dataclass(frozen=True, slots=True)
class TrackRecord:
    by_method: Mapping[str, Achieved]

    @property
    def plain_ms(self) -> float | None:
        """A plain step of this pair: the mean over every reply, as the times of the rounds that it
        is compared with are summed."""
        times = [ms for achieved in self.by_method.values() for ms in achieved.plain_ms]
        return fmean(times) if len(times) >= ENOUGH else None

    def words(self, method: str) -> str:
        """ "1.24× plain, 2.6 tokens per drafted round (12 replies)"; empty if never measured."""
        achieved = self.by_method.get(method)
        if achieved is None:
            return ""
        parts: list[str] = []
        if method == "none":
            if self.plain_ms is not None:
                parts.append(f"{1000 / self.plain_ms:.0f} tok/s")
        else:
            if (speed := achieved.speedup(self.plain_ms)) is not None:
                parts.append(f"{speed:.2f}× plain")
            if (length := achieved.acceptance_length) is not None:
                parts.append(f"{length:.1f} tokens per drafted round")
        if not parts:
            return ""
        n = achieved.replies
        return f"{', '.join(parts)} ({n} {'reply' if n == 1 else 'replies'})"


def track_record(info: EngineInfo, folder: Path | None = None) -> TrackRecord:
    """Read the newest logs of this pair. A folder or a log that cannot be read counts as none."""
    found: dict[str, Achieved] = {}
    try:
        paths = list_runs(folder)[:NEWEST]
    except SpecllamaError:
        return TrackRecord(found)
    budget = BYTES
    for path in paths:
        try:
            budget -= path.stat().st_size
            if budget < 0:
                break
            record = read_run(path)
        except (OSError, SpecllamaError):
            continue
        if not _same_pair(record, info):
            continue
        for turn in record.turns:
            if turn.started is not None and turn.rounds:
                found.setdefault(turn.started.proposer, Achieved()).observe(turn.rounds)
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

"""What each method has achieved with a pair on this machine, from the round logs.

Only logs of the same two files, device and threads count, and only methods that were really used:
nothing is predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from specllama.errors import SpecllamaError
from specllama.events import RoundDone
from specllama.interface import EngineInfo, ModelInfo
from specllama.store.rounds import RunRecord, list_runs, read_run
from specllama.tui.measure import plain_step_ms, took_ms
from specllama.tui.speedup import Speedup, speedup

NEWEST = 40  # logs that are read
BYTES = 24 << 20  # and at most this much of them: the screen must not wait for old runs
ENOUGH = 8  # rounds that drafted, before their mean is worth showing


@dataclass(slots=True)
class Achieved:
    """What is counted over the replies that one method wrote.

    ``rounds`` are tokens and milliseconds of each, ``plain_ms`` the steps among them that drafted
    nothing.
    """

    replies: int = 0
    drafting_rounds: int = 0
    accepted: int = 0
    rounds: list[tuple[int, float]] = field(default_factory=list)
    plain_ms: list[float] = field(default_factory=list)

    def observe(self, rounds: Iterable[RoundDone]) -> None:
        self.replies += 1
        for done in rounds:
            if done.index == 0:
                continue  # its row came with the prompt
            self.rounds.append((len(done.emitted), took_ms(done)))
            if done.drafted:
                self.drafting_rounds += 1
                self.accepted += done.accepted
            else:
                self.plain_ms.append(plain_step_ms(done))

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per round that drafted: 1 + accepted ÷ rounds."""
        if self.drafting_rounds < ENOUGH:
            return None
        return 1.0 + self.accepted / self.drafting_rounds

    def speedup(self, plain_ms: Sequence[float]) -> Speedup | None:
        """Over plain steps, all rounds counted, plain ones too."""
        return speedup(plain_ms, self.rounds) if self.drafting_rounds else None


@dataclass(frozen=True, slots=True)
class TrackRecord:
    by_method: Mapping[str, Achieved]

    @property
    def plain_ms(self) -> list[float]:
        """The plain steps of this pair, of every reply."""
        return [ms for achieved in self.by_method.values() for ms in achieved.plain_ms]

    def words(self, method: str) -> str:
        """ "1.24× plain, 2.6 tokens per drafted round (12 replies)"; empty if never measured.

        If it is not clear whether it gains or loses, the speed-up is given as an interval.
        """
        achieved = self.by_method.get(method)
        if achieved is None:
            return ""
        parts: list[str] = []
        if method == "none":
            if len(steps := self.plain_ms) >= ENOUGH:
                parts.append(f"{1000 / fmean(steps):.0f} tok/s")
        else:
            speed = achieved.speedup(self.plain_ms)
            if speed is not None and speed.verdict == "unsure":
                parts.append(f"{speed.low:.2f}× to {speed.high:.2f}× plain")
            elif speed is not None:
                parts.append(f"{speed.ratio:.2f}× plain")
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

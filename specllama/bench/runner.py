"""Interleaved comparisons: every arm answers every prompt, in turn, several times.

Every run is paired with the baseline's of the same prompt in the same repetition: machines drift,
and only neighbours in time compare. ``paired`` says what the pairs of a group are worth together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from statistics import fmean
from typing import TYPE_CHECKING, Any

from specllama.bench.arms import Arm, RunFigures, Task, Timeline, percentile, slowest_stretch
from specllama.bench.paired import Pairs, as_one
from specllama.verdict import TimedRound, judge

if TYPE_CHECKING:
    from specllama.bench.load import LoadRow

Progress = Callable[[int, int], object]
"""Called with what is done, and of how much."""

STRETCH = 500  # tokens; the slowest stretch of this length is shown
_ENOUGH = 16  # passes whose mean is a plain step

Beside = Sequence[tuple[RunFigures, RunFigures]]
"""Runs of the baseline, each with the arm's of the same task in the same repetition."""


@dataclass(slots=True)
class Summary:
    """One arm over a set of runs, against the baseline in the same repetitions.

    ``tok_per_s``, ``ratio``, ``low`` and ``high`` are ``paired``'s; ``ttft_ratio`` as well.
    """

    arm: str
    group: str
    runs: int
    tokens: int
    tok_per_s: float | None
    ratio: float | None
    low: float | None
    high: float | None
    latency_p50_s: float | None
    latency_p95_s: float | None
    ttft_p50_s: float | None
    ttft_ratio: float | None
    drafted: int | None  # None where a run did not tell
    accepted: int | None
    rounds: int
    draft_share: float | None
    other_share: float | None
    slowest_500: float | None  # lowest speed over any 500 tokens, over the baseline's mean there
    in_run: float | None  # speed over the plain passes of the same run
    in_run_500: float | None  # and its lowest over any 500 tokens
    equal: int | None  # runs that wrote the baseline's tokens, None if that is not promised
    compared: int

    @property
    def acceptance_rate(self) -> float | None:
        if not self.drafted or self.accepted is None:
            return None
        return self.accepted / self.drafted

    @property
    def rejected(self) -> int | None:
        if self.drafted is None or self.accepted is None:
            return None
        return self.drafted - self.accepted

    def to_dict(self) -> dict[str, Any]:
        more = {"acceptance_rate": self.acceptance_rate, "rejected": self.rejected}
        return asdict(self) | more


@dataclass(slots=True)
class Comparison:
    """All runs of a comparison; the other arms are divided by the arm named ``baseline``."""

    baseline: str
    runs: list[RunFigures] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    load: list[LoadRow] = field(default_factory=list)  # servers under several clients

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(run.arm for run in self.runs))

    @property
    def slices(self) -> list[str]:
        return list(dict.fromkeys(run.slice for run in self.runs))

    @property
    def temperatures(self) -> list[float]:
        return sorted({run.temperature for run in self.runs})

    def summaries(self) -> list[Summary]:
        """Summarize every arm: over everything, per temperature, and per slice and temperature."""
        out: list[Summary] = []
        many = len(self.temperatures) > 1
        for arm in self.arms:
            out.append(self.summary(arm, "all"))
            for t in self.temperatures:
                if many:
                    out.append(self.summary(arm, f"T={t:g}", temperature=t))
                for s in self.slices:
                    out.append(self.summary(arm, f"{s} T={t:g}", temperature=t, slice=s))
        return out

    def _runs(self, temperature: float | None, slice: str | None, arm: str) -> list[RunFigures]:
        return [
            r
            for r in self.runs
            if r.arm == arm and temperature in (None, r.temperature) and slice in (None, r.slice)
        ]

    def _beside(self, runs: Sequence[RunFigures]) -> Beside:
        plain = {run.task: run for run in self._runs(None, None, self.baseline)}
        return [(plain[run.task], run) for run in runs if run.task in plain]

    def summary(
        self, arm: str, group: str, *, temperature: float | None = None, slice: str | None = None
    ) -> Summary:
        """Summarize one arm over the runs of a temperature and a slice (None: of all)."""
        mine = self._runs(temperature, slice, arm)
        beside, table = self._beside(mine), self._beside(self._runs(None, None, arm))
        speed = as_one(_rows(beside, lambda r: r.speed), _rows(table, lambda r: r.speed))
        waiting = as_one(_rows(beside, lambda r: r.ttft_s))
        same = [one for plain, run in beside if (one := plain.same(run)) is not None]
        busy = sum(r.draft_s + r.verify_s + r.other_s for r in mine)
        tokens = sum(r.tokens for r in mine)
        return Summary(
            arm=arm,
            group=group,
            runs=len(mine),
            tokens=tokens,
            tok_per_s=speed.speed if speed else None,
            ratio=speed.ratio if speed else None,
            low=speed.low if speed else None,
            high=speed.high if speed else None,
            latency_p50_s=percentile([r.total_s for r in mine], 0.5),
            latency_p95_s=percentile([r.total_s for r in mine], 0.95),
            ttft_p50_s=percentile([r.ttft_s for r in mine if r.ttft_s > 0], 0.5),
            ttft_ratio=waiting.ratio if waiting else None,
            drafted=_sum(r.drafted for r in mine),
            accepted=_sum(r.accepted for r in mine),
            rounds=sum(r.rounds for r in mine),
            draft_share=sum(r.draft_s for r in mine) / busy if busy else None,
            other_share=sum(r.other_s for r in mine) / busy if busy else None,
            slowest_500=_slowest(beside),
            in_run=judge([one for run in mine for one in run.passes]).ratio,
            in_run_500=_slowest_in_run(mine),
            equal=sum(same) if same else None,
            compared=len(same),
        )


def _rows(beside: Beside, figure: Callable[[RunFigures], float | None]) -> list[Pairs]:
    """Return a figure of both runs; a row for each prompt at each temperature."""
    rows: dict[object, list[tuple[float, float]]] = defaultdict(list)
    for plain, run in beside:
        a, b = figure(plain), figure(run)
        if a and b:
            rows[run.prompt, run.temperature].append((a, b))
    return list(rows.values())


def _sum(counts: Iterable[int | None]) -> int | None:
    """Add counts; return None if one of them is not known."""
    known = list(counts)
    return None if None in known else sum(one or 0 for one in known)


def _slowest(beside: Beside) -> float | None:
    """Return the worst 500 tokens of any run, against the baseline's run of the same task."""
    stretches = [(plain.speed, slowest_stretch(run.timeline, STRETCH)) for plain, run in beside]
    return min((slow / plain for plain, slow in stretches if plain and slow), default=None)


def _slowest_in_run(runs: Sequence[RunFigures]) -> float | None:
    """Return the worst 500 tokens of any run with the cost of drafting alone."""
    found = []
    for run in runs:
        plain_s, drafting = what_drafting_took(run.passes)
        if plain_s and (slow := slowest_stretch(drafting, STRETCH)):
            found.append(plain_s * slow)
    return min(found, default=None)


def what_drafting_took(rounds: Sequence[TimedRound]) -> tuple[float | None, Timeline]:
    """Return the seconds of a plain pass, and the timeline at that pace, of one run.

    On a busy machine, passes differ by more than drafting may cost. So every pass that verified
    nothing counts as their mean; drafting and the passes that verified something count as they
    were. (None, ()) if hardly any pass was plain.
    """
    plain = [one.pass_ms / 1e3 for one in rounds if not one.drafted]
    if len(plain) < _ENOUGH:
        return None, ()
    mean_s = fmean(plain)
    points = [(0, 0.0)]
    for one in rounds:
        tokens, seconds = points[-1]
        pass_s = one.pass_ms / 1e3 if one.drafted else mean_s
        points.append((tokens + one.tokens, seconds + one.draft_ms / 1e3 + pass_s))
    return mean_s, tuple(points)


def compare(
    arms: Sequence[Arm],
    tasks: Iterable[Task],
    *,
    repetitions: int,
    warm_up: int = 1,
    progress: Progress = lambda done, total: None,
) -> Comparison:
    """Run all arms over all tasks. The first arm is the baseline.

    Args:
        warm_up: tasks that every arm answers once before anything counts.
    """
    work = list(tasks)
    result = Comparison(baseline=arms[0].name)
    total = repetitions * len(work) * len(arms) + min(warm_up, len(work)) * len(arms)
    done = count(1)

    def one(arm: Arm, task: Task, repetition: int) -> RunFigures:
        run = arm.run(task, repetition)
        progress(next(done), total)
        return run

    for task in work[:warm_up]:
        for arm in arms:
            one(arm, task, -1)
    for repetition in range(repetitions):
        for i, task in enumerate(work):
            # rotate, so that no arm always runs after the same one
            at = (i + repetition) % len(arms)
            for arm in [*arms[at:], *arms[:at]]:
                result.runs.append(one(arm, task, repetition))
    return result

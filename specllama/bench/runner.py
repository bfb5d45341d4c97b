"""Interleaved comparisons: every arm answers every prompt, in turn, several times.

Speeds are ratios of totals within one repetition (tokens of all prompts over their seconds), and
the median over repetitions is reported: machines drift, and only neighbours in time compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from specllama.bench.arms import Arm, RunFigures, Task, percentile, slowest_stretch
from specllama.bench.breakdown import BreakdownRow, breakdown, plain_step, together
from specllama.bench.energy import EnergyMeter

Progress = Callable[[int, int, str], None]

STRETCH = 500  # tokens; the slowest stretch of this length is shown


@dataclass(slots=True)
class Summary:
    """One arm over a set of runs, against the baseline in the same repetitions."""

    arm: str
    group: str
    runs: int
    tokens: int
    tok_per_s: float | None
    ratio: float | None  # median over repetitions
    ratio_low: float | None
    ratio_high: float | None
    latency_p50_s: float | None
    latency_p95_s: float | None
    ttft_p50_s: float | None
    ttft_ratio: float | None
    drafted: int
    accepted: int
    rounds: int
    draft_share: float | None
    other_share: float | None
    joules_per_token: float | None
    slowest_500: float | None  # lowest speed over any 500 tokens, over the baseline's mean there
    in_run: float | None  # speed over the plain passes of the same run
    in_run_500: float | None  # and its lowest over any 500 tokens
    equal: int | None  # runs that wrote the baseline's tokens, None if that is not promised
    compared: int

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted

    def to_dict(self) -> dict[str, Any]:
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data["acceptance_rate"] = self.acceptance_rate
        data["rejected"] = self.rejected
        return data


@dataclass(slots=True)
class Comparison:
    """All runs of a comparison; the other arms are divided by the arm named ``baseline``."""

    baseline: str
    runs: list[RunFigures] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)

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
        """Every arm: over everything, per temperature, and per slice and temperature."""
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

    def breakdowns(self, *, slices: bool = True) -> list[tuple[str, str, list[BreakdownRow]]]:
        """(arm, group, rows) of every arm that speculates: where its time went.

        Per temperature and, with ``slices``, per slice and temperature. The time of a plain step is
        that of the same arm and group, or, if the arm hardly took any, the baseline's per token.
        """
        out: list[tuple[str, str, list[BreakdownRow]]] = []
        for arm in self.arms:
            if arm == self.baseline:
                continue
            for t in self.temperatures:
                for s in (None, *(self.slices if slices else ())):
                    mine = self._runs(t, s, arm)
                    parts = together(run.parts for run in mine)
                    speed = _speed(self._runs(t, s, self.baseline))
                    step = plain_step(parts) or (1.0 / speed if speed else 0.0)
                    if rows := breakdown(parts, step):
                        out.append((arm, f"{s} T={t:g}" if s else f"T={t:g}", rows))
        return out

    def _runs(self, temperature: float | None, slice: str | None, arm: str) -> list[RunFigures]:
        return [
            r
            for r in self.runs
            if r.arm == arm and temperature in (None, r.temperature) and slice in (None, r.slice)
        ]

    def summary(
        self, arm: str, group: str, *, temperature: float | None = None, slice: str | None = None
    ) -> Summary:
        """One arm over the runs of a temperature and a slice (None: of all)."""
        mine = self._runs(temperature, slice, arm)
        base = self._runs(temperature, slice, self.baseline)
        ratios: list[float] = []
        ttfts: list[float] = []
        for n in sorted({r.repetition for r in mine}):
            a = [r for r in mine if r.repetition == n]
            b = [r for r in base if r.repetition == n]
            speed, reference = _speed(a), _speed(b)
            if speed and reference:
                ratios.append(speed / reference)
            ours, theirs = sum(r.ttft_s for r in a), sum(r.ttft_s for r in b)
            if ours > 0 and theirs > 0:
                ttfts.append(ours / theirs)
        busy = sum(r.draft_s + r.verify_s + r.other_s for r in mine)
        tokens = sum(r.tokens for r in mine)
        joules = [r.joules for r in mine if r.joules is not None]
        equal, compared = self._equality(mine, base)
        return Summary(
            arm=arm,
            group=group,
            runs=len(mine),
            tokens=tokens,
            tok_per_s=_speed(mine),
            ratio=median(ratios) if ratios else None,
            ratio_low=min(ratios, default=None),
            ratio_high=max(ratios, default=None),
            latency_p50_s=percentile([r.total_s for r in mine], 0.5),
            latency_p95_s=percentile([r.total_s for r in mine], 0.95),
            ttft_p50_s=percentile([r.ttft_s for r in mine if r.ttft_s > 0], 0.5),
            ttft_ratio=median(ttfts) if ttfts else None,
            drafted=sum(r.drafted for r in mine),
            accepted=sum(r.accepted for r in mine),
            rounds=sum(r.rounds for r in mine),
            draft_share=sum(r.draft_s for r in mine) / busy if busy else None,
            other_share=sum(r.other_s for r in mine) / busy if busy else None,
            joules_per_token=sum(joules) / tokens if joules and tokens else None,
            slowest_500=_slowest(mine, base),
            in_run=_in_run(mine),
            in_run_500=min(
                (
                    run.plain_s * stretch
                    for run in mine
                    if run.plain_s and (stretch := slowest_stretch(run.drafting, STRETCH))
                ),
                default=None,
            ),
            equal=equal,
            compared=compared,
        )

    def _equality(
        self, mine: Sequence[RunFigures], base: Sequence[RunFigures]
    ) -> tuple[int | None, int]:
        wrote = {(r.prompt, r.temperature): r.token_ids for r in base if r.token_ids}
        pairs = [
            (r.token_ids, wrote[r.prompt, r.temperature])
            for r in mine
            if r.token_ids and (r.prompt, r.temperature) in wrote
        ]
        if not pairs:
            return None, 0
        return sum(a == b for a, b in pairs), len(pairs)


def _slowest(mine: Sequence[RunFigures], base: Sequence[RunFigures]) -> float | None:
    """The worst 500 tokens of any run, against the baseline's run of the same task."""
    plain = {
        (r.prompt, r.temperature, r.repetition): r.decoded / r.decode_s
        for r in base
        if r.decode_s > 0
    }
    found: list[float] = []
    for run in mine:
        reference = plain.get((run.prompt, run.temperature, run.repetition))
        stretch = slowest_stretch(run.timeline, STRETCH)
        if reference and stretch:
            found.append(stretch / reference)
    return min(found, default=None)


def _in_run(runs: Sequence[RunFigures]) -> float | None:
    """The speed with the cost of drafting alone, see ``what_drafting_took``."""
    took = plain = 0.0
    for run in runs:
        if run.plain_s:
            tokens, seconds = run.drafting[-1]
            took += seconds
            plain += tokens * run.plain_s
    return plain / took if took else None


def _speed(runs: Sequence[RunFigures]) -> float | None:
    seconds = sum(r.decode_s for r in runs)
    return sum(r.decoded for r in runs) / seconds if seconds > 0 else None


def compare(
    arms: Sequence[Arm],
    tasks: Iterable[Task],
    *,
    repetitions: int,
    warm_up: int = 1,
    progress: Progress | None = None,
    meter: EnergyMeter | None = None,
) -> Comparison:
    """Run all arms over all tasks. The first arm is the baseline.

    Args:
        warm_up: tasks that every arm answers once before anything counts.
        progress: called with (done, total, label).
    """
    work = list(tasks)
    result = Comparison(baseline=arms[0].name)
    total = repetitions * len(work) * len(arms) + min(warm_up, len(work)) * len(arms)
    done = 0

    def one(arm: Arm, task: Task, repetition: int) -> RunFigures:
        nonlocal done
        if progress is not None:
            progress(done, total, f"{arm.name}: {task.prompt.id} T={task.temperature:g}")
        before = meter.read() if meter is not None else None
        run = arm.run(task, repetition)
        if meter is not None:
            run.joules = meter.since(before)
        done += 1
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
    if progress is not None:
        progress(total, total, "done")
    return result

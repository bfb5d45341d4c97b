"""A measurement of a pair on this machine, and advice.

First what passes cost, timed directly. Then one experiment: plain decoding, drafts of one length,
and the adaptive window, which knows those costs and has learnt from other prompts, as the next run
will find it. The drafts of one length tell how many guesses are accepted by position, of which
every shorter length is a prefix; with the costs that gives the best fixed length and its speed. It
is no limit: a window that drafts further where the draft is sure can beat every fixed length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from statistics import fmean, median
from typing import Any

from specllama.backend.base import Context, Outputs
from specllama.backend.turns import timed
from specllama.bench.experiment import EngineArm, RunFigures, compare, tasks_of
from specllama.bench.prompts import BenchPrompt, numbered
from specllama.bench.report import Comparison
from specllama.engine.engine import Engine
from specllama.rates import LONGEST, fixed_speeds
from specllama.settings.params import GenerateParams
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.policy.costs import Costs

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
READS = (1, 2, 4, 8, 16, 32, 64, 128)
TEXT = 256  # tokens of the text behind which passes are timed
WORTH = 1.03  # less is noise: leave speculation to the window, promise nothing
PLAIN, FIXED, WINDOW = "plain", "fixed", "specllama"


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Median milliseconds by rows (target, every row with logits) and by tokens (draft)."""

    context: int
    target: dict[int, float]
    draft: dict[int, float]

    @property
    def ratios(self) -> dict[int, float]:
        return {n: ms / self.target[1] for n, ms in self.target.items()}

    @property
    def draft_step(self) -> float | None:
        """A draft step in plain steps."""
        return self.draft[1] / self.target[1] if self.draft else None

    def store(self, costs: Costs) -> None:
        """Put everything into the cost tables of a pair; plain steps first, they are the unit."""
        for table, passes in ((costs.target, self.target), (costs.draft, self.draft)):
            for n in sorted(passes):
                table.set(n, passes[n], self.context)

    def to_dict(self) -> dict[str, Any]:
        return {
            "context": self.context,
            "target_ms": {str(n): round(ms, 4) for n, ms in self.target.items()},
            "target_ratio": {str(n): round(r, 3) for n, r in self.ratios.items()},
            "draft_ms": {str(n): round(ms, 4) for n, ms in self.draft.items()},
            "draft_step": self.draft_step,
        }


@dataclass(slots=True)
class TuneGroup:
    """One slice at one temperature. Speeds are over plain decoding.

    Attributes:
        survival: of a draft, how likely it is accepted up to each position.
        speeds: predicted, by draft length; the best of them is ``best``, its speed ``best_speed``.
        window: measured, of the adaptive window.
    """

    slice: str
    temperature: float
    survival: list[float]
    speeds: dict[int, float]
    best: int
    best_speed: float
    window: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"speeds": {str(k): round(v, 4) for k, v in self.speeds.items()}}


@dataclass(slots=True)
class Tuning:
    costs: PassCosts
    groups: list[TuneGroup]
    check: Comparison | None
    advice: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": "specllama.tune.v1",
            "costs": self.costs.to_dict(),
            "groups": [group.to_dict() for group in self.groups],
            "check": self.check and [s.to_dict() for s in self.check.summaries()],
            "advice": self.advice,
        }


def time_passes(
    context: Context,
    tokens: Sequence[int],
    sizes: Sequence[int],
    *,
    outputs: Outputs,
    repetitions: int,
    progress: Callable[[], object],
) -> dict[int, float]:
    """Return the median milliseconds of each size of pass after ``tokens``, to which the cache is
    cut."""
    context.rollback(0)
    for i in range(0, len(tokens), TEXT):
        context.forward(tokens[i : i + TEXT], outputs="none")
    turns = timed([context], sizes, repetitions, outputs=outputs, text=tokens, done=progress)
    context.rollback(0)
    return {n: median(turn[n] for (turn,) in turns) for n in sizes}


def pass_costs(
    target: Context,
    draft: Context | None,
    tokens: Sequence[int],
    *,
    repetitions: int,
    progress: Callable[[], object] = lambda: None,
) -> PassCosts:
    """Time both contexts at the length of ``tokens`` (a real prompt, some hundred tokens)."""
    text = tokens[: max(target.n_ctx - max(ROWS) - 1, 1)]
    rows = [n for n in ROWS if n <= target.max_rows]
    v = time_passes(target, text, rows, outputs="all", repetitions=repetitions, progress=progress)
    steps: dict[int, float] = {}
    if draft is not None:
        short = [t for t in text if t < draft.n_vocab][: draft.n_ctx - max(READS) - 1]
        steps = time_passes(
            draft, short, READS, outputs="last", repetitions=repetitions, progress=progress
        )
    return PassCosts(len(text), v, steps)


def tune(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    *,
    base: GenerateParams | None = None,
    temperatures: Sequence[float] = (0.0, 0.7, 1.0),
    per_slice: int = 3,
    max_tokens: int = 64,
    repetitions: int = 9,
    checks: int = 1,
    progress: Callable[[float], object] = lambda share: None,
    say: Callable[[str], object] = lambda words: None,
) -> Tuning:
    """Run the whole measurement; a few minutes on a desktop.

    Args:
        repetitions: of every timed pass.
        checks: repetitions of the replies, plain and with the window; 0 only writes drafts of one
            length, once.
        progress: called with the share that is done.
        say: called with what comes next, and about how long it takes.
    """
    base = base or GenerateParams()
    profile, (chosen, others) = engine.windows.profile, split(prompts, per_slice)
    text = [token for prompt in chosen for token in engine.encode(prompt.content)[0]]
    drafter = engine.drafters.get("draft")
    draft: Any = drafter.lane if isinstance(drafter, ChainDrafter) else None
    source, longest = "draft" if draft else "ngram", min(LONGEST, engine.target.max_rows - 1)

    say("step 1 of 2: what passes of 1 to 16 rows take")
    turns = iter(range(1, 2 * repetitions + 1))
    costs = pass_costs(
        engine.target,
        draft,
        text[: min(TEXT, engine.target.n_ctx // 2)],
        repetitions=repetitions,
        progress=lambda: progress(0.2 * next(turns) / (2 * repetitions)),
    )
    costs.store(profile.costs)
    v = profile.costs.target.upto(longest + 1, costs.context)
    step, two = (profile.costs.draft.ms(n, costs.context) if draft else 0.0 for n in (1, 2))

    fixed = base.replace(proposer=source, draft_max=longest, window="fixed")
    window = EngineArm(WINDOW, engine, base)
    arms = [EngineArm(FIXED, engine, fixed)]
    if checks:
        arms = [EngineArm(PLAIN, engine, base.replace(speculate=False)), *arms, window]
    tasks = tasks_of(chosen, temperatures, max_tokens)
    lessons = tasks_of(others, temperatures, max_tokens) if checks else []
    replies = len(lessons) + (max(checks, 1) * len(tasks) + 1) * len(arms)
    minutes = max(replies * max_tokens * costs.target[1] / 60e3, 0.1)
    say(f"step 2 of 2: {replies} replies, about {minutes:.1f} min")
    with profile.practice():  # nothing written within is booked on the pair's balance
        for _ in compare(
            [window.run], lessons, progress=lambda done, _: progress(0.2 + 0.8 * done / replies)
        ):
            profile.forgive()  # written whatever they cost
        compared = Comparison.of(
            arms,
            tasks,
            repetitions=max(checks, 1),
            progress=lambda done, _: progress(0.2 + 0.8 * (len(lessons) + done) / replies),
        )
    check = compared if checks else None
    late = min(max(two - step, 0.0), step)  # read together or in turn
    groups = [
        group_of(slice, t, [r for r in compared.runs if r.arm == FIXED], v, step, late, check)
        for slice in compared.slices
        for t in compared.temperatures
    ]
    advice = advise(groups, check)
    advice["remedies"] = [asdict(one) for one in engine.windows.remedies(base)]
    return Tuning(costs, groups, check, advice)


def split(prompts: Sequence[BenchPrompt], n: int) -> tuple[list[BenchPrompt], ...]:
    """Return the first ``n`` prompts of every slice, and the next ``n``."""
    found = list(numbered(prompts))
    return tuple([one for at, one in found if at // n == part] for part in (0, 1))


def group_of(
    slice: str,
    temperature: float,
    runs: Sequence[RunFigures],
    v: Sequence[float],
    step: float,
    late: float,
    check: Comparison | None,
) -> TuneGroup:
    """Predict the speeds of fixed lengths from drafts of the longest; add the measured one.

    Args:
        v, step, late: see ``fixed_speeds``.
    """
    mine = [run for run in runs if (run.slice, run.temperature) == (slice, temperature)]
    drafts = [one for run in mine for one in run.passes if one.drafted]
    reached = [
        [one.accepted > i for one in drafts if len(one.drafted) > i]
        for i in range(max((len(one.drafted) for one in drafts), default=0))
    ]
    survival = list(accumulate(map(fmean, reached), min))
    speeds = fixed_speeds(survival, step, v, late)
    best = max(speeds, key=speeds.__getitem__, default=0)
    if not best or speeds[best] < 1.0:
        best = 0
    return TuneGroup(
        slice,
        temperature,
        survival,
        speeds,
        best,
        speeds.get(best, 1.0),
        window_speed(check, temperature, slice),
    )


def window_speed(
    check: Comparison | None, temperature: float, slice: str | None = None
) -> float | None:
    """Return the speed of the adaptive window over plain decoding, if that was checked."""
    if check is None:
        return None
    return check.summary(WINDOW, "", temperature=temperature, slice=slice).ratio


def advise(groups: Sequence[TuneGroup], check: Comparison | None) -> dict[str, Any]:
    """Choose on or off, and the length for ``--window fixed``, per temperature and overall.

    What was measured decides; where nothing was, the predictions of fixed lengths do.
    """
    temperatures: dict[str, Any] = {}
    gains: list[float] = []
    for t in sorted({group.temperature for group in groups}):
        speeds = [group.speeds for group in groups if group.temperature == t]
        known = set[int].intersection(*map(set, speeds))
        mean = {k: fmean(one[k] for one in speeds) for k in sorted(known)}
        best = max(mean, key=mean.__getitem__, default=0)
        predicted = mean.get(best, 1.0)
        measured = window_speed(check, t)
        gains.append(predicted if measured is None else measured)
        on = gains[-1] >= WORTH
        temperatures[f"{t:g}"] = {
            "speculate": on,
            "draft_max": best if on and predicted >= WORTH else 0,
            "best": best,
            "predicted": predicted,
            "measured": measured,
        }
    top = max(gains, default=1.0)
    how = "measured" if check else "predicted for the best fixed length"
    found = f"{top:.2f}× plain {how} over all slices"
    words = (
        f"keep speculation on: {found}; the window turns it off where it loses"
        if top >= WORTH
        else f"speculation gains little here ({found}); the window keeps it off, and --no-spec "
        "saves the memory of the draft model"
    )
    return {"speculate": top >= WORTH, "temperatures": temperatures, "words": words}

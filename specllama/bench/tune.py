"""A measurement of a pair on this machine, with the gain of fixed lengths, and advice.

Three parts: the costs of passes (before and after the rest, as the load of the machine varies);
acceptance per position (a fixed window of the longest length tested, of which every shorter one is
a prefix); and an interleaved check of the adaptive window against plain decoding. The first two
give the best fixed length and its speed, in a text without end and over replies as long as the
measured ones, for which the draft model has to read the prompt first. That speed is no limit: a
window that drafts further where the draft is sure can beat every fixed length. The window is
checked as the next run will find it: it knows the costs and has learnt from other prompts.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import Any

from specllama.bench.arms import EngineArm, Task, tasks_of
from specllama.bench.measure import PassCosts, measure_costs
from specllama.bench.prompts import BenchPrompt
from specllama.bench.runner import Comparison, Progress, compare
from specllama.engine.engine import Engine
from specllama.engine.profiles import Profile
from specllama.events import RoundDone
from specllama.fixed_gain import fixed_speeds
from specllama.interface import ModelInfo
from specllama.models.quantize import FLOATS
from specllama.settings.params import GenerateParams
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.stats import SpecStats

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)
_WIDE_BITS = 7.0  # bits a weight; below, there is little to save
WORTH = 1.03  # less is noise: leave speculation to the window, promise nothing


@dataclass(slots=True)
class Tally:
    """The survival of each position of a draft, of a slice at a temperature.

    Attributes:
        stats: of the rounds that drafted from ``source``.
        replies: tokens of prompt and reply.
    """

    slice: str
    temperature: float
    source: str
    stats: SpecStats = field(default_factory=SpecStats)
    replies: list[tuple[int, int]] = field(default_factory=list)

    def observe(self, done: RoundDone) -> None:
        if done.drafted and done.source == self.source:
            self.stats.observe(done)

    @property
    def survival(self) -> list[float]:
        """P(1..i all accepted | i drafted), by position, never rising."""
        shares = (a / d for a, d in zip(self.stats.accepted_at, self.stats.drafted_at, strict=True))
        return list(accumulate(shares, min))


@dataclass(slots=True)
class TuneGroup:
    """One slice at one temperature: the predicted gain of fixed lengths, and the measurements.

    Speeds are over plain decoding. ``best`` is the best fixed length, ``best_speed`` its speed once
    the prompt is read, ``reply_speed`` that over whole replies of ``reply`` tokens in the mean,
    reading included.
    """

    slice: str
    temperature: float
    survival: list[float]
    speeds: dict[int, float]  # predicted, by draft length
    best: int
    best_speed: float
    reply: float
    reply_speed: float
    window: float | None = None  # measured, of the adaptive window

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        data["speeds"] = {str(k): round(v, 4) for k, v in self.speeds.items()}
        return data


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
            "check": None if self.check is None else [s.to_dict() for s in self.check.summaries()],
            "advice": self.advice,
        }


def draft_context(engine: Engine) -> Any:
    """Return the draft model's context, None without one."""
    drafter = engine.drafter("draft") if "draft" in engine.drafters else None
    return drafter.lane if isinstance(drafter, ChainDrafter) else None


def pick(prompts: Sequence[BenchPrompt], per_slice: int, skip: int = 0) -> list[BenchPrompt]:
    """Choose a few prompts of every slice, after the first ``skip`` of it."""
    seen: dict[str, int] = {}
    out: list[BenchPrompt] = []
    for prompt in prompts:
        n = seen[prompt.slice] = seen.get(prompt.slice, 0) + 1
        if skip < n <= skip + per_slice:
            out.append(prompt)
    return out


def acceptance(
    engine: Engine, tasks: Sequence[Task], base: GenerateParams, progress: Progress
) -> list[Tally]:
    """Measure survival by position with the longest fixed window, per slice and temperature."""
    source = "draft" if draft_context(engine) is not None else "ngram"
    longest = min(max(LENGTHS), engine.target.max_rows - 1)
    params = base.replace(proposer=source, draft_max=longest, window="fixed")
    fixed = EngineArm(f"fixed {longest}", engine, params)
    found: dict[tuple[str, float], Tally] = {}
    for done, task in enumerate(tasks, 1):
        key = task.prompt.slice, task.temperature
        tally = found.setdefault(key, Tally(*key, source))
        run = fixed.answer(task)
        for one in run.rounds:
            tally.observe(one)
        tally.replies.append((run.end.prompt_n, len(run.end.token_ids)))
        progress(done, len(tasks))
    return list(found.values())


def predict(tally: Tally, costs: PassCosts, check: Comparison | None = None) -> TuneGroup:
    """Predict speeds of fixed lengths from measured survival and costs; add the checked ones."""
    survival = tally.survival
    v = costs.curve(max(LENGTHS) + 1)
    step = costs.draft.get(1, 0.0) if tally.source == "draft" else 0.0
    # after a fully accepted round the draft model reads two tokens, together or in turn
    late = min(max(costs.draft.get(2, step) - step, 0.0), step) if step else 0.0
    speeds = fixed_speeds(survival, step, v, late)
    best = max(speeds, key=speeds.__getitem__, default=0)
    best, best_speed = (best, speeds[best]) if speeds.get(best, 0.0) > 1.0 else (0, 1.0)
    written = sum(tokens for _, tokens in tally.replies)
    reading = sum(costs.reading(tokens) for tokens, _ in tally.replies) if step else 0.0
    plain = written * v[1]
    return TuneGroup(
        slice=tally.slice,
        temperature=tally.temperature,
        survival=survival,
        speeds=speeds,
        best=best,
        best_speed=best_speed,
        reply=written / max(len(tally.replies), 1),
        reply_speed=max(plain / (reading + plain / best_speed), 1.0) if plain else 1.0,
        window=window_speed(check, tally.temperature, tally.slice),
    )


def window_speed(
    check: Comparison | None, temperature: float, slice: str | None = None
) -> float | None:
    """Return the speed of the adaptive window over plain decoding, if that was checked."""
    if check is None:
        return None
    return check.summary("specllama", "", temperature=temperature, slice=slice).ratio


def tune(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    *,
    base: GenerateParams | None = None,
    temperatures: Sequence[float] = (0.0, 0.7, 1.0),
    per_slice: int = 3,
    max_tokens: int = 64,
    repetitions: int = 5,
    checks: int = 1,
    progress: Callable[[float], object] = lambda share: None,
    say: Callable[[str], object] = lambda words: None,
) -> Tuning:
    """Run the whole measurement; a few minutes on a desktop.

    Args:
        repetitions: of every timed pass.
        checks: repetitions of the check of the window, 0 for none.
        progress: called with the share that is done.
        say: called with what comes next, and about how long it takes.
    """
    base = base or GenerateParams()
    chosen = pick(prompts, per_slice)
    tasks = tasks_of(chosen, temperatures, max_tokens)

    def part(begin: float, length: float) -> Progress:
        return lambda done, total: progress(begin + length * done / total)

    def next_is(step: int, replies: int, what: str) -> None:
        minutes = max(replies * max_tokens * costs.target[1] / 60e3, 0.1)
        say(f"step {step} of {steps}: {replies} {what}, about {minutes:.1f} min")

    steps = 2 + bool(checks)
    say(f"step 1 of {steps}: what passes of 1 to 16 rows take")
    costs = pass_costs(engine, chosen, repetitions, part(0.0, 0.15))
    costs.store(engine.windows.profile.costs)
    next_is(2, len(tasks), "replies with guesses of one length")
    tallies = acceptance(engine, tasks, base, part(0.15, 0.35))
    check = None
    if checks:
        window = EngineArm("specllama", engine, base)
        others = pick(prompts, per_slice, skip=per_slice)
        profile = engine.windows.profile
        with profile.practice():  # nothing written within is booked on the pair's balance
            lessons = tasks_of(others, temperatures, max_tokens)
            next_is(3, len(lessons) + 2 * checks * len(tasks), "replies, plain and with the window")
            learn(window, lessons, profile, part(0.5, 0.1))
            plain = EngineArm("plain", engine, base.replace(speculate=False))
            check = compare([plain, window], tasks, repetitions=checks, progress=part(0.6, 0.3))
        # the two measurements enclose the check
        costs = costs.between(pass_costs(engine, chosen, repetitions, part(0.9, 0.1)))
    progress(1.0)
    groups = [predict(tally, costs, check) for tally in tallies]
    advice = advise(groups, check)
    if hint := smaller_draft(engine.info.draft):
        advice["hint"] = hint
    return Tuning(costs, groups, check, advice)


def pass_costs(
    engine: Engine, prompts: Sequence[BenchPrompt], repetitions: int, progress: Progress
) -> PassCosts:
    """Measure passes at the length of some of these prompts' text."""
    text = [token for prompt in prompts for token in engine.encode(prompt.content)[0]]
    text = text[: min(256, engine.target.n_ctx // 2)]
    ticks = count(1)
    return measure_costs(
        engine.target,
        draft_context(engine),
        text,
        repetitions=repetitions,
        progress=lambda: progress(next(ticks), 2 * (repetitions + 1)),
    )


def learn(window: EngineArm, lessons: Sequence[Task], profile: Profile, progress: Progress) -> None:
    """Let a window learn from prompts; lessons must be written whatever they cost."""
    for done, task in enumerate(lessons, 1):
        window.run(task, 0)
        profile.forgive()
        progress(done, len(lessons))


def smaller_draft(draft: ModelInfo | None) -> str:
    """Return a hint for a draft model with wide weights, "" if there is nothing to try.

    On a CPU a draft step takes as long as reading its bytes, and a prompt is read faster with
    weights that llama.cpp repacks (Q4_0 on every processor, Q8_0 not on x86).
    """
    if draft is None or draft.gpu_layers or not draft.n_params:
        return ""
    bits = draft.file_bytes * 8 / draft.n_params
    if bits < _WIDE_BITS:
        return ""
    again = "" if draft.quantization in FLOATS else " --requantize"
    return (
        f"the draft model is {draft.quantization}: as q4_0, its steps may take half as long, and "
        "a few percent fewer drafted tokens would be accepted. To try it:\n"
        f"  specllama quantize {shlex.quote(draft.path)} draft-q4_0.gguf --type q4_0 --pure{again}"
    )


def advise(groups: Sequence[TuneGroup], check: Comparison | None) -> dict[str, Any]:
    """Choose on or off, and the length for ``--window fixed``, per temperature and overall.

    What the check measured decides; without a check, the predictions of fixed lengths do.
    """
    temperatures: dict[str, Any] = {}
    gains: list[float] = []
    for t in sorted({group.temperature for group in groups}):
        mine = [group for group in groups if group.temperature == t]
        mean = {
            k: sum(group.speeds.get(k, 0.0) for group in mine) / len(mine)
            for k in LENGTHS
            if all(k in group.speeds for group in mine)
        }
        best = max(mean, key=lambda k: mean[k], default=0)
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

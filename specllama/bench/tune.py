"""Measure a pair on this machine, compute what fixed lengths would gain, and give advice.

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
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from specllama.bench.arms import EngineArm, Task
from specllama.bench.measure import PassCosts, measure_costs
from specllama.bench.prompts import BenchPrompt
from specllama.bench.runner import Comparison, compare
from specllama.engine.engine import Engine
from specllama.events import RoundDone
from specllama.interface import ModelInfo
from specllama.models.quantize import FLOATS
from specllama.settings.params import GenerateParams
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.lengths import best_plan, plans
from specllama.stats import SpecStats
from specllama.told import Told

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)
_WIDE_BITS = 7.0  # bits a weight; below, there is little to save
WORTH = 1.03  # less is noise: leave speculation to the window, promise nothing

Progress = Callable[[float, str], None]


@dataclass(slots=True)
class Tally:
    """How often each position of a draft survives, of a slice at a temperature.

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
    """One slice at one temperature: what fixed lengths would give, and what was measured.

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
    """The draft model's context, None without one."""
    drafter = engine.drafter("draft") if "draft" in engine.drafters else None
    return drafter.lane if isinstance(drafter, ChainDrafter) else None


def pick(prompts: Sequence[BenchPrompt], per_slice: int, skip: int = 0) -> list[BenchPrompt]:
    """A few prompts of every slice, after the first ``skip`` of it."""
    seen: dict[str, int] = {}
    out: list[BenchPrompt] = []
    for prompt in prompts:
        n = seen[prompt.slice] = seen.get(prompt.slice, 0) + 1
        if skip < n <= skip + per_slice:
            out.append(prompt)
    return out


def acceptance(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    temperatures: Sequence[float],
    *,
    max_tokens: int,
    longest: int,
    progress: Callable[[str], None] | None = None,
    base: GenerateParams | None = None,
    seed: int = 1,
) -> list[Tally]:
    """Survival by position with a fixed window of ``longest``, per slice and temperature."""
    base = base or GenerateParams()
    source = "draft" if draft_context(engine) is not None else "ngram"
    found: dict[tuple[str, float], Tally] = {}
    for n, prompt in enumerate(prompts):
        engine.reset()
        for temperature in temperatures:
            key = (prompt.slice, temperature)
            tally = found.setdefault(key, Tally(prompt.slice, temperature, source))
            params = base.choose("temperature", temperature).replace(
                max_tokens=max_tokens,
                seed=seed + n,
                proposer=source,
                draft_max=longest,
                window="fixed",
                min_speculative_tokens=0,
            )
            told = Told.of(engine.generate(prompt.content, params))
            for done in told.rounds:
                tally.observe(done)
            tally.replies.append((told.end.prompt_n, len(told.end.token_ids)))
            if progress is not None:
                progress(f"{prompt.slice}, temperature {temperature:g}")
    return list(found.values())


def predict(tally: Tally, costs: PassCosts) -> TuneGroup:
    """Speeds of fixed lengths from measured survival and measured costs."""
    survival = tally.survival
    v = costs.curve(max(LENGTHS) + 1)
    step = costs.draft.get(1, 0.0) if tally.source == "draft" else 0.0
    # after a fully accepted round the draft model reads two tokens, together or in turn
    late = min(max(costs.draft.get(2, step) - step, 0.0), step) if step else 0.0
    speeds = {plan.length: plan.speed for plan in plans(survival, step, v, late)}
    best = best_plan(survival, step, v, late)
    written = sum(tokens for _, tokens in tally.replies)
    reading = sum(costs.reading(tokens) for tokens, _ in tally.replies) if step else 0.0
    plain = written * v[1]
    return TuneGroup(
        slice=tally.slice,
        temperature=tally.temperature,
        survival=survival,
        speeds=speeds,
        best=best.length,
        best_speed=best.speed,
        reply=written / max(len(tally.replies), 1),
        reply_speed=max(plain / (reading + plain / best.speed), 1.0) if plain else 1.0,
    )


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
    progress: Progress | None = None,
) -> Tuning:
    """The whole measurement; a few minutes on a desktop.

    Args:
        repetitions: of every timed pass.
        checks: repetitions of the check of the window, 0 for none.
    """
    chosen = pick(prompts, per_slice)
    spans = {
        "costs": (0.0, 0.15),
        "acceptance": (0.15, 0.35),
        "learning": (0.5, 0.1),
        "check": (0.6, 0.3),
        "costs again": (0.9, 0.1),
    }

    def say(part: str, share: float, label: str) -> None:
        if progress is not None:
            begin, length = spans[part]
            progress(min(begin + length * share, 1.0), label)

    draft = draft_context(engine)
    text: list[int] = []
    for prompt in chosen:
        text += engine.encode(prompt.content)[0]
    text = text[: min(256, engine.target.n_ctx // 2)]

    def timed(part: str) -> PassCosts:
        ticks = 0

        def tick() -> None:
            nonlocal ticks
            ticks += 1
            say(part, ticks / (2 * (repetitions + 1)), "cost of passes")

        say(part, 0.0, "cost of passes")
        return measure_costs(engine.target, draft, text, repetitions=repetitions, progress=tick)

    costs = timed("costs")
    costs.store(engine.windows.profile.costs)
    longest = min(max(LENGTHS), engine.target.max_rows - 1)
    runs = 0

    def ran(label: str) -> None:
        nonlocal runs
        runs += 1
        say("acceptance", runs / (len(chosen) * len(temperatures)), f"acceptance: {label}")

    tallies = acceptance(
        engine,
        chosen,
        temperatures,
        max_tokens=max_tokens,
        longest=longest,
        progress=ran,
        base=base,
    )
    comparison = None
    if checks:
        base = base or GenerateParams()
        window = EngineArm("specllama", engine, base)

        def tasks(some: Sequence[BenchPrompt]) -> list[Task]:
            return [
                Task(prompt, temperature, max_tokens, seed=1 + n)
                for n, prompt in enumerate(some)
                for temperature in temperatures
            ]

        lessons = tasks(pick(prompts, per_slice, skip=per_slice))
        with practice(engine):
            for done, task in enumerate(lessons):
                say("learning", done / len(lessons), "the window learns")
                window.run(task, 0)
                forgive(engine)  # lessons must be written whatever they cost
            comparison = compare(
                [EngineArm("plain", engine, base.replace(speculate=False)), window],
                tasks(chosen),
                repetitions=checks,
                progress=lambda done, total, label: say("check", done / total, f"check: {label}"),
            )
        costs = costs.between(timed("costs again"))  # the two measurements enclose the check
    groups = [predict(tally, costs) for tally in tallies]
    if comparison is not None:
        for group in groups:
            group.window = comparison.summary(
                "specllama", "", temperature=group.temperature, slice=group.slice
            ).ratio
    say("costs again", 1.0, "done")
    advice = advise(groups, comparison)
    if hint := smaller_draft(engine.info.draft):
        advice["hint"] = hint
    return Tuning(costs, groups, comparison, advice)


def practice(engine: Engine) -> AbstractContextManager[None]:
    """Nothing written within is booked on the pair's balance."""
    return engine.windows.profile.practice()


def forgive(engine: Engine) -> None:
    """Reset the balances of the engine's windows, within ``practice``."""
    engine.windows.profile.forgive()


def smaller_draft(draft: ModelInfo | None) -> str:
    """A hint for a draft model with wide weights, "" if there is nothing to try.

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
    """On or off, and the length to give ``--window fixed``, per temperature and overall.

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
        measured = check.summary("specllama", "", temperature=t).ratio if check else None
        gains.append(predicted if measured is None else measured)
        on = gains[-1] >= WORTH
        temperatures[f"{t:g}"] = {
            "speculate": on,
            "draft_max": best if on and predicted >= WORTH else 0,
            "best": best,
            "predicted": round(predicted, 3),
            "measured": None if measured is None else round(measured, 3),
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

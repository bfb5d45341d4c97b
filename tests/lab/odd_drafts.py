"""Times drafts as no user has them: all of them wrong, or told the reply beforehand.

    python tests/lab/odd_drafts.py --useless-draft --proposer draft --max-tokens 600 -n 2
    python tests/lab/odd_drafts.py -d none --prediction edited wrong --slice code

A small model cannot rewrite a file that it is given. So what a caller predicts of a reply is what
the model writes by itself, and the old text is that reply with a word changed: the measure of how
an edit is followed, not of a model that edits. Prints the table of ``specllama bench run``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import numpy as np
from markdown_table import table_of

from specllama.bench.experiment import Arm, EngineArm, RunFigures, Task, edited, tasks_of
from specllama.bench.prompts import half, load_prompts, schema_prompts
from specllama.bench.report import COLUMNS, Comparison
from specllama.engine.engine import Engine
from specllama.engine.profiles import Profile
from specllama.events import RoundDone
from specllama.settings.params import EngineOptions, GenerateParams
from specllama.speculative.drafting.draft_model import ChainDrafter

Expected = Literal["edited", "wrong"]


def expecting(what: Expected, plain: EngineArm, tasks: Sequence[Task]) -> Callable[[Task], str]:
    """A predictor of each task's reply: the text of ``plain`` with one word changed, or the reply
    to the next prompt. Each text is written once, when it is first needed."""
    texts: dict[tuple[str, float], str] = {}

    def written(task: Task) -> str:
        key = task.prompt.id, task.temperature
        if key not in texts:
            texts[key] = plain.answer(task).end.text
        return texts[key]

    def found(task: Task) -> str:
        if what == "edited":
            text = written(task)
            return edited(text, len(text) + 1)
        alike = [one for one in tasks if one.temperature == task.temperature]
        return written(alike[(alike.index(task) + 1) % len(alike)])

    return found


@dataclass(slots=True)
class ToldArm(EngineArm):
    """An arm that is told what to expect."""

    expects: Callable[[Task], str] = lambda task: ""

    def run(self, task: Task, repetition: int) -> RunFigures:
        self.params = self.params.replace(prediction=self.expects(task))
        return EngineArm.run(self, task, repetition)


def make_useless(engine: Engine) -> None:
    """Turn every guess of the draft model into a wrong one at unchanged cost and confidence: the
    scores of each pass are shifted by one token id."""
    for name in engine.drafters:
        drafter = engine.drafters[name]
        if isinstance(drafter, ChainDrafter) and drafter.lanes:  # own layers may not be open yet
            lane: Any = drafter.lane
            forward = lane.forward

            def shifted(tokens: Sequence[int], *, forward: Any = forward, **kwargs: Any) -> Any:
                return np.roll(forward(tokens, **kwargs), 1, axis=1)

            lane.forward = shifted


STRETCH = 500  # tokens; the slowest stretch of this length is shown
ENOUGH = 16  # passes whose mean is a plain step


def what_drafting_took(
    rounds: Sequence[RoundDone],
) -> tuple[float | None, list[tuple[int, float]]]:
    """The seconds of a plain pass, and (tokens, seconds) so far at that pace, of one run.

    On a busy machine, passes differ by more than drafting may cost. So every pass that verified
    nothing counts as their mean; drafting and the passes that verified something count as they
    were. (None, []) if hardly any pass was plain.
    """
    plain = [one.pass_ms / 1e3 for one in rounds if not one.drafted]
    if len(plain) < ENOUGH:
        return None, []
    points, mean_s = [(0, 0.0)], fmean(plain)
    for one in rounds:
        tokens, seconds = points[-1]
        pass_s = one.pass_ms / 1e3 if one.drafted else mean_s
        points.append((tokens + len(one.emitted), seconds + one.draft_ms / 1e3 + pass_s))
    return mean_s, points


def slowest_stretch(points: Sequence[tuple[int, float]], tokens: int) -> float | None:
    """The lowest tokens per second over ``tokens`` or more; None for a shorter run."""
    slowest: float | None = None
    start = 0
    for n, seconds in points:
        while start + 1 < len(points) and n - points[start + 1][0] >= tokens:
            start += 1
        count, elapsed = n - points[start][0], seconds - points[start][1]
        if count >= tokens and elapsed > 0:
            slowest = count / elapsed if slowest is None else min(slowest, count / elapsed)
    return slowest


def slowest_in_run(runs: Sequence[RunFigures]) -> float | None:
    """The worst 500 tokens of any run, over its own plain passes: the cost of drafting alone."""
    found = []
    for run in runs:
        plain_s, drafting = what_drafting_took(run.passes)
        if plain_s and (slow := slowest_stretch(drafting, STRETCH)):
            found.append(plain_s * slow)
    return min(found, default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-m", "--model", default="tiny")
    parser.add_argument("-d", "--draft-model")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("-n", "--count", type=int, default=8)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--slice")
    parser.add_argument("--proposer", default="auto")
    parser.add_argument("--prediction", nargs="+", choices=["edited", "wrong"], default=[])
    parser.add_argument("--useless-draft", action="store_true")
    asked = parser.parse_args()
    options = EngineOptions(n_ctx=4096, threads=asked.threads)
    with Engine.load(asked.model, asked.draft_model, options) as engine:
        engine.measure()
        if asked.useless_draft:
            make_useless(engine)
        base, key = GenerateParams(proposer=asked.proposer), engine.windows.profile.key
        prompts = [*half(load_prompts(), "bench"), *schema_prompts()]
        chosen = [one for one in prompts if asked.slice in (None, one.slice)][: asked.count]
        tasks = tasks_of(chosen, asked.temperature, asked.max_tokens, ignore_eos=True)
        plain = EngineArm("plain", engine, base.replace(speculate=False))
        start = lambda: Profile(key=key)  # noqa: E731
        arms: list[Arm] = [plain, EngineArm(asked.proposer, engine, base, begin=start)]
        for what in asked.prediction:
            expects = expecting(what, plain, tasks)
            arms.append(ToldArm(what, engine, base, begin=start, expects=expects))
        result = Comparison.of(arms, tasks, repetitions=asked.repetitions)
        rows = [[cell(one) for cell in COLUMNS.values()] for one in result.summaries()]
        print(table_of(tuple(COLUMNS), rows))
        for arm in arms:
            worst = slowest_in_run([run for run in result.runs if run.arm == arm.name])
            print(f"{arm.name}: slowest {STRETCH} tokens in run: {worst and round(worst, 3)}")


if __name__ == "__main__":
    main()

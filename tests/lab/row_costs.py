"""What a pass of n rows costs with a file here, and what padding to cheaper widths gains.

    python tests/lab/row_costs.py -m MODEL [-d DRAFT] [--repack on] [--rows-only] [--laps 3]

Prints v(n) as stored in the window's table, and the width that each pass is padded to; then writes
replies with and without padding, in turn, and prints tokens per second of both, their ratio by
prompt (medians over laps) and the geometric mean. Both arms begin each lap with the costs that were
just measured, and learn from there.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from statistics import geometric_mean, median

from specllama.bench.experiment import EngineArm, RunFigures, Task, tasks_of
from specllama.bench.prompts import load_prompts
from specllama.bench.tuning import PassCosts, pass_costs, split
from specllama.engine.engine import Engine
from specllama.engine.profiles import Profile
from specllama.settings.params import EngineOptions, GenerateParams


@dataclass(slots=True)
class Padding(EngineArm):
    """An arm whose passes are padded, or not."""

    pads: bool = True

    def run(self, task: Task, repetition: int) -> RunFigures:
        assert isinstance(self.engine, Engine)
        self.engine.target.pool.plan.pads = self.pads
        return EngineArm.run(self, task, repetition)


def show(engine: Engine, costs: PassCosts) -> None:
    """Print v(n), and where passes go."""
    profile = Profile()
    costs.store(profile.costs)
    table, plan = profile.costs.target, engine.target.pool.plan
    ratios = {n: f"{ratio:.2f}" for n, ratio in costs.ratios.items()}
    print(f"one row {costs.target[1]:.1f} ms; v(n): {ratios}")
    wide = {n: table.cheapest(n, costs.context, plan.widest) for n in range(2, 13)}
    print(f"padded: {({n: m for n, m in wide.items() if m != n}) or 'nothing'}")
    if costs.draft:
        steps = {n: f"{ms / costs.draft[1]:.2f}" for n, ms in costs.draft.items() if n < 9}
        print(f"draft step {costs.draft_step:.2f} of a plain step; by tokens {steps}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", required=True)
    parser.add_argument("-d")
    parser.add_argument("--repack", default="auto")
    parser.add_argument("--proposer", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=1, help="of each kind")
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--rows-only", action="store_true")
    args = parser.parse_args()
    engine = Engine.load(args.m, args.d, EngineOptions(repack=args.repack, n_ctx=2048))
    print(
        args.m.rpartition("/")[2], engine.info.exactness, f"repacked {engine.info.target.repacked}"
    )
    prompts = split(load_prompts(), args.prompts)[0]
    text = [token for prompt in prompts for token in engine.encode(prompt.content)[0]]
    drafter = engine.drafter("draft") if "draft" in engine.drafters else None
    lane = getattr(drafter, "lane", None)
    costs = pass_costs(engine.target, lane, text[:256], repetitions=3)
    show(engine, costs)
    if args.rows_only:
        return

    def begin() -> Profile:
        profile = Profile()
        costs.store(profile.costs)
        return profile

    base = GenerateParams(proposer=args.proposer)
    arms = [
        Padding(name, engine, base, begin, pads=name == "padded") for name in ("padded", "bare")
    ]
    ratios: dict[str, list[float]] = {}
    speeds: dict[str, list[float]] = {}
    same = runs = 0
    for lap in range(args.laps):
        for i, task in enumerate(
            tasks_of(prompts, (args.temperature,), args.tokens, ignore_eos=True)
        ):
            turn = arms[:: -1 if (lap + i) % 2 else 1]
            told = {arm.name: arm.run(task, lap) for arm in turn}
            a, b = told["padded"], told["bare"]
            assert a.speed
            assert b.speed
            ratios.setdefault(task.prompt.id, []).append(a.speed / b.speed)
            for name, one in told.items():
                speeds.setdefault(name, []).append(one.speed or 0.0)
            runs, same = runs + 1, same + bool(a.same(b))
    means = [median(found) for found in ratios.values()]
    print({name: f"{median(found):.1f} tok/s" for name, found in speeds.items()})
    print({name: f"{median(found):.3f}" for name, found in ratios.items()})
    print(f"padded ÷ bare: {geometric_mean(means):.3f}; {same} of {runs} texts the same")
    engine.close()


if __name__ == "__main__":
    main()

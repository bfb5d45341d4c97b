"""What a pass of n rows costs with a file here, and what padding to cheaper widths gains.

    python tests/lab/row_costs.py -m MODEL [-d DRAFT] [--repack on] [--rows-only] [--busy]

Prints v(n) as stored in the window's table, and the width that each pass is padded to; then writes
replies with and without padding, in turn, and prints tokens per second of both, their ratio by
prompt (medians over laps) and the geometric mean. Both arms begin each lap with the costs that were
just measured, and learn from there. ``--busy``: one thread, and instead of the clock the processor
time of this process, which other programs lengthen less.
"""

from __future__ import annotations

import argparse
import time
from statistics import geometric_mean, median
from typing import Any


def arguments() -> argparse.Namespace:
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
    parser.add_argument("--busy", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.busy:  # before any of ours takes the clock
        time.perf_counter = time.process_time

    from specllama.bench.experiment import EngineArm, tasks_of
    from specllama.bench.prompts import load_prompts
    from specllama.bench.tuning import pass_costs, split
    from specllama.engine.engine import Engine
    from specllama.engine.profiles import Profile
    from specllama.settings.params import EngineOptions, GenerateParams

    threads = 1 if args.busy else None
    options = EngineOptions(repack=args.repack, n_ctx=2048, threads=threads)
    engine = Engine.load(args.m, args.d, options)
    layout = "repacked" if engine.info.target.repacked else "as stored"
    print(f"{args.m.rpartition('/')[2]}, {layout}, {engine.info.exactness}")
    prompts = split(load_prompts(), args.prompts)[0]
    text = [token for prompt in prompts for token in engine.encode(prompt.content)[0]]
    drafter = engine.drafters.get("draft")
    lane = getattr(drafter, "lane", None)
    costs = pass_costs(engine.target, lane, text[:256], repetitions=3)

    def begin() -> Profile:
        profile = Profile()
        costs.store(profile.costs)
        return profile

    table, plan = begin().costs.target, engine.target.pool.plan
    ratios: dict[Any, Any] = {n: f"{ratio:.2f}" for n, ratio in costs.ratios.items()}
    print(f"one row {costs.target[1]:.1f} ms; v(n): {ratios}")
    wide = {n: table.cheapest(n, costs.context, plan.widest) for n in range(2, 17)}
    print(f"padded: {({n: m for n, m in wide.items() if m != n}) or 'nothing'}")
    if costs.draft:
        steps = {n: f"{ms / costs.draft[1]:.2f}" for n, ms in costs.draft.items() if n < 9}
        print(f"draft step {costs.draft_step:.2f} of a plain step; by tokens {steps}")
    if args.rows_only:
        return
    base = GenerateParams(proposer=args.proposer)
    arms = [EngineArm(name, engine, base, begin) for name in ("padded", "bare")]
    found: dict[str, list[float]] = {}
    speeds: dict[str, list[float]] = {}
    same = runs = 0
    for lap in range(args.laps):
        tasks = tasks_of(prompts, (args.temperature,), args.tokens, ignore_eos=True)
        for i, task in enumerate(tasks):
            told = {}
            for arm in arms[:: -1 if (lap + i) % 2 else 1]:
                plan.pads = arm.name == "padded"
                told[arm.name] = arm.run(task, lap)
            padded, bare = (told[arm.name].speed or 0.0 for arm in arms)
            found.setdefault(task.prompt.id, []).append(padded / bare)
            for name, one in told.items():
                speeds.setdefault(name, []).append(one.speed or 0.0)
            runs, same = runs + 1, same + bool(told["padded"].same(told["bare"]))
    means = {name: median(ratios) for name, ratios in found.items()}
    print({name: f"{median(all_):.1f} tok/s" for name, all_ in speeds.items()})
    print({name: f"{mean:.3f}" for name, mean in means.items()})
    print(f"padded ÷ bare: {geometric_mean(means.values()):.3f}; {same} of {runs} texts the same")
    engine.close()


if __name__ == "__main__":
    main()

"""What a pass of n rows, and a step of the draft model, cost with a file here.

    python tests/lab/row_costs.py -m MODEL [-d DRAFT] [--repack on] [--busy]

Prints v(n) as the window's table holds it. ``--busy``: one thread, and instead of the clock the
processor time of this process, which other programs lengthen less.
"""

from __future__ import annotations

import argparse
import time


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", required=True)
    parser.add_argument("-d")
    parser.add_argument("--repack", default="auto")
    parser.add_argument("--busy", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.busy:  # before any of ours takes the clock
        time.perf_counter = time.process_time

    from specllama.bench.prompts import load_prompts
    from specllama.bench.tuning import pass_costs, split
    from specllama.engine.engine import Engine
    from specllama.settings.params import EngineOptions

    threads = 1 if args.busy else None
    options = EngineOptions(repack=args.repack, n_ctx=2048, threads=threads)
    engine = Engine.load(args.m, args.d, options)
    layout = "repacked" if engine.info.target.repacked else "as stored"
    print(f"{args.m.rpartition('/')[2]}, {layout}, {engine.info.exactness}")
    prompts = split(load_prompts(), 1)[0]
    text = [token for prompt in prompts for token in engine.encode(prompt.content)[0]]
    drafter = engine.drafters.get("draft")
    lane = getattr(drafter, "lane", None)
    costs = pass_costs(engine.target, lane, text[:256], repetitions=3)
    ratios = {n: f"{ratio:.2f}" for n, ratio in costs.ratios.items()}
    print(f"one row {costs.target[1]:.1f} ms; v(n): {ratios}")
    if costs.draft:
        steps = {n: f"{ms / costs.draft[1]:.2f}" for n, ms in costs.draft.items() if n < 9}
        print(f"draft step {costs.draft_step:.2f} of a plain step; by tokens {steps}")


if __name__ == "__main__":
    main()

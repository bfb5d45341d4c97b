"""How soon ``prove --against`` shows a wrong law, and how often it is wrong itself.

    python tests/lab/law_power.py [--runs 1000] [--most 20000] [--power-runs 100]

Scripted servers whose law is off by a known total variation. Prints a Markdown table. Takes many
minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from wrong_laws import SHAPES, World, apart, found, world, wrong

from specllama.bench.plain_law import SLACK_ALIKE

OFF = (0.005, 0.01, 0.05)
# what a draft's law tells something about
DRAFTS = ("drafts accepted too often", "recovered from the whole law", "residual not renormalised")


def alarms(w: World, runs: int, most: int, **how: float) -> None:
    at, _ = found(w, w.plain, runs=runs, most=most, seed=11, **how)
    told = ", ".join(f"{k} {v:g}" for k, v in how.items()) or "exact logits"
    n = int((at <= most).sum())
    print(f"- right law, {told}: {n} of {runs} runs of {most} tokens gave an alarm", flush=True)


def power(w: World, shape: str, off: float, runs: int, most: int, with_draft: bool) -> None:
    at, by = found(
        w,
        wrong(w, shape, off),
        runs=runs,
        most=most,
        seed=7,
        with_draft=with_draft,
        slack=SLACK_ALIKE,
    )
    half, most_of = (int(x) for x in np.quantile(at, (0.5, 0.9), method="higher"))
    show = [f"{x:,}" if x <= most else f"> {most:,}" for x in (half, most_of)]
    leader = ", ".join(name for name, _ in Counter(b for b in by if b).most_common(2))
    known = "known" if with_draft else "unknown"
    print(f"| {shape} | {off:.1%} | {known} | {show[0]} | {show[1]} | {leader} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--most", type=int, default=20_000)
    parser.add_argument("--power-runs", type=int, default=100)
    parser.add_argument("--power-most", type=int, default=100_000)
    given = parser.parse_args()
    w = world(1)
    print(f"{len(w.plain)} positions, draft off by {apart(w.plain, w.draft):.2f}\n")
    if given.runs:
        alarms(w, given.runs, given.most)
        alarms(w, given.runs, given.most, slack=0.01, rounding=0.01)
    print("\n| wrong in | TV | draft's law | median | 90 % | won by |")
    print("|---|---:|---|---:|---:|---|")
    for shape in SHAPES:
        for off in reversed(OFF):
            for with_draft in (True, False) if shape in DRAFTS else (False,):
                power(w, shape, off, given.power_runs, given.power_most, with_draft)


if __name__ == "__main__":
    main()

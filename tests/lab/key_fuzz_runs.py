"""Play many sequences of keys (tests/support/key_fuzz.py) and count what they break.

    python tests/lab/key_fuzz_runs.py --sequences 2000
    python tests/lab/key_fuzz_runs.py --sequences 30 --model FILE.gguf --size 60x16

Each sequence is an app in a home of its own, drawn from its seed: ``--first 17 --sequences 1``
plays it again, as far as the machine's own timing allows.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from key_fuzz import SIZES, STEPS, Draw, Found, play
from textual import _wait

_wait.SLEEP_GRANULARITY = 0.005
_wait.SLEEP_IDLE = _wait.SLEEP_GRANULARITY / 20


def kind(problem: str) -> str:
    """The problem without the words that were drawn."""
    problem = re.sub(r"'[^']*'|\b[b-z]{7}\b", "…", problem)
    return re.sub(r"\b\d+\b", "n", problem)


def one(draw: Draw) -> Found:
    with tempfile.TemporaryDirectory() as home:
        os.environ["SPECLLAMA_HOME"] = home
        from specllama import paths
        from specllama.tui.state import Preferences

        paths.private_folder(Preferences.path().parent)
        Preferences(first_look=draw.seed % 10 == 0).save()
        return asyncio.run(play(draw, Path(home)))


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    args.add_argument("--sequences", type=int, default=100)
    args.add_argument("--first", type=int, default=0, help="the first seed")
    args.add_argument("--every", type=int, default=1, help="only every n-th seed")
    args.add_argument("--steps", type=int, default=STEPS)
    args.add_argument("--size", help="60x16, 80x24 or 120x36; all in turn unless given")
    args.add_argument("--lag", type=float, help="0 is a fast machine; 0, 1 and 3 in turn")
    args.add_argument("--model", help="a real model's file, instead of the scripted engine")
    args.add_argument("--show", action="store_true", help="the steps of those that fail")
    found = args.parse_args()
    size = tuple(map(int, found.size.split("x"))) if found.size else None
    counts: Counter[str] = Counter()
    failed = 0
    seeds = range(found.first, found.first + found.sequences, found.every)
    for number, seed in enumerate(seeds, 1):
        lag = (0.0, 1.0, 3.0)[seed % 3] if found.lag is None else found.lag
        where = size or SIZES[seed // 3 % len(SIZES)]
        got = one(Draw(seed, where, lag, found.steps, found.model))
        failed += bool(got.problems)
        counts.update({kind(problem) for problem in got.problems})
        if got.problems and found.show:
            print(got, flush=True)
        if number % 50 == 0:
            print(f"{number} sequences, {failed} failed", flush=True)
    print(f"{len(seeds)} sequences, {failed} failed")
    for problem, times in counts.most_common():
        print(f"{times:6}  {problem}")


if __name__ == "__main__":
    main()

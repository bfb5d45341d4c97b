"""What the terminal app takes from decoding: one reply in ``run`` and in the app, in turns.

    PYTHONPATH=tests/support python tests/lab/beside_app.py [-m MODEL] [-d DRAFT] [--pairs 3]
                                     [--size 120x36] [--tokens 160] [--temperature 0] [--spec]

Both write the same tokens and log their rounds, in the home of ``SPECLLAMA_HOME`` or in a new one;
the speeds are those of the logs. Printed for each pair: both speeds, the app's part of run's, and
the processor time that the app's own process took for a token of the reply (drawing, reading
events, keeping them), which other load hardly changes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from terminals import Terminal, terminal

ASK = "Tell me a long story about a fox and a crow."
SPECLLAMA = [sys.executable, "-P", "-m", "specllama"]


def processor_s(pid: int) -> float:
    """Of all threads of a process, by the scheduler's clock."""
    spent = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        spent += int((task / "schedstat").read_text().split()[0])
    return spent / 1e9


def ended(home: Path) -> dict[str, Any]:
    """The last line of the newest round log."""
    newest = max((home / "data" / "rounds").glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    found: dict[str, Any] = json.loads(newest.read_text().splitlines()[-1])
    return found


def by_run(words: list[str], home: Path) -> dict[str, Any]:
    subprocess.run([*SPECLLAMA, "run", *words, ASK], capture_output=True, check=True)
    return ended(home)


def by_app(words: list[str], home: Path, size: tuple[int, int]) -> tuple[dict[str, Any], float]:
    """How it ended, and the processor seconds of the app's process from Enter to the end."""
    command = [*SPECLLAMA, "chat", *words]
    with terminal(home, command=command, size=size) as t:
        t.until(lambda: "● CPU" in t.words)
        before = settled(t)
        t.type(f"{ASK}\r")
        t.until(lambda: re.search(r"\d tokens · .*seed \d", t.words))
        spent = processor_s(t.process.pid) - before
        t.type("\x11")
        t.ended()
    return ended(home), spent


def settled(t: Terminal) -> float:
    """Its processor seconds, once it rests."""
    seen = -1.0
    while (now := processor_s(t.process.pid)) - seen > 0.002:
        seen = now
        for _ in range(5):
            t.read(0.1)
    return now


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-m", "--model", default="tiny")
    parser.add_argument("-d", "--draft", default="none")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--size", default="120x36")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--spec", action="store_true", help="draft; by default both decode plainly")
    parser.add_argument("words", nargs="*", help="further options of both")
    asked = parser.parse_args()
    width, height = map(int, asked.size.split("x"))
    words = ["-m", asked.model, "-d", asked.draft, "--seed", "1", "-n", str(asked.tokens)]
    words += ["--temperature", str(asked.temperature), "--spec" if asked.spec else "--no-spec"]
    words += asked.words
    with tempfile.TemporaryDirectory() as folder:
        home = Path(os.environ.setdefault("SPECLLAMA_HOME", folder))
        by_run(words, home)  # the first one measures the machine
        parts, each = [], []
        for _ in range(asked.pairs):
            alone = by_run(words, home)
            beside, spent = by_app(words, home, (width, height))
            if alone["token_ids"] != beside["token_ids"]:
                print("the texts differ")
            speeds = [end["timings"]["tok_per_s"] for end in (alone, beside)]
            parts.append(speeds[1] / speeds[0])
            each.append(1e3 * spent / len(beside["token_ids"]))
            print(
                f"run {speeds[0]:.2f} tok/s, app {speeds[1]:.2f}: {parts[-1]:.3f}; "
                f"{each[-1]:.2f} ms of the app's process a token",
                flush=True,
            )
    for name, values in (("of run's speed", parts), ("ms a token", each)):
        print(f"{name}: {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main()

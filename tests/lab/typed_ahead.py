"""Time to the first token of messages that are typed into the app, read ahead and not.

    python tests/lab/typed_ahead.py TARGET DRAFT [--messages 12]

Two apps run in tmux. Each message is typed into one and then into the other, 200 to 400 characters
a minute, with mistakes that are taken back; Enter is pressed half a second after the last key.
Printed: for each message its words and milliseconds to the first token, then medians and 95th
percentiles, how many prompt tokens were read after Enter, the processor time of each app, and
whether the texts are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

PROMPTS = Path(__file__).parents[2] / "models" / "tiny" / "prompts.jsonl"
WAYS = {"ahead": "on", "waiting": "off"}


def keys(text: str, noise: random.Random) -> list[str]:
    """The keys of a person who errs at every 40th character and takes it back."""
    pressed: list[str] = []
    for char in text:
        if noise.random() < 1 / 40:
            wrong = [noise.choice("etaoin") for _ in range(noise.randint(1, 6))]
            pressed += [*wrong, *["BSpace"] * len(wrong)]
        pressed.append(char)
    return pressed


def messages(n: int) -> list[str]:
    """Texts of 5 to 100 words out of the shipped questions."""
    lines = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    words = " ".join(one["messages"][-1]["content"] for one in lines if one["slice"] == "rag")
    plain = [w for w in words.split() if w.isalnum() or w[:-1].isalnum()]
    lengths = [5, 60, 12, 100, 20, 80, 30, 50, 8, 70, 40, 16]
    found, at = [], 0
    for i in range(n):
        found.append(" ".join(plain[at : at + lengths[i % len(lengths)]]))
        at += lengths[i % len(lengths)]
    return found


class Reply(NamedTuple):
    """``unread``: prompt tokens that were read after Enter."""

    text: str
    first_ms: float
    unread: int


class App:
    """One app in tmux, with a home of its own."""

    def __init__(self, name: str, ahead: str, args: argparse.Namespace, folder: Path) -> None:
        self.name, self.home = f"typed-{name}-{os.getpid()}", folder / name
        command = [
            sys.executable,
            "-P",
            "-m",
            "specllama",
            "chat",
            "-m",
            args.target,
            "-d",
            args.draft,
        ]
        command += ["-t", "2", "-c", "4096", "--seed", "1", "-n", "16", "--temp", "0"]
        command += ["--read-ahead", ahead]
        where = ["-x", "120", "-y", "36", "-e", f"SPECLLAMA_HOME={self.home}"]
        self._tmux("new-session", "-d", "-s", self.name, *where, *command)

    def _tmux(self, *words: str) -> str:
        return subprocess.run(["tmux", *words], check=True, capture_output=True, text=True).stdout

    def type(self, text: str, noise: random.Random) -> None:
        for key in keys(text, noise):
            literal = [] if key == "BSpace" else ["-l"]
            self._tmux("send-keys", "-t", self.name, *literal, key)
            time.sleep(60 / noise.uniform(200, 400))
        time.sleep(0.5)
        self._tmux("send-keys", "-t", self.name, "Enter")

    def replies(self) -> list[Reply]:
        """What its own log says of each reply."""
        found = []
        for path in sorted(self.home.rglob("rounds/*.jsonl")):
            for line in path.read_text().splitlines():
                if line.startswith('{"type":"finish"') and line.endswith("}"):
                    record = json.loads(line)
                    ms, read = record["timings"]["ttft_ms"], record["prompt_n"] - record["cached_n"]
                    found.append(Reply(record["text"], ms, read))
        return found

    def answered(self, n: int) -> Reply:
        until = time.monotonic() + 120
        while len(found := self.replies()) < n:
            if time.monotonic() > until:
                raise SystemExit(self.screen())
            time.sleep(0.2)
        return found[-1]

    def processor_s(self) -> int:
        """Of the app and all that it started."""
        spent, parents = {}, {}
        told = subprocess.check_output(["ps", "-eo", "pid=,ppid=,cputimes="], text=True)
        for line in told.splitlines():
            pid, parent, seconds = map(int, line.split())
            parents[pid], spent[pid] = parent, seconds
        ours = {int(self._tmux("display-message", "-p", "-t", self.name, "#{pane_pid}"))}
        for _ in range(4):
            ours |= {pid for pid, parent in parents.items() if parent in ours}
        return sum(spent[pid] for pid in ours)

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p", "-t", self.name)

    def close(self) -> None:
        self._tmux("kill-session", "-t", self.name)


def measure(apps: dict[str, App], texts: list[str]) -> None:
    """Types each text into every app; the first one only warms them up."""
    time.sleep(30)  # both are loaded and measured
    times: dict[str, list[float]] = {name: [] for name in apps}
    unread: dict[str, int] = dict.fromkeys(apps, 0)
    equal, before = 0, {name: app.processor_s() for name, app in apps.items()}
    for i, text in enumerate(["Hello there.", *texts]):
        found = {}
        for name, app in apps.items():
            app.type(text, random.Random(i))
            found[name] = app.answered(i + 1)
            time.sleep(2)
        print(len(text.split()), *(f"{n} {r.first_ms:.0f} ms {r.unread}" for n, r in found.items()))
        if i:
            equal += len({reply.text for reply in found.values()}) == 1
            for name, reply in found.items():
                times[name].append(reply.first_ms)
                unread[name] += reply.unread
    for name, ms in times.items():
        p95 = statistics.quantiles(ms, n=20, method="inclusive")[-1]
        spent = apps[name].processor_s() - before[name]
        print(f"{name}: p50 {statistics.median(ms):.0f} ms, p95 {p95:.0f} ms, {unread[name]} read")
        print(f"  {spent} s of the processor")
    print(f"{equal} of {len(texts)} texts are equal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--messages", type=int, default=12)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        apps = {name: App(name, ahead, args, Path(folder)) for name, ahead in WAYS.items()}
        try:
            measure(apps, messages(args.messages))
        finally:
            for app in apps.values():
                app.close()


if __name__ == "__main__":
    main()

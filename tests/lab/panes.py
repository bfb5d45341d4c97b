"""Commands in a terminal of their own, a tmux pane."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

COLUMNS, ROWS = 100, 30
LIMIT_S = 120.0  # a busy machine
RECORDER = """
import json, os, sys, time
out = open(sys.argv[1], "w", encoding="utf-8")
head = {"version": 2, "width": int(sys.argv[2]), "height": int(sys.argv[3]), "title": "specllama"}
print(json.dumps(head), file=out, flush=True)
begun = time.monotonic()
while data := os.read(0, 65536):
    text = data.decode("utf-8", "replace")
    print(json.dumps([round(time.monotonic() - begun, 3), "o", text]), file=out, flush=True)
"""


class Pane:
    """A terminal of its own tmux server, in which a command runs."""

    def __init__(
        self, folder: Path, *command: str, columns: int = COLUMNS, rows: int = ROWS
    ) -> None:
        self.socket = str(folder / "tmux")
        self.size = str(columns), str(rows)
        self.tmux(
            *("-f", os.devnull, "new-session", "-d", "-s", "walk", "-x", self.size[0]),
            *("-y", self.size[1], *command),
        )

    def tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self.socket, *words],
            capture_output=True,
            text=True,
            check=True,
            env=dict(os.environ),  # not the process's own: readline puts a size of its own there
        )
        return done.stdout

    def record(self, path: Path) -> None:
        words = [sys.executable, "-c", RECORDER, str(path), *self.size]
        quoted = " ".join(f"'{word}'" for word in words)
        self.tmux("pipe-pane", "-t", "walk", "-o", quoted)

    @property
    def screen(self) -> str:
        return self.tmux("capture-pane", "-p", "-t", "walk")

    def press(self, *keys: str) -> None:
        self.tmux("send-keys", "-t", "walk", *keys)

    def until(self, true: Callable[[str], object]) -> str:
        end = time.monotonic() + LIMIT_S
        while not true(screen := self.screen):
            assert time.monotonic() < end, screen
            time.sleep(0.05)
        return screen

    def sees(self, *words: str) -> str:
        return self.until(lambda screen: all(word in screen for word in words))

    def ended(self) -> None:
        end = time.monotonic() + LIMIT_S
        while self.alive:
            assert time.monotonic() < end, "it did not leave"
            time.sleep(0.05)

    @property
    def alive(self) -> bool:
        asked = subprocess.run(
            ["tmux", "-S", self.socket, "has-session", "-t", "walk"], capture_output=True
        )
        return asked.returncode == 0

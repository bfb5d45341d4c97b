"""The app in a real pseudo-terminal: what a person's terminal sees, and what it is left with."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specllama import paths
from specllama.errors import UsageError
from specllama.tui.app import run

LIMIT_S = 120.0  # a real model on a busy machine
LEAVE = b"\x1b[?1049l"  # back from the alternate screen
MOUSE_OFF = b"\x1b[?1000l"

LAUNCH = """
import sys
sys.path[:0] = {path!r}
from specllama.tui.app import SpecllamaApp, run
from specllama.params import GenerateParams
if __name__ == "__main__":
    {patch}
    sys.exit(run({target!r}, params=GenerateParams(seed=1, max_tokens={max_tokens})))
"""
DEMO = """
    from specllama.tui import app, demo
    app.LoadEngine = lambda target, draft, options: demo.DemoFactory(speed=1.0)
"""


class Terminal:
    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self.master = process, master
        self.seen = b""

    def read(self, seconds: float = 0.05) -> None:
        ready, _, _ = select.select([self.master], [], [], seconds)
        if ready:
            try:
                self.seen += os.read(self.master, 65536)
            except OSError:
                pass

    def until(self, true: Callable[[], object]) -> None:
        end = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < end, self.words[-1500:]
            self.read()

    @property
    def words(self) -> str:
        text = self.seen.decode("utf-8", "replace")
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]", "", text)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def ended(self) -> int:
        end = time.monotonic() + LIMIT_S
        while self.process.poll() is None:
            assert time.monotonic() < end
            self.read()
        self.read(0.2)
        return self.process.returncode

    def children(self) -> list[int]:
        """Engine processes below the app (the resource tracker is not one)."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    stat = (entry / "stat").read_text()
                    command = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                fields = stat.rsplit(")", 1)[1].split()
                if int(fields[1]) == self.process.pid and b"spawn_main" in command:
                    found.append(int(entry.name))
        return found


@contextmanager
def terminal(
    tmp_path: Path, *, target: str = "demo", patch: str = DEMO, max_tokens: int = 400
) -> Iterator[Terminal]:
    script = tmp_path / "launch.py"
    script.write_text(
        LAUNCH.format(path=sys.path, target=target, patch=patch.strip(), max_tokens=max_tokens)
    )
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8"}
    process = subprocess.Popen(
        [sys.executable, str(script)], stdin=slave, stdout=slave, stderr=slave, env=env
    )
    os.close(slave)
    at = Terminal(process, master)
    try:
        yield at
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(master)


def test_not_a_terminal_is_a_clear_error() -> None:
    with pytest.raises(UsageError, match="needs a terminal"):
        run("tiny")


def test_a_chat_and_a_clean_end(tmp_path: Path) -> None:
    with terminal(tmp_path) as t:
        t.until(lambda: "demo-target" in t.words)
        t.type("Hello\r")
        t.until(lambda: "TTFT" in t.words and "seed 1" in t.words)
        t.type("\x11")
        assert t.ended() == 0
        assert LEAVE in t.seen
        assert MOUSE_OFF in t.seen
        assert t.children() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_restores_the_terminal(tmp_path: Path, number: signal.Signals) -> None:
    with terminal(tmp_path) as t:
        t.until(lambda: "demo-target" in t.words)
        t.process.send_signal(number)
        assert t.ended() == 128 + number
        assert LEAVE in t.seen
        assert MOUSE_OFF in t.seen


def test_a_crash_of_the_app_is_a_failure_and_restores_the_terminal(tmp_path: Path) -> None:
    patch = DEMO + "    SpecllamaApp.action_help = lambda self: 1 / 0\n"
    with terminal(tmp_path, patch=patch) as t:
        t.until(lambda: "demo-target" in t.words)
        t.type("\x1bOP")
        assert t.ended() != 0
        assert LEAVE in t.seen


def test_a_killed_engine_leaves_the_terminal_and_the_app_alone(tmp_path: Path) -> None:
    with terminal(tmp_path) as t:
        t.until(lambda: "demo-target" in t.words)
        t.type("question\r")
        t.until(lambda: "Speculative" in t.words)
        (child,) = t.children()
        os.kill(child, signal.SIGKILL)
        t.until(lambda: "SIGKILL" in t.words)
        before = len(t.words)
        t.type("the next\r")
        t.until(lambda: "seed 1" in t.words[before:])
        t.type("\x11")
        assert t.ended() == 0
        assert t.children() == []


@pytest.mark.e2e
def test_the_bundled_pair_answers_in_a_terminal(tmp_path: Path) -> None:
    if not (paths.bundled_dir() / "tiny-target-q4_0.gguf").is_file():
        pytest.skip("the bundled pair is not there")
    with terminal(tmp_path, target="tiny", patch="", max_tokens=24) as t:
        t.until(lambda: "tiny-target" in t.words)
        t.type("Tell me about a fox\r")
        t.until(lambda: "TTFT" in t.words and "seed 1" in t.words)
        t.type("\x1bOR")
        t.until(lambda: "Round inspector" in t.words)
        t.type("\x11")
        assert t.ended() == 0
        assert t.children() == []

"""The app in a pseudo-terminal, as a person's terminal runs it."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

LIMIT_S = 120.0  # a real model on a busy machine
ENTER = b"\x1b[?1049h"
LEAVE = b"\x1b[?1049l"  # back from the alternate screen
MOUSE_OFF = b"\x1b[?1000l"

LAUNCH = """
import sys
sys.path[:0] = {path!r}
from specllama.tui.app import SpecllamaApp, run
from specllama.settings.params import GenerateParams
if __name__ == "__main__":
    {patch}
    params = GenerateParams(seed=1, max_tokens={max_tokens})
    sys.exit(run(SpecllamaApp(target={target!r}, params=params, {more})))
"""
DEMO = """
    from demo_engine import DemoFactory
    from specllama.tui import app
    app.LoadEngine = lambda target, draft, options: DemoFactory(speed=1.0)
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
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]", "", self.seen.decode("utf-8", "replace"))

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
    tmp_path: Path,
    *,
    target: str = "demo",
    patch: str = DEMO,
    max_tokens: int = 400,
    more: str = "",
    command: Sequence[str] | None = None,
    size: tuple[int, int] = (80, 24),
) -> Iterator[Terminal]:
    """``command``, or an app of this kind: ``more`` are further arguments of ``run``."""
    script = tmp_path / "launch.py"
    words = dict(target=target, patch=patch.strip(), max_tokens=max_tokens, more=more)
    script.write_text(LAUNCH.format(path=sys.path, **words))
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8"}
    process = subprocess.Popen(
        list(command or [sys.executable, str(script)]),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=env,
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

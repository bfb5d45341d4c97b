"""Recordings of commands in a terminal, and pictures of them.

A measurement takes minutes and differs on every machine, so the pictures of ``tune`` and ``bench``
are drawn from the output of a real run, which is kept beside them:

    python -m pictures.recordings data/tune.json tune --temperature 0

runs ``specllama tune --temperature 0`` in its own terminal and keeps what it wrote to standard
output; ``pictures.screenshots`` draws every recording that it finds.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from specllama.errors import SpecllamaError, UsageError
from specllama.tui.pages import self_contained

COLUMNS = 100


@dataclass(frozen=True, slots=True)
class Recording:
    """``command`` as it was typed, and the lines that it wrote, colour codes included."""

    command: str
    columns: int
    lines: list[str]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", "utf-8")

    @staticmethod
    def load(path: Path) -> Recording:
        """Raises:
        UsageError: the file is no recording.
        """
        try:
            data = json.loads(path.read_text("utf-8"))
            return Recording(
                str(data["command"]), int(data["columns"]), [str(line) for line in data["lines"]]
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(f"{path} is no recording: {error}", "make pictures") from None


def record(arguments: list[str], columns: int = COLUMNS) -> Recording:
    """Run ``specllama`` with these arguments in a terminal with so many columns.

    Standard error is left alone, so that a progress bar is seen but not recorded.

    Raises:
        UsageError: the command failed; its own message is on standard error.
    """
    # Only where there are pseudo-terminals; drawing works everywhere.
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    # The caller's variables for width and colour must not change the picture.
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    env["TERM"] = "xterm-256color"
    command = [sys.executable, "-P", "-m", "specllama", *arguments]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, env=env) as process:
        os.close(theirs)
        written = _read_all(ours)
    os.close(ours)
    shown = shlex.join(["specllama", *arguments])
    if process.returncode != 0:
        raise UsageError(f"{shown} ended with exit code {process.returncode}")
    text = _without_places(written.decode("utf-8", "replace").replace("\r\n", "\n"))
    return Recording(_without_places(shown), columns, text.rstrip("\n").split("\n"))


def _read_all(fd: int) -> bytes:
    """Everything written to a terminal until its other end is closed."""
    chunks = []
    while True:
        try:
            chunk = os.read(fd, 65536)
        except OSError:  # how Linux reports that the other end is closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    return b"".join(chunks)


def _without_places(text: str) -> str:
    """Remove private paths: a picture is public."""
    return text.replace(f"{Path.cwd()}{os.sep}", "").replace(str(Path.home()), "~")


def picture(recording: Recording) -> str:
    """The terminal as SVG."""
    from rich.console import Console
    from rich.text import Text

    console = Console(
        record=True,
        width=recording.columns,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
    )
    console.print(Text.assemble(("$ ", "bold green"), (recording.command, "bold")))
    for line in recording.lines:
        console.print(Text.from_ansi(line), soft_wrap=False)
    return self_contained(console.export_svg(title="specllama"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pictures.recordings")
    parser.add_argument("file", type=Path, help="where to keep the recording (.json)")
    parser.add_argument("--columns", type=int, default=COLUMNS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="arguments of specllama")
    given = parser.parse_args(arguments)
    try:
        if not given.command:
            raise UsageError("which command?", "for example: recordings tune.json tune --quick")
        record(given.command, given.columns).save(given.file)
    except SpecllamaError as error:
        print(f"{error.message}" + (f"\n{error.hint}" if error.hint else ""), file=sys.stderr)
        return 1
    print(given.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())

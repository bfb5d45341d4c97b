"""Text to and from other programs: copies, pastes, the user's own editor.

Copies work over SSH and inside tmux, with a file as the last resort.

A terminal does not report when it ignores a copy request, so the means are tried from the surest to
the least sure: tmux's own buffer, the desktop's tool, then the terminal escape (OSC 52). Text that
is too long for a terminal goes to a file.

Pasted text is kept as text whatever it contains: Textual reads an ESC within a paste as the
beginning of a key, so that what follows it would be typed: the focus would move, and letters would
act. Most terminals take ESC out of what they paste; for the others ``PasteParser`` does, before
Textual reads it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from textual._xterm_parser import XTermParser
from textual.drivers import linux_driver
from textual.message import Message

from specllama import paths
from specllama.text import encodable
from specllama.tui.state import write_atomically

OSC52_BYTES = 74_000  # several terminals cut or drop longer requests
TOOL_TIMEOUT_S = 2.0


def copy(text: str, osc52: Callable[[str], None]) -> str:
    """Copy; return a message for the user."""
    size = f"{len(text):,} characters"
    for command in _tools():
        if _run(command, text):
            return f"Copied {size}"
    if len(encodable(text).encode()) * 4 // 3 <= OSC52_BYTES:
        osc52(encodable(text))
        return f"Copied {size} through the terminal"
    path = paths.data_dir() / "tui" / "copied.txt"
    if write_atomically(path, encodable(text).encode()):
        return f"Too long for the terminal's clipboard: saved in {path}"
    return "Could not copy: no clipboard, and the disk refused the file"


def _tools() -> list[list[str]]:
    env = os.environ
    out: list[list[str]] = []
    if env.get("TMUX"):
        out.append(["tmux", "load-buffer", "-w", "-"])
    elif not (env.get("SSH_CONNECTION") or env.get("SSH_TTY")):
        if sys.platform == "darwin":
            out.append(["pbcopy"])
        elif env.get("WAYLAND_DISPLAY"):
            out.append(["wl-copy"])
        elif env.get("DISPLAY"):
            out += [["xclip", "-selection", "clipboard"], ["xsel", "-ib"]]
    return [command for command in out if shutil.which(command[0])]


def _run(command: list[str], text: str) -> bool:
    try:
        done = subprocess.run(
            command,
            input=encodable(text).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TOOL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def here() -> Path | None:
    """Return the folder the app was started in, None when it is gone."""
    try:
        return Path.cwd()
    except OSError:
        return None


def export_path(title: str, suffix: str) -> Path:
    """Choose a new file name, in the folder the app was started in if it can be written."""
    folder = here()
    if folder is None or not os.access(folder, os.W_OK):
        folder = paths.data_dir() / "exports"
    words = "".join(ch if ch.isalnum() else "-" for ch in title.lower()).strip("-")
    stem = "-".join(filter(None, words.split("-")))[:60] or "conversation"
    path = folder / f"{stem}.{suffix}"
    number = 2
    while path.exists():
        path = folder / f"{stem}-{number}.{suffix}"
        number += 1
    return path


def edit(command: str, text: str) -> str:
    """Edit a text and return it; meanwhile the editor has the terminal.

    Raises:
        OSError: the command cannot be run, or its file not be read.
        ValueError: the command's quotes do not match.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompt.md"
        path.write_text(text, "utf-8", errors="replace")
        subprocess.run([*shlex.split(command), str(path)], check=False)
        return path.read_text("utf-8-sig", errors="replace")


START, END = "\x1b[200~", "\x1b[201~"


class PasteParser(XTermParser):
    """Textual's parser, with pastes that hold no ESC."""

    def __init__(self, debug: bool = False) -> None:
        super().__init__(debug)
        self._inside = False
        self._passed = ""  # the last of what was typed: a start may be cut by the end of a read
        self._held = ""  # of a paste: what may be its end

    def feed(self, data: str) -> Iterable[Message]:
        passed = self._plain(data)
        # nothing at all is the end of the input
        return super().feed(passed) if passed or not data else ()

    def _plain(self, data: str) -> str:
        out, rest, self._held = "", self._held + data, ""
        while rest:
            if not self._inside:
                window = self._passed + rest
                self._inside = START in window
                end = window.find(START) + len(START) if self._inside else len(window)
                end -= len(self._passed)
                out, self._passed, rest = out + rest[:end], window[1 - len(START) :], rest[end:]
                continue
            text, ended, rest = rest.partition(END)
            if ended:
                self._inside, self._passed = False, ""
            else:
                n = next((n for n in range(len(END) - 1, 0, -1) if text.endswith(END[:n])), 0)
                text, self._held = text[: len(text) - n], text[len(text) - n :]
            out += text.replace("\x1b", "") + ended
        return out


def install_pasting() -> None:
    """Let every app of this process read its terminal through ``PasteParser``."""
    linux_driver.XTermParser = PasteParser  # type: ignore[attr-defined]

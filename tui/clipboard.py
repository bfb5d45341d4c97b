"""Copies that work over SSH and inside tmux, with a file as the last resort.

A terminal does not report when it ignores a copy request, so the means are tried from the surest to
the least sure: tmux's own buffer, the desktop's tool, then the terminal escape (OSC 52). Text that
is too long for a terminal goes to a file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
    if write_atomically(path, text):
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


def export_path(title: str, suffix: str, folder: Path | None = None) -> Path:
    """Choose a new file name, in the folder the app was started in if it can be written."""
    folder = folder or here()
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

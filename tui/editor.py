"""The user's own editor, to write a text in."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from pathlib import Path


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
        return path.read_text("utf-8", errors="replace")

#!/usr/bin/env python3
"""Stands in for llama-server, so that llama.cpp's own tests of it can be run against specllama.

    cd LLAMA_CPP/tools/server/tests
    LLAMA_SERVER_BIN_PATH=SPECLLAMA/tests/llama_server.py pytest unit/test_basic.py ...

Their flags become ours; those that specllama has nothing for are left out. The model is the bundled
pair, or SHIM_MODEL: tests that expect words of their own model fail. Prompts are drafted for as
SHIM_PROPOSER says.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

SAME = {
    "--port": "--port",
    "--host": "--host",
    "--temp": "--temperature",
    "--seed": "--seed",
    "--alias": "--alias",
    "--ctx-size": "--ctx-size",
    "--parallel": "--parallel",
    "--n-predict": "--max-tokens",
    "--threads": "--threads",
    "--batch-size": "--batch-size",
    "--ubatch-size": "--ubatch-size",
    "--spec-draft-n-max": "--draft-max",
    "--spec-draft-n-min": "--draft-min",
    "--cors-origins": "--cors-origin",
}
ALONE = {"--swa-full": "--swa-full"}


def translated(theirs: list[str]) -> tuple[list[str], dict[str, str]]:
    """Our arguments, and variables."""
    ours = ["serve", "-m", os.environ.get("SHIM_MODEL", "tiny"), "--check-memory"]
    ours += ["--proposer", os.environ.get("SHIM_PROPOSER", "auto")]
    more: dict[str, str] = {}
    for i, flag in enumerate(theirs):
        if flag == "--cors-origins" and theirs[i + 1] == "localhost":
            continue  # that is what we do anyway
        if flag in SAME and i + 1 < len(theirs):
            ours += [SAME[flag], theirs[i + 1]]
        elif flag in ALONE:
            ours.append(ALONE[flag])
        elif flag == "--api-key":
            more["SPECLLAMA_API_KEY"] = theirs[i + 1]
    if "--parallel" not in theirs:
        ours += ["--parallel", "4"]
    return ours, more


def main() -> None:
    ours, more = translated(sys.argv[1:])
    python = Path(__file__).parent.parent / ".venv" / "bin" / "python"
    program = str(python if python.exists() else sys.executable)
    os.execve(program, [program, "-m", "specllama", *ours], {**os.environ, **more})


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Stands in for llama-server, so that llama.cpp's own tests of it can be run against specllama.

    cd LLAMA_CPP/tools/server/tests
    LLAMA_SERVER_BIN_PATH=SPECLLAMA/tests/lab/llama_server.py pytest unit/test_basic.py ...

(``llama_tests.py`` does it.) Their flags become ours; those that specllama has nothing for are left
out. The model is the bundled pair, or SHIM_MODEL: tests that expect words of their own model fail.
Prompts are drafted for as SHIM_PROPOSER says.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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
    "--spec-draft-n-max": "--draft-max",
    "--cors-origins": "--cors-origin",
    "--reasoning": "--think",
}
ALONE = {
    "--no-slots": ("--no-slots",),
    "--context-shift": ("--on-full", "shift"),
    "--spec-type": ("--proposer", "draft", "--window", "fixed"),  # theirs drafts as far as it may
}


def model_of(theirs: list[str]) -> str:
    """The model, which is copied with another chat template if they want one."""
    model = os.environ.get("SHIM_MODEL", "tiny")
    given = dict(itertools.pairwise(theirs))
    template = given.get("--chat-template", "")
    if "--chat-template-file" in given:
        template = Path(given["--chat-template-file"]).read_text("utf-8")
    if not template:
        return model
    from ggufs import with_template

    source = ROOT / "models" / "tiny" / "tiny-target-q4_0.gguf"
    name = hashlib.sha256(template.encode()).hexdigest()[:16]
    return str(with_template(source, Path(tempfile.gettempdir(), f"shim-{name}.gguf"), template))


def translated(theirs: list[str]) -> tuple[list[str], dict[str, str]]:
    """Our arguments, and variables."""
    ours = ["serve", "-m", model_of(theirs)]
    ours += ["--proposer", os.environ.get("SHIM_PROPOSER", "auto")]
    ours.append("--ignore-eos")  # their model goes on as far as it may
    more: dict[str, str] = {}
    for i, flag in enumerate(theirs):
        if flag == "--cors-origins" and theirs[i + 1] == "localhost":
            continue  # that is what we do anyway
        if flag in SAME and i + 1 < len(theirs):
            value = theirs[i + 1]
            ours += [SAME[flag], str(max(int(value), 32)) if "batch" in flag else value]
        elif flag in ALONE:
            ours += ALONE[flag]
        elif flag == "--api-key":
            more["SPECLLAMA_API_KEY"] = theirs[i + 1]
    if "--parallel" not in theirs:
        ours += ["--parallel", "4"]
    return ours, more


def main() -> None:
    python = ROOT / ".venv" / "bin" / "python"
    if python.exists() and Path(sys.prefix) != ROOT / ".venv":
        os.execv(python, [str(python), *sys.argv])
    ours, more = translated(sys.argv[1:])
    command, env = [sys.executable, "-P", "-m", "specllama", *ours], {**os.environ, **more}
    if "SHIM_KEEP" not in os.environ or "--metrics" in sys.argv:  # figures begin at nothing
        os.execve(sys.executable, command, env)
    at = ours.index("--port")
    asyncio.run(_stand_before(_kept(command, env, at + 4), int(ours[at + 1])))


def _kept(command: list[str], env: dict[str, str], at: int) -> int:
    """The port of a server that was started so before, else of a new one.

    SHIM_KEEP is a folder that remembers them; whoever named it ends them.
    """
    asked = [*command[:at], *command[at + 1 :], env.get("SPECLLAMA_API_KEY", "")]
    name = hashlib.sha256(repr(asked).encode()).hexdigest()[:16]
    file = Path(os.environ["SHIM_KEEP"], name)
    if file.exists():
        return int(file.read_text().split()[0])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command[at] = str(port)
    server = subprocess.Popen(command, env=env, start_new_session=True)
    while not _ready(port):
        if server.poll() is not None:
            sys.exit(server.returncode)
        time.sleep(0.05)
    file.write_text(f"{port} {server.pid}")
    return port


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except OSError:
        return False


async def _stand_before(port: int, here: int) -> None:
    """Pass on what comes, until this process is ended."""

    async def both(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        ways = [asyncio.ensure_future(_pass(*way)) for way in ((reader, back), (there, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        back.close()
        writer.close()

    async with await asyncio.start_server(both, "127.0.0.1", here) as server:
        await server.serve_forever()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


if __name__ == "__main__":
    main()

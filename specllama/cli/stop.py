"""``specllama stop``: the unloading of a running server's model."""

from __future__ import annotations

from pathlib import Path

import click

from specllama.cli import diagnostics
from specllama.cli.options import key_option, server_address
from specllama.cli.ps import loaded, usual
from specllama.errors import UsageError
from specllama.remote.address import checked
from specllama.text import number_of


@click.command("stop")
@click.argument("model", metavar="MODEL")
@click.option(
    "--server",
    "url",
    metavar="URL",
    default=usual,
    help="The running server.  [default: OLLAMA_HOST, else http://127.0.0.1:8484]",
)
@key_option
def command(model: str, url: str, api_key_file: Path | None) -> None:
    """Unload a model of a running server: its memory is free, and a request that names the model
    loads it again. Replies that it is writing are written to their end first."""
    server = server_address(url, key_file=api_key_file)
    there = {one["name"]: one for one in loaded(server)}
    found = there.get(model) or there.get(f"{model}:latest")
    if found is None:
        names = ", ".join(there) or "none"
        raise UsageError(f"no model {model!r} is loaded at {server.name}; loaded: {names}")
    with server.spoken(), server.client(keep=False) as http:
        asked = {"model": found["name"], "keep_alive": 0}
        checked(http.post(f"{server.url}/api/generate", json=asked))
    running = found.get("running") or 0
    later = f" once what it writes is over ({number_of(running, 'request')})" if running else ""
    diagnostics.note(f"{model} is unloaded{later}")

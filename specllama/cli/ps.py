"""``specllama ps``, ``stop`` and ``top``: a running server's models, and its work."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import click

from specllama.cli import diagnostics, output
from specllama.cli.listing import Column, context, json_option, listing, number
from specllama.cli.options import URL, key_option, server_address
from specllama.cli.output import examples
from specllama.errors import SpecllamaError, UsageError
from specllama.remote.address import Address, checked, url_of
from specllama.remote.board import LEGEND
from specllama.settings.duration import told
from specllama.text import number_of, size


def usual() -> str:
    """Return the server that is asked unless one is named: Ollama's, where its variable says so."""
    host = os.environ.get("OLLAMA_HOST", "")
    return url_of(host, port=11434) if host else URL


def loaded(server: Address) -> list[dict[str, Any]]:
    """List the models that a server has loaded, in Ollama's words.

    Raises:
        SpecllamaError: no server answers, or it does not let us in.
    """
    with server.spoken(), server.client(30.0, keep=False) as http:
        models: list[dict[str, Any]] = checked(http.get(f"{server.url}/api/ps")).json()["models"]
        return models


def _left(model: Mapping[str, Any]) -> str:
    """Show how long it stays."""
    if "keep_alive_seconds" in model and model["keep_alive_seconds"] is None:
        return "never"
    if model.get("running"):
        return "in use"
    ends = datetime.fromisoformat(str(model["expires_at"]))
    return told((ends - datetime.now(UTC)).total_seconds())


def _idle(model: Mapping[str, Any]) -> str:
    return told(model["idle_seconds"]) if "idle_seconds" in model else ""


@click.command("ps", epilog=examples()["ps"])
@click.argument("url", default=usual)
@key_option
@json_option
def command(url: str, api_key_file: Path | None, as_json: bool) -> None:
    """List the models that a running server has loaded, and what `train-draft` does now."""
    from specllama.training.training_folder import running

    trainings = [*running()]
    for one in trainings:
        minutes = f"{one.spent_s / 60:.0f} min so far"
        diagnostics.note(f"train-draft {one.target}: {one.doing}; {minutes}")
    try:
        models = loaded(server_address(url, key_file=api_key_file))
    except SpecllamaError:
        if trainings and not as_json:
            return
        raise
    columns = [
        Column("model", "name"),
        Column("draft", lambda one: one.get("draft_model") or ""),
        number("memory at most", lambda one: size(one.get("size") or 0)),
        number("context", lambda one: context(one.get("context_length") or 0)),
        number("writing", lambda one: one.get("running", "")),
        number("idle for", _idle),
        Column("unloaded in", _left),
    ]
    listing(as_json, "models", models, columns, empty="no model is loaded")
    for model in [] if as_json else models:
        if idle := model.get("idle_bytes"):
            said = f"{size(idle)} of it at most for texts of idle conversations (kv-ram)"
            diagnostics.note(f"{model['name']}: {said}")


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
def stop(model: str, url: str, api_key_file: Path | None) -> None:
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


_DRAW_S = 0.1
_DRAWN = ("figures", "counters")  # at once, for they come every second

TOP_EPILOG = """\b
Examples:
  specllama top                         the server at http://127.0.0.1:8484
  specllama top http://box:8484 --json  its rounds as they come
  specllama top http://box:8000         another engine, by its counters
  specllama top https://box.example --api-key-file key
"""


@click.command(
    "top",
    help="Show what a running server is doing: one of ours request by request, another engine by "
    f"its counters.\n{LEGEND}\nCtrl-C ends it.",
    epilog=TOP_EPILOG,
)
@click.argument("url", default=URL)
@key_option
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the events as they come, one JSON object per line.",
)
def top(url: str, api_key_file: Path | None, as_json: bool) -> int:
    from specllama.remote.remote_engine import watched

    shown, drawn, live = 0, 0.0, output.is_terminal()
    board, events = watched(server_address(url, key_file=api_key_file))
    for event in events:
        if as_json:
            output.json_line(event)
            continue
        board.take(event)
        if not live:
            if event.get("type") in ("finish", "counters"):
                output.line(board.lines(200)[0])
            continue
        if monotonic() < drawn + _DRAW_S and event.get("type") not in _DRAWN:
            continue
        drawn = monotonic()
        size = shutil.get_terminal_size()  # 80 by 24 where it is not known
        lines = board.lines(size.columns - 1, size.lines - 1)
        up = f"\x1b[{shown}F" if shown else ""
        output.write_styled(up + "".join(f"\x1b[2K{line}\n" for line in lines) + "\x1b[J")
        shown = len(lines)
    return diagnostics.Exit.OK

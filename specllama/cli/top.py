"""``specllama top``: a server's work, as a table that stays in place."""

from __future__ import annotations

import shutil
from pathlib import Path
from time import monotonic

import click

from specllama.cli import diagnostics, output
from specllama.cli.options import URL, key_option, server_address
from specllama.remote.board import LEGEND

_DRAW_S = 0.1
_DRAWN = ("figures", "counters")  # at once, for they come every second

EPILOG = """\b
Examples:
  specllama top                            the server at http://127.0.0.1:8484
  specllama top http://box:8484 --json     its rounds as they come
  specllama top http://box:8000            another engine, by its counters: acceptance of late,
                                           by depth and over time, requests, queue
  specllama top https://box.example --api-key-file key
"""


@click.command(
    "top",
    help="Show what a running server is doing: one of ours request by request, another engine by "
    f"its counters.\n{LEGEND}\nCtrl-C ends it.",
    epilog=EPILOG,
)
@click.argument("url", default=URL)
@key_option
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the events as they come, one JSON object per line.",
)
def command(url: str, api_key_file: Path | None, as_json: bool) -> int:
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
                output.line(board.lines(200)[0].text)
            continue
        if monotonic() < drawn + _DRAW_S and event.get("type") not in _DRAWN:
            continue
        drawn = monotonic()
        size = shutil.get_terminal_size()  # 80 by 24 where it is not known
        lines = board.lines(size.columns - 1, size.lines - 1)
        up = f"\x1b[{shown}F" if shown else ""
        output.write_styled(up + "".join(f"\x1b[2K{line.text}\n" for line in lines) + "\x1b[J")
        shown = len(lines)
    return diagnostics.Exit.OK

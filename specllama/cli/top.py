"""``specllama top``: what a server's lanes are doing, as a table that stays in place."""

from __future__ import annotations

import shutil
from time import monotonic

import click

from specllama.cli import diagnostics, output
from specllama.cli.options import server_address
from specllama.remote.board import LEGEND, Board

URL = "http://127.0.0.1:8484"
_DRAW_S = 0.1

EPILOG = """\b
Examples:
  specllama top                            the server at http://127.0.0.1:8484
  specllama top http://box:8484 --json     its rounds as they come
  SPECLLAMA_API_KEY=... specllama top https://box.example
"""


@click.command(
    "top",
    help=f"Show what a running server is doing, request by request.\n{LEGEND}\nCtrl-C ends it.",
    epilog=EPILOG,
)
@click.argument("url", default=URL)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the events as they come, one JSON object per line.",
)
def command(url: str, as_json: bool) -> int:
    board, shown = Board(), 0
    live = output.is_terminal()
    drawn = 0.0
    for event in server_address(url).events():
        if as_json:
            output.json_line(event)
            continue
        board.take(event)
        if not live:
            if event.get("type") == "finish":
                output.line(board.lines(200)[0].text)
            continue
        if monotonic() < drawn + _DRAW_S and event.get("type") != "figures":
            continue
        drawn = monotonic()
        size = shutil.get_terminal_size()  # 80 by 24 where it is not known
        lines = board.lines(size.columns - 1, size.lines - 1)
        up = f"\x1b[{shown}F" if shown else ""
        output.write_styled(up + "".join(f"\x1b[2K{line.text}\n" for line in lines) + "\x1b[J")
        shown = len(lines)
    return diagnostics.Exit.OK

"""``specllama top``: what a server's lanes are doing, as a table that stays in place."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import click

from specllama.cli import diagnostics, output
from specllama.errors import SpecllamaError, UsageError
from specllama.text import sanitize_line

URL = "http://127.0.0.1:8484"


@dataclass(slots=True)
class Lane:
    """One conversation, as far as its rounds were seen."""

    proposer: str = ""
    slice: str = ""
    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    rows: int = 0  # of the last round
    why: str = ""
    over: bool = False


@dataclass(slots=True)
class Board:
    """What is known of a server from its events."""

    model: str = ""
    lanes: int = 0
    running: int = 0
    waiting: int = 0
    seen: dict[int, Lane] = field(default_factory=dict)

    def take(self, event: dict[str, Any]) -> None:
        """One event of ``/specllama/events``."""
        kind = event.get("type")
        if kind == "hello":
            self.model, self.lanes = str(event.get("model")), int(event.get("lanes", 0))
            return
        self.running, self.waiting = int(event.get("running", 0)), int(event.get("waiting", 0))
        lane = self.seen.setdefault(int(event.get("lane", 0)), Lane())
        lane.slice = str(event.get("slice", ""))
        if kind == "started":
            lane.proposer = str(event.get("proposer"))
        elif kind == "round_done":
            drafted = int(event.get("drafted_n", len(event.get("drafted", ()))))
            lane.rounds += 1
            lane.tokens += int(event.get("emitted_n", len(event.get("emitted", ()))))
            lane.drafted += drafted
            lane.accepted += int(event.get("accepted", 0))
            lane.rows, lane.why = drafted + 1, str(event.get("window_reason", ""))
        elif kind == "over":
            lane.over = True
        while len(self.seen) > max(self.lanes, 8):
            gone = next((id for id, one in self.seen.items() if one.over), next(iter(self.seen)))
            del self.seen[gone]

    def lines(self, width: int) -> list[str]:
        head = f"{self.model}: {self.running} of {self.lanes} lanes, {self.waiting} waiting"
        rows = [head, "lane  method     tokens  drafted  accepted  rows  why"]
        for id, lane in self.seen.items():
            rate = f"{lane.accepted / lane.drafted:.0%}" if lane.drafted else "–"
            mark = " " if not lane.over else "·"
            rows.append(
                f"{id:>4}{mark} {lane.proposer:<9} {lane.tokens:>7} {lane.drafted:>8} {rate:>9} "
                f"{lane.rows:>5}  {lane.why}"
            )
        return [sanitize_line(row)[:width] for row in rows]


@click.command("top")
@click.argument("url", default=URL)
@click.option("--json", "as_json", is_flag=True, help="The events as they come, a line each.")
def command(url: str, as_json: bool) -> int:
    """Watch the lanes of a server that runs at URL."""
    board, shown = Board(), 0
    live = sys.stdout.isatty()
    for event in _events(url):
        if as_json:
            output.json_line(event)
            continue
        board.take(event)
        if not live:
            if event.get("type") == "finish":
                output.line(board.lines(200)[0])
            continue
        lines = board.lines(os.get_terminal_size().columns - 1)
        sys.stdout.write(f"\x1b[{shown}F" * bool(shown) + "".join(f"\x1b[2K{x}\n" for x in lines))
        sys.stdout.write("\x1b[J")
        sys.stdout.flush()
        shown = len(lines)
    return diagnostics.Exit.OK


def _events(url: str) -> Iterator[dict[str, Any]]:
    """Raises SpecllamaError where nobody answers."""
    import httpx2

    from specllama.cli.loading import KEY_VARIABLE

    key = os.environ.get(KEY_VARIABLE, "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with (
            httpx2.Client(timeout=httpx2.Timeout(10, read=30)) as client,
            client.stream("GET", f"{url.rstrip('/')}/specllama/events", headers=headers) as answer,
        ):
            if answer.status_code != 200:
                raise SpecllamaError(f"{url} answers {answer.status_code}", "is it a specllama?")
            yield from events_of(answer.iter_lines())
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol):
        raise UsageError(f"{url!r} is no address", f"for example {URL}") from None
    except httpx2.HTTPError as error:
        raise SpecllamaError(
            f"no server answers at {url}: {error}", "start one with: specllama serve"
        ) from None


def events_of(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON of a stream of server-sent events."""
    for line in lines:
        if line.startswith("data: {"):
            found: dict[str, Any] = json.loads(line[6:])
            yield found

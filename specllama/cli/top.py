"""``specllama top``: what a server's lanes are doing, as a table that stays in place."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import click

from specllama.cli import diagnostics, output
from specllama.errors import SpecllamaError, UsageError
from specllama.text import sanitize_line

URL = "http://127.0.0.1:8484"
_LATELY_S = 5.0
_DRAW_S = 0.1


@dataclass(slots=True)
class Lane:
    """One conversation, as far as its rounds were seen."""

    proposer: str = ""
    slice: str = ""
    tokens: int = 0
    seconds: float = 0.0  # since its request came
    drafted: int = 0
    accepted: int = 0
    rows: int = 0  # of the last round
    why: str = ""
    over: bool = False

    def line(self, id: int) -> str:
        rate = f"{self.accepted / self.drafted:.0%}" if self.drafted else "-"
        speed = f"{self.tokens / self.seconds:.1f}" if self.seconds else "-"
        state = "done" if self.over else "live"
        name = f"{self.proposer} {self.slice}".strip()
        return (
            f"{id:>5}  {state}  {name:<14} {self.tokens:>7} {speed:>7} {rate:>9} {self.rows:>5}  "
            f"{self.why}"
        )


@dataclass(slots=True)
class Board:
    """What is known of a server from its events."""

    model: str = ""
    lanes: int = 0
    running: int = 0
    waiting: int = 0
    seen: dict[int, Lane] = field(default_factory=dict)
    _figures: dict[str, Any] = field(default_factory=dict)
    _passes: str = ""
    _written: deque[tuple[float, int]] = field(default_factory=deque)  # when, and how many tokens

    def take(self, event: dict[str, Any]) -> None:
        """One event of ``/specllama/events``."""
        kind = event.get("type")
        if kind == "hello":
            self.model, self.lanes = str(event.get("model")), int(event.get("lanes", 0))
            return
        self.running, self.waiting = int(event.get("running", 0)), int(event.get("waiting", 0))
        if kind == "figures":
            self._figure(event)
            return
        lane = self.seen.setdefault(int(event.get("lane", 0)), Lane())
        lane.slice = str(event.get("slice", ""))
        if kind == "started":
            lane.proposer = str(event.get("proposer"))
        elif kind == "round_done":
            drafted = int(event.get("drafted_n", len(event.get("drafted", ()))))
            emitted = int(event.get("emitted_n", len(event.get("emitted", ()))))
            lane.tokens += emitted
            lane.seconds = float(event.get("t_s", 0.0))
            lane.drafted += drafted
            lane.accepted += int(event.get("accepted", 0))
            lane.rows, lane.why = drafted + 1, str(event.get("window_reason", ""))
            self._written.append((monotonic(), emitted))
        elif kind == "over":
            lane.over = True
        while len(self.seen) > max(self.lanes, 8):
            gone = next((id for id, one in self.seen.items() if one.over), next(iter(self.seen)))
            del self.seen[gone]

    def _figure(self, told: dict[str, Any]) -> None:
        before, self._figures = self._figures, told
        if not before or "passes" not in told or "passes" not in before:
            return
        passes, rows, seconds = (
            told[name] - before[name] for name in ("passes", "pass_rows", "pass_seconds")
        )
        self._passes = (
            f"{rows / passes:.1f} rows and {seconds / passes * 1e3:.0f} ms a pass" if passes > 0
            else ""
        )  # fmt: skip

    @property
    def speed(self) -> float:
        """Tokens per second of late, of all together."""
        now = monotonic()
        while self._written and self._written[0][0] < now - _LATELY_S:
            self._written.popleft()
        return sum(n for _, n in self._written) / _LATELY_S

    def lines(self, width: int, height: int = 100) -> list[str]:
        head = [f"{self.model}: {self.running} of {self.lanes} lanes", f"{self.waiting} waiting",
                f"{self.speed:.0f} tok/s", *filter(None, [self._passes])]  # fmt: skip
        rows = [", ".join(head)]
        if "live" in (told := self._figures):
            cells = told["live"] + told["dead"] + told["free"]
            rows.append(
                f"context: {told['live']} of {cells} cells, {told['dead']} dead, "
                f"{told['parked_bytes'] / 1e6:.0f} MB parked, {told['preemptions']} preempted"
            )
        rows += ["", "   id  state method          tokens   tok/s  accepted  rows  why so many"]
        rows += [lane.line(id) for id, lane in self.seen.items()]
        if not self.seen:
            rows.append("nobody has asked since this began")
        shown = [sanitize_line(row) for row in rows[:height]]
        return [row if len(row) <= width else f"{row[: width - 3]}..." for row in shown]


EPILOG = """\b
Examples:
  specllama top                            the server at http://127.0.0.1:8484
  specllama top http://box:8484 --json     its rounds as they come
  SPECLLAMA_API_KEY=... specllama top https://box.example
"""


@click.command("top", epilog=EPILOG)
@click.argument("url", default=URL)
@click.option("--json", "as_json", is_flag=True, help="The events as they come, a line each.")
def command(url: str, as_json: bool) -> int:
    """Watch the lanes of a server that runs at URL.

    A lane writes one reply. "rows" are what it had in its last pass: the next token and the guesses
    that were checked with it; "why so many" is how that was decided. Dead cells are cleared when
    their room is needed; parked texts are idle ones, kept in memory; who is preempted waits for
    cells and goes on. Ctrl-C ends it.
    """
    board, shown = Board(), 0
    live = output.is_terminal()
    drawn = 0.0
    for event in _events(url):
        if as_json:
            output.json_line(event)
            continue
        board.take(event)
        if not live:
            if event.get("type") == "finish":
                output.line(board.lines(200)[0])
            continue
        if monotonic() < drawn + _DRAW_S and event.get("type") != "figures":
            continue
        drawn = monotonic()
        size = os.get_terminal_size()
        lines = board.lines(size.columns - 1, size.lines - 1)
        up = f"\x1b[{shown}F" if shown else ""
        output.write_styled(up + "".join(f"\x1b[2K{line}\n" for line in lines) + "\x1b[J")
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

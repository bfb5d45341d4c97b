"""Views of a server: our lanes and their work, or the counters of another engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any, Protocol

from specllama.rates import Kept, share
from specllama.remote.answers import Counters
from specllama.text import figure, sanitize_line, size

LEGEND = """
A lane writes one reply. "rows" counts the rows of its last pass: the next token and the guesses
checked with it. "why so many" gives the reason for that count. "balance" is what drafting may still
lose, in plain steps. Old cells are cleared when new text needs them; an idle text stays in memory
until its conversation continues; a preempted request waits for cells, then continues.

Another engine tells sums over all of its requests. "of late" is the last 30 seconds. A guess is
kept where the target writes that very token; vLLM counts those behind the end of a reply, too. "–"
stands for what it does not tell.
"""
EVERY_S = 1.0
_RECENT_S = 30.0
_KEPT = 60  # looks that are remembered
_LATELY_S = 5.0
# columns in front of the reason, their cells (left of negative ones), and the width they need
_COLUMNS = (
    ("lane", 4, 0), ("method", -12, 0), ("tokens", 6, 72), ("tok/s", 6, 66), ("kept", 5, 0),
    ("rows", 4, 0), ("balance", 7, 84),
)  # fmt: skip
_LEAST = 8  # lanes that are kept, however few the server has


@dataclass(slots=True)
class WatchedLane(Kept):
    """One conversation, as far as its rounds were seen."""

    proposer: str = ""
    slice: str = ""
    tokens: int = 0
    seconds: float = 0.0  # since its request came
    drafted: int = 0
    accepted: int = 0
    rows: int = 0  # of the last round
    balance: float | None = None
    why: str = ""
    over: bool = False

    def cells(self, id: int) -> tuple[str, ...]:
        """Return the cell of each column, and then the reason."""
        return (
            str(id),
            f"{self.proposer} {self.slice}".strip(),
            str(self.tokens),
            figure(share(self.tokens, self.seconds), ".1f", unknown="-"),
            figure(self.acceptance_rate, ".0%", unknown="-"),
            "-" if self.over else str(self.rows),
            figure(self.balance, ".1f", unknown="-"),
            "done" if self.over else self.why,
        )


class ServerWatch(Protocol):
    """A view of a server, from its events."""

    def take(self, event: dict[str, Any]) -> None:
        """Take in one event."""

    def _lines(self, width: int) -> Iterator[str]:
        """Yield the view."""

    def lines(self, width: int, height: int = 100) -> list[str]:
        """Return the view, cleaned and fitted to the width and height of a terminal."""
        return [
            text if len(text) <= width else f"{text[: width - 3]}..."
            for text in map(sanitize_line, self._lines(width))
        ][:height]


@dataclass(slots=True)
class Board(ServerWatch):
    """A server's state, as its events show it."""

    model: str = ""
    lanes: int = 0
    running: int = 0
    waiting: int = 0
    seen: dict[int, WatchedLane] = field(default_factory=dict)
    _figures: dict[str, Any] = field(default_factory=dict)
    _passes: str = ""
    _written: deque[tuple[float, int]] = field(default_factory=deque)  # when, and how many tokens

    def take(self, event: dict[str, Any]) -> None:
        """Take in one event of ``/specllama/events``."""
        kind = event.get("type")
        if kind == "hello":
            self.model, self.lanes = str(event.get("model")), int(event.get("lanes", 0))
            self.seen.clear()
            return
        self.running, self.waiting = int(event.get("running", 0)), int(event.get("waiting", 0))
        if kind == "figures":
            self._figure(event)
            return
        lane = self.seen.setdefault(int(event.get("lane", 0)), WatchedLane())
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
            lane.balance = event.get("balance")
            self._written.append((monotonic(), emitted))
        elif kind == "over":
            lane.over = True
        while len(self.seen) > max(self.lanes, _LEAST):
            gone = next((id for id, one in self.seen.items() if one.over), next(iter(self.seen)))
            del self.seen[gone]

    def _figure(self, told: dict[str, Any]) -> None:
        before, self._figures = self._figures, told
        if not before or "passes" not in told or "passes" not in before:
            return
        passes, rows, seconds = (
            told[name] - before[name] for name in ("passes", "pass_rows", "pass_seconds")
        )
        each, took = share(rows, passes), share(seconds * 1e3, passes)
        self._passes = "" if passes <= 0 else f"{each:.1f} rows and {took:.0f} ms a pass"

    @property
    def speed(self) -> float:
        """The latest speed of all lanes together, in tokens per second."""
        now = monotonic()
        while self._written and self._written[0][0] < now - _LATELY_S:
            self._written.popleft()
        return sum(n for _, n in self._written) / _LATELY_S

    def _lines(self, width: int) -> Iterator[str]:
        head = [f"{self.model}: {self.running} of {self.lanes} lanes", f"{self.waiting} waiting",
                f"{self.speed:.0f} tok/s", *filter(None, [self._passes])]  # fmt: skip
        yield ", ".join(head)
        if "live" in (told := self._figures):
            cells = told["live"] + told["dead"] + told["free"]
            yield (
                f"context: {told['live']} of {cells} cells in use, {told['dead']} old, "
                f"{size(told['parked_bytes'])} of idle texts, "
                f"{told['preemptions']} made to wait"
            )
        yield ""
        titles = [name for name, _, _ in _COLUMNS]
        yield _row((*titles, "why so many"), width)
        for id, lane in self.seen.items():
            yield _row(lane.cells(id), width)
        if not self.seen:
            yield "no request since this began"


def _row(cells: tuple[str, ...], width: int) -> str:
    """Join the columns that fit ``width``, and then the reason."""
    shown = [
        f"{cell:>{size}}" if size > 0 else f"{cell[:-size]:<{-size}}"
        for cell, (_, size, needs) in zip(cells, _COLUMNS, strict=False)
        if width >= needs
    ]
    return "  ".join([*shown, cells[-1]])


def event_of(name: str, model: str, told: Counters) -> dict[str, Any]:
    """Make an event of one reading, for ``take`` and for ``top --json``."""
    return {"type": "counters", "engine": name, "model": model, **asdict(told)}


@dataclass(slots=True)
class Gauges(ServerWatch):
    """The remembered readings of one server's counters."""

    title: str
    _looks: deque[tuple[float, Counters]] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def take(self, event: dict[str, Any]) -> None:
        """Take in one reading."""
        known = {name: event[name] for name in Counters.__dataclass_fields__ if name in event}
        known["accepted_at"] = tuple(known.get("accepted_at", ()))
        self._looks.append((monotonic(), Counters(**known)))

    def _lines(self, width: int) -> Iterator[str]:
        if not self._looks:
            yield f"{self.title}: not heard of yet"
            return
        at, now = self._looks[-1]
        then_at, then = next(look for look in self._looks if look[0] >= at - _RECENT_S)
        late = now.grown(then)
        head = f"{figure(now.running)} running, {figure(now.waiting)} waiting"
        if (speed := share(late.generated, at - then_at)) is not None:
            head += f", {speed:.0f} tok/s"
        whole = f"{self.title}: {head}"
        yield from [whole] if len(whole) <= width else [self.title, head]
        lately = _kept(late)
        if late.per_draft is not None:
            lately += f", {late.per_draft:.2f} tokens a pass that drafted"
        elif now.per_round is not None:
            lately = f"{now.per_round:.2f} tokens a pass"
        elif now.drafted is None:
            lately = "no drafting is counted: this server does not speculate, or does not tell"
        yield f"of late: {lately}"
        yield f"since it was started: {_kept(now)}"


def _kept(counts: Counters) -> str:
    if counts.rejected is None:
        return "kept –"
    kept = counts.acceptance_rate
    if kept is None:
        return "no guesses"
    return f"kept {kept:.0%} ({counts.accepted} of {counts.drafted})"

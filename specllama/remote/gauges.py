"""Gauges of another engine: its counters, read every second, as a table and over time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from time import monotonic
from typing import Any

from specllama.remote.board import BoardLine, fitted
from specllama.remote.figures import Counters

LEGEND = """
Another engine tells sums over all of its requests. "of late" is the last 30 seconds. A guess is
kept where the target writes that very token; vLLM counts those behind the end of a reply, too. "–"
stands for what it does not tell.
"""
EVERY_S = 1.0
LATELY_S = 30.0
_KEPT = 600  # looks that are remembered
_STEPS = " ▁▂▃▄▅▆▇█"
_NAME, _DEPTHS = 9, 8


def event_of(name: str, model: str, told: Counters) -> dict[str, Any]:
    """Make an event of one reading, for ``take`` and for ``top --json``."""
    return {"type": "counters", "engine": name, "model": model, **asdict(told)}


@dataclass(slots=True)
class Gauges:
    """The remembered readings of one server's counters."""

    title: str
    _looks: deque[tuple[float, Counters]] = field(default_factory=lambda: deque(maxlen=_KEPT))

    @property
    def legend(self) -> str:
        return LEGEND

    def take(self, event: dict[str, Any]) -> None:
        """Take in one reading."""
        known = {name: event[name] for name in Counters.__dataclass_fields__ if name in event}
        known["accepted_at"] = tuple(known.get("accepted_at", ()))
        self._looks.append((monotonic(), Counters(**known)))

    def lines(self, width: int, height: int = 100) -> list[BoardLine]:
        """Return the view, fitted to the width and height of a terminal."""
        return fitted(self._lines(width), width)[:height]

    def _lines(self, width: int) -> Iterator[BoardLine]:
        if not self._looks:
            yield BoardLine(f"{self.title}: not heard of yet", "over")
            return
        at, now = self._looks[-1]
        then_at, then = next(look for look in self._looks if look[0] >= at - LATELY_S)
        speed = _grown(then.generated, now.generated)
        head = f"{_shown(now.running)} running, {_shown(now.waiting)} waiting"
        if speed is not None and at > then_at:
            head += f", {speed / (at - then_at):.0f} tok/s"
        whole = f"{self.title}: {head}"
        for text in [whole] if len(whole) <= width else [self.title, head]:
            yield BoardLine(text, "head")
        drafted, accepted = (_grown(getattr(then, name), getattr(now, name))
                             for name in ("drafted", "accepted"))  # fmt: skip
        passes = _grown(then.drafts, now.drafts)
        lately = _kept(accepted, drafted)
        if passes and accepted is not None:
            lately += f", {1 + accepted / passes:.2f} tokens a pass that drafted"
        elif now.per_round is not None:
            lately = f"{now.per_round:.2f} tokens a pass"
        elif now.drafted is None:
            lately = "no drafting is counted: this server does not speculate, or does not tell"
        yield BoardLine(f"of late: {lately}", "head")
        yield BoardLine(f"since it was started: {_kept(now.accepted, now.drafted)}", "head")
        yield BoardLine("", "head")
        yield from self._by_depth(then, now, passes, width)
        yield from self._over_time(width)

    def _by_depth(
        self, then: Counters, now: Counters, passes: int | None, width: int
    ) -> Iterator[BoardLine]:
        """Yield the kept share of guesses at each depth: the latest, or if there are none, since
        the start."""
        at = tuple(_grown(then.accepted_at[i] if i < len(then.accepted_at) else 0, n) or 0
                   for i, n in enumerate(now.accepted_at))  # fmt: skip
        when = "of late"
        if not passes:
            at, passes, when = now.accepted_at, now.drafts, "since it was started"
        if not at or not passes:
            return
        yield BoardLine(f"kept by depth, {when}, of {passes} drafts", "columns")
        room = max(min(width - _NAME - 7, 60), 4)
        for depth, n in enumerate(at[:_DEPTHS], 1):
            share = min(n / passes, 1.0)
            bar = "█" * round(share * room)
            yield BoardLine(f"{f'guess {depth}':<{_NAME}}{bar:<{room}} {share:>5.0%}", "live")
        yield BoardLine("", "head")

    def _over_time(self, width: int) -> Iterator[BoardLine]:
        looks = list(self._looks)[-max(width - _NAME - 12, 4) - 1 :]
        if len(looks) < 2:
            return
        pairs = list(pairwise(looks))
        kept = [_share(_grown(a.accepted, b.accepted), _grown(a.drafted, b.drafted))
                for (_, a), (_, b) in pairs]  # fmt: skip
        speeds = [_share(_grown(a.generated, b.generated), bt - at) for (at, a), (bt, b) in pairs]
        running, waiting = (
            [getattr(now, name) for _, (_, now) in pairs] for name in ("running", "waiting")
        )
        rows = (
            ("kept", kept, 1.0, "{:.0%}"),
            ("tok/s", speeds, 0.0, "{:.0f}"),
            ("running", running, 0.0, "{:.0f}"),
            ("waiting", waiting, 0.0, "{:.0f}"),
        )
        shown = []
        for name, values, most, form in rows:
            known = [value for value in values if value is not None]
            if top := max([most, *known]) if known else 0.0:
                shown.append(f"{name:<{_NAME}}{_spark(values, top)} up to {form.format(top)}")
        if shown:
            yield BoardLine(f"the last {looks[-1][0] - looks[0][0]:.0f} seconds", "columns")
        for text in shown:
            yield BoardLine(text, "live")


def _grown(before: int | None, now: int | None) -> int | None:
    """Return the increase; None if it is not counted, or the server was restarted."""
    return None if now is None or now < (before or 0) else now - (before or 0)


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _kept(accepted: int | None, drafted: int | None) -> str:
    if accepted is None or drafted is None:
        return "kept –"
    return f"kept {accepted / drafted:.0%} ({accepted} of {drafted})" if drafted else "no guesses"


def _shown(count: int | None) -> str:
    return "–" if count is None else str(count)


def _spark(values: Sequence[float | None], top: float) -> str:
    return "".join(
        " " if value is None else _STEPS[min(max(round(8 * value / top), 1 if value else 0), 8)]
        for value in values
    )

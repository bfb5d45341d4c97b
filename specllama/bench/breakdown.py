"""Where the time of replies went, by kind of round, and what each kind gained over plain steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from specllama.verdict import TimedRound

PLAIN = "plain"  # rounds that sent nothing; their drafting found nothing
READING = "reading"  # the draft model reading a text: its backlog, and one guess
ALL = "all"
_ENOUGH = 16  # passes whose mean is a plain step
_BACKLOG = 8  # tokens; a shorter backlog is left over from earlier rounds, not a text


@dataclass(slots=True)
class RoundKind:
    """Rounds of one kind: ``PLAIN``, or the source of what they sent. Seconds."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    draft_s: float = 0.0
    pass_s: float = 0.0  # the target's pass and our own share

    def add(self, other: RoundKind) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


Parts = dict[str, RoundKind]


Timeline = tuple[tuple[int, float], ...]
"""(tokens so far, seconds so far) after every round."""


def parts_of(rounds: Iterable[TimedRound]) -> Parts:
    """Gather rounds by kind.

    Reading a text into the draft model counts apart, in whichever round it happens: it is paid
    once, and later rounds profit.
    """
    parts: Parts = {}
    for r in rounds:
        kind = r.source if r.drafted else PLAIN
        reads = r.read > _BACKLOG
        mine = RoundKind(
            rounds=1,
            drafted=r.drafted,
            accepted=r.accepted,
            tokens=r.tokens,
            draft_s=0.0 if reads else r.draft_ms / 1e3,
            pass_s=r.pass_ms / 1e3,
        )
        parts.setdefault(kind, RoundKind()).add(mine)
        if reads:
            parts.setdefault(READING, RoundKind()).add(
                RoundKind(rounds=1, draft_s=r.draft_ms / 1e3)
            )
    return parts


@dataclass(frozen=True, slots=True)
class BreakdownRow:
    """A kind of round; ``drafting``, ``passes`` and ``gained`` in plain steps.

    ``gained = tokens - drafting - passes``: plain decoding writes one token a step. ``share`` is
    of the whole time.
    """

    kind: str
    rounds: int
    drafted: int
    accepted: int
    tokens: int
    drafting: float
    passes: float
    share: float

    @property
    def gained(self) -> float:
        return self.tokens - self.drafting - self.passes

    def to_dict(self) -> dict[str, object]:
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**data, "gained": self.gained}


def breakdown(parts: Parts, plain_s: float) -> list[BreakdownRow]:
    """Rows by kind, plain steps first, the sum last; ``plain_s`` is the time of a plain step."""
    seconds = sum(part.draft_s + part.pass_s for part in parts.values())
    if seconds <= 0 or plain_s <= 0:
        return []

    def row(kind: str, part: RoundKind) -> BreakdownRow:
        return BreakdownRow(
            kind,
            part.rounds,
            part.drafted,
            part.accepted,
            part.tokens,
            part.draft_s / plain_s,
            part.pass_s / plain_s,
            (part.draft_s + part.pass_s) / seconds,
        )

    first = (PLAIN, READING)
    kinds = [kind for kind in first if kind in parts]
    kinds += sorted(kind for kind in parts if kind not in first)
    whole = RoundKind()
    for part in parts.values():
        whole.add(part)
    whole.rounds -= parts[READING].rounds if READING in parts else 0  # counted as what they sent
    return [*(row(kind, parts[kind]) for kind in kinds), row(ALL, whole)]


def plain_step(parts: Parts) -> float | None:
    """Mean seconds of a pass that verified nothing, None if there were too few."""
    plain = parts.get(PLAIN)
    return plain.pass_s / plain.rounds if plain and plain.rounds >= _ENOUGH else None


def what_drafting_took(rounds: Sequence[TimedRound]) -> tuple[float | None, Timeline]:
    """(seconds of a plain pass, the timeline at that pace) of one run.

    On a busy machine, passes differ by more than drafting may cost. So every pass that verified
    nothing counts as their mean; drafting and the passes that verified something count as they
    were. (None, ()) if hardly any pass was plain.
    """
    mean_s = plain_step(parts_of(rounds))
    if mean_s is None:
        return None, ()
    points = [(0, 0.0)]
    for one in rounds:
        tokens, seconds = points[-1]
        pass_s = one.pass_ms / 1e3 if one.drafted else mean_s
        points.append((tokens + one.tokens, seconds + one.draft_ms / 1e3 + pass_s))
    return mean_s, tuple(points)


COLUMNS: dict[str, Callable[[BreakdownRow], str]] = {
    "rounds of": lambda row: row.kind,
    "rounds": lambda row: str(row.rounds),
    "drafted": lambda row: _judged(row, str(row.drafted)),
    "accepted": lambda row: _judged(row, str(row.accepted)),
    "tokens": lambda row: _judged(row, str(row.tokens)),
    "drafting": lambda row: f"{row.drafting:.1f}",
    "passes": lambda row: _judged(row, f"{row.passes:.1f}"),
    "gained": lambda row: f"{row.gained:+.1f}",
    "share": lambda row: f"{row.share:.0%}",
}


def _judged(row: BreakdownRow, cell: str) -> str:
    return "" if row.kind == READING else cell


def cells(row: BreakdownRow) -> list[str]:
    """A row of the table in words."""
    return [cell(row) for cell in COLUMNS.values()]

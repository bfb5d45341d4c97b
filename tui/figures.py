"""What a reply says of itself, as far as it is written: the figures that the live panel draws.

All of them come from events. What is not known is None, and is not shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from specllama.events import RoundDone, Started
from specllama.tui.record import Record
from specllama.verdict import SINGLES

NEWEST = 64  # rounds among which the cost of a plain step is looked for


@dataclass(frozen=True, slots=True)
class FirstToken:
    """How long the first token took, in milliseconds."""

    total: float
    tokenize: float
    prefill: float
    step: float


@dataclass(frozen=True, slots=True)
class TokenTime:
    """What a token took behind the first, in milliseconds; ``plain`` is a plain step there."""

    draft: float
    verify: float
    other: float
    plain: float | None

    @property
    def together(self) -> float:
        return self.draft + self.verify + self.other


def by_depth(record: Record) -> list[tuple[int, int]]:
    """(accepted, drafted) of the guesses at depth 1, 2, ..."""
    if record.rounds:
        return list(zip(record.stats.accepted_at, record.stats.drafted_at, strict=True))
    done = record.finished
    if done is None:
        return []
    return list(zip(done.accepted_per_position, done.drafted_per_position, strict=False))


def token_time(record: Record) -> TokenTime | None:
    """None until a second token is there."""
    done, stats = record.finished, record.stats
    if record.rounds:
        draft, verify, other, more = stats.draft_ms, stats.verify_ms, stats.other_ms, stats.emitted
    elif done is not None:
        times = done.timings
        draft, verify, other, more = (
            times.draft_ms,
            times.verify_ms,
            times.other_ms,
            len(done.token_ids),
        )
    else:
        return None
    if more < 2:
        return None
    n = more - 1
    return TokenTime(draft / n, verify / n, other / n, plain_step(record.rounds))


def plain_step(rounds: list[RoundDone]) -> float | None:
    """What a single pass takes: as the engine knows it, else from the plain steps among the
    newest rounds."""
    newest = rounds[-NEWEST:]
    for done in reversed(newest):
        if done.plain_ms is not None:
            return done.plain_ms
    singles = [done.verify_ms + done.other_ms for done in newest if done.index and not done.drafted]
    return median(singles) if len(singles) >= SINGLES else None


def first_token(record: Record) -> FirstToken | None:
    """Of the newest request of this reply; None until its first token is there."""
    done = record.finished
    if done is not None and done.timings.ttft_ms:
        times = done.timings
        return FirstToken(times.ttft_ms, times.tokenize_ms, times.prefill_ms, times.first_decode_ms)
    if not record.starts:
        return None
    at, started = record.starts[-1]
    return _first(started, record.rounds[at]) if at < len(record.rounds) else None


def _first(started: Started, done: RoundDone) -> FirstToken:
    total, step = 1000 * done.t_s, done.draft_ms + done.verify_ms + done.other_ms
    return FirstToken(
        total, started.tokenize_ms, max(total - started.tokenize_ms - step, 0.0), step
    )


def context(record: Record) -> tuple[int, int] | None:
    """(tokens of context in use, tokens that there is room for)."""
    done, started = record.finished, record.started
    if record.live and started is not None:
        past = record.rounds[-1] if record.rounds else None
        fresh = past is not None and len(record.rounds) > record.starts[-1][0]
        used = past.n_past + 1 + len(past.emitted) if past and fresh else started.prompt_n
        return used, started.n_ctx
    return None if done is None else (done.prompt_n + len(done.token_ids), done.n_ctx)

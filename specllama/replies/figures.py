"""Figures of a reply, which every screen, log and document shows, by one wall clock.

They are computed here alone, from the events of one request. What is not known is None, and is not
shown. Between the first token and the end, whatever was neither drafting nor verifying is waiting:
for the caller, for pipes, for other conversations, and for what is done beside the models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from specllama.events import Finished, Payoff, RoundDone, Started
from specllama.stats import SpecStats
from specllama.verdict import SINGLES, TimedRound, judge

NEWEST = 64  # rounds among which the cost of a plain step is looked for


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The time to the first token in milliseconds: ``total`` is the sum of the others."""

    total: float
    tokenize: float
    queue: float
    prefill: float
    step: float


@dataclass(frozen=True, slots=True)
class ReplyFigures:
    """Times in milliseconds.

    Attributes:
        tokens, rounds, drafted, accepted: None where another engine does not report them.
        at_most: ``drafted`` is an upper bound.
        engine: the other engine that wrote it.
        decode_ms: from the first token to the end, or to the newest round of a reply that is
            being written. draft_ms, verify_ms: of that.
        depths: (accepted, drafted) of the guesses at depth 1, 2, ...
        plain_ms: what a plain step takes there, of a reply that drafted.
        verdict: None of plain decoding.
    """

    tokens: int | None
    rounds: int | None
    drafted: int | None
    accepted: int | None
    depths: tuple[tuple[int, int], ...]
    first: FirstToken | None
    decode_ms: float
    draft_ms: float
    verify_ms: float
    plain_ms: float | None
    verdict: Payoff | None
    at_most: bool = False
    engine: str = ""

    @property
    def waiting_ms(self) -> float:
        return max(self.decode_ms - self.draft_ms - self.verify_ms, 0.0)

    @property
    def token_ms(self) -> float | None:
        """Milliseconds of each token after the first."""
        more = (self.tokens or 0) - 1
        return self.decode_ms / more if more > 0 and self.decode_ms else None

    @property
    def tok_per_s(self) -> float | None:
        """Tokens per second after the first token."""
        return None if self.token_ms is None else 1000.0 / self.token_ms

    @property
    def kept(self) -> float | None:
        """The share of guesses that were kept; the least it can be if their number is a bound."""
        if self.accepted is None or not self.drafted:
            return None
        return self.accepted / self.drafted

    @property
    def kept_words(self) -> str:
        """The number of kept guesses, for people; "–" if unknown."""
        if self.accepted is None:
            return "–"
        if self.drafted is None:
            return f"{self.accepted}"
        return f"{self.accepted} of {'≤ ' if self.at_most else ''}{self.drafted}"

    @staticmethod
    def of(
        started: Started | None, rounds: Sequence[RoundDone], end: Finished | None
    ) -> ReplyFigures | None:
        """Compute the figures of one request so far; return None before its first token."""
        if end is None and not rounds:
            return None
        passes = [TimedRound.of(done) for done in rounds if done.index]
        drafts = any(one.drafted for one in passes)
        verdict = None if end is None else end.verdict
        if verdict is None and (drafts or (end is None and _proposes(started))):
            verdict = judge(passes)
        plain_ms = _plain_step(rounds, passes) if drafts else None
        if end is not None:
            t = end.timings
            return ReplyFigures(
                end.tokens,
                end.known("rounds"),
                end.known("draft_n"),
                end.known("draft_n_accepted"),
                tuple(zip(end.accepted_per_position, end.drafted_per_position, strict=False)),
                FirstToken(t.ttft_ms, t.tokenize_ms, t.queue_ms, t.prefill_ms, t.first_decode_ms)
                if t.ttft_ms
                else None,
                t.decode_ms,
                t.draft_ms,
                t.verify_ms,
                plain_ms,
                verdict,
                end.draft_at_most,
                end.engine,
            )
        stats = SpecStats.of(rounds)
        return ReplyFigures(
            stats.emitted,
            stats.rounds,
            stats.drafted,
            stats.accepted,
            tuple(zip(stats.accepted_at, stats.drafted_at, strict=True)),
            None if started is None or rounds[0].index else _first(started, rounds[0]),
            (rounds[-1].t_s - rounds[0].t_s) * 1e3,
            sum(done.draft_ms for done in rounds[1:]),
            sum(done.verify_ms for done in rounds[1:]),
            plain_ms,
            verdict,
        )


def _proposes(started: Started | None) -> bool:
    return started is not None and started.proposer != "none"


def _first(started: Started, done: RoundDone) -> FirstToken:
    total = 1e3 * done.t_s
    rest = total - started.tokenize_ms - started.queue_ms - done.took_ms
    return FirstToken(total, started.tokenize_ms, started.queue_ms, max(rest, 0.0), done.took_ms)


def _plain_step(rounds: Sequence[RoundDone], passes: Sequence[TimedRound]) -> float | None:
    """Return the engine's own figure, else one from the plain steps among the newest rounds."""
    for done in reversed(rounds[-NEWEST:]):
        if done.plain_ms is not None:
            return done.plain_ms
    singles = [one.pass_ms for one in passes[-NEWEST:] if not one.drafted]
    return median(singles) if len(singles) >= SINGLES else None

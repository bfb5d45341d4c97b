"""The figures of replies: every count, time, rate, share, histogram and verdict.

``Figures`` is the record of one reply, from its events, or of several together; ``SpecStats`` are
the sums over rounds. Counts and times are stored, everything else is a property. What is unknown
or undefined is None, and is not shown.

*Drafted* is every token sent to the target as a guess, *accepted* those that were really emitted
(after a stop cut), and ``emitted = accepted + rounds - cut``. By one wall clock, whatever between
the first token and the end was neither drafting nor verifying is waiting: for the caller, for
pipes, for other conversations, and for what is done beside the models.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

from specllama.events import Finished, RoundDone, Started
from specllama.rates import GuessShares, Payoff, share, speed, total
from specllama.verdict import SINGLES, judge, passes_of, singles_of

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
NEWEST = 64  # rounds among which the cost of a plain step is looked for


@dataclass(slots=True)
class SpecStats(GuessShares):
    """Sums over rounds.

    ``drafted_at[i]`` counts the rounds that drafted to depth i + 1 at least, ``accepted_at[i]``
    those that accepted that far. Times in milliseconds.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    cut: int = 0
    near_ties: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    other_ms: float = 0.0
    wait_ms: float = 0.0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, rounds: Iterable[RoundDone]) -> SpecStats:
        """Count over these rounds."""
        stats = cls()
        for done in rounds:
            stats.observe(done)
        return stats

    def observe(self, done: RoundDone) -> None:
        """Count one more round."""
        self.rounds += 1
        self.drafted += len(done.drafted)
        self.accepted += done.accepted
        self.emitted += len(done.emitted)
        self.cut += done.cut
        self.near_ties += done.near_tie
        self.draft_ms += done.draft_ms
        self.verify_ms += done.verify_ms
        self.other_ms += done.other_ms
        self.wait_ms += done.wait_ms
        depth = max(depths(done.parents), default=0)
        while len(self.drafted_at) < depth:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for i in range(depth):
            self.drafted_at[i] += 1
        for i in range(done.accepted):
            self.accepted_at[i] += 1


def stats_by_source(rounds: Iterable[RoundDone]) -> dict[str, SpecStats]:
    """Count per drafting source, in order of appearance; "none" are plain rounds."""
    out: dict[str, SpecStats] = {}
    for done in rounds:
        out.setdefault(done.source, SpecStats()).observe(done)
    return out


def rounding(done: Finished) -> tuple[str, bool]:
    """Describe the rounding that may part a reply from plain decoding's, "" if none may; True if
    passes were compared here, so that it is more than a fear."""
    if not done.near_ties:
        return "", False
    if "(not measured" in done.exactness:  # see ``Exactness.label``
        return "same text up to rounding, not compared here yet", False
    ties = f"{done.near_ties} near-tie{'s' * (done.near_ties != 1)}"
    return f"same text up to rounding: {ties}", True


def depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of each node of a draft tree, the first level being 1."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The time to the first token in milliseconds: ``total`` is the sum of the others."""

    total: float
    tokenize: float
    queue: float
    prefill: float
    step: float


@dataclass(frozen=True)
class Figures(GuessShares):
    """The record of a reply so far, or of several together. Times in milliseconds.

    Attributes:
        tokens, rounds, drafted, accepted: None where another engine does not report them.
        accepted_at, drafted_at: by depth of the guess.
        decode_ms: from the first token to the end, or to the newest round of a reply that is
            being written. draft_ms, verify_ms: of that.
        at_most: ``drafted`` is an upper bound.
        engine: the other engine that wrote it.
        passes: its rounds after the first, where they are known.
        judged: the engine's verdict. expects: one is made while the reply is written.
    """

    tokens: int | None
    rounds: int | None
    drafted: int | None
    accepted: int | None
    accepted_at: Sequence[int] = ()
    drafted_at: Sequence[int] = ()
    first: FirstToken | None = None
    decode_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    at_most: bool = False
    engine: str = ""
    replies: int = 1
    passes: Sequence[RoundDone] = ()
    judged: Payoff | None = None
    expects: bool = False

    @property
    def waiting_ms(self) -> float:
        return max(self.decode_ms - self.draft_ms - self.verify_ms, 0.0)

    @property
    def tok_per_s(self) -> float | None:
        """Tokens per second after the first token."""
        return speed(self.tokens, self.decode_ms / 1e3, self.replies)

    @property
    def token_ms(self) -> float | None:
        """Milliseconds of each token after the first."""
        return share(1e3, self.tok_per_s)

    def by_token(self, ms: float) -> float | None:
        """Return the milliseconds of each token after the first, of a part of their time."""
        return share(ms, (self.tokens or 0) - self.replies)

    @property
    def kept_words(self) -> str:
        """The number of kept guesses, for people; "–" if unknown."""
        if self.accepted is None:
            return "–"
        if self.drafted is None:
            return f"{self.accepted}"
        return f"{self.accepted} of {'≤ ' if self.at_most else ''}{self.drafted}"

    @cached_property
    def verdict(self) -> Payoff | None:
        """The verdict on drafting; None of plain decoding."""
        drafts = self.expects or any(one.drafted for one in self.passes)
        return self.judged or (judge(self.passes) if drafts else None)

    @cached_property
    def plain_ms(self) -> float | None:
        """A plain step of a reply that drafted: the engine's own figure, else one from the plain
        steps among the newest rounds."""
        newest = self.passes[-NEWEST:]
        if not any(one.drafted for one in self.passes):
            return None
        for one in reversed(newest):
            if one.plain_ms is not None:
                return one.plain_ms
        singles = singles_of(newest)
        return median(singles) if len(singles) >= SINGLES else None

    @staticmethod
    def of(
        started: Started | None, rounds: Sequence[RoundDone], end: Finished | None
    ) -> Figures | None:
        """Return the figures of one request so far; None before its first token."""
        if end is None and not rounds:
            return None
        passes = passes_of(rounds)
        if end is not None:
            t = end.timings
            parts = t.tokenize_ms, t.queue_ms, t.prefill_ms, t.first_decode_ms
            return Figures(
                end.tokens, end.known("rounds"), end.known("draft_n"),
                end.known("draft_n_accepted"), end.accepted_per_position, end.drafted_per_position,
                FirstToken(t.ttft_ms, *parts) if t.ttft_ms else None,
                t.decode_ms, t.draft_ms, t.verify_ms, end.draft_at_most, end.engine,
                passes=passes, judged=end.verdict,
            )  # fmt: skip
        stats, begun = SpecStats.of(rounds), rounds[0]
        return Figures(
            stats.emitted, stats.rounds, stats.drafted, stats.accepted, stats.accepted_at,
            stats.drafted_at, None if started is None or begun.index else _first(started, begun),
            (rounds[-1].t_s - begun.t_s) * 1e3, sum(done.draft_ms for done in rounds[1:]),
            sum(done.verify_ms for done in rounds[1:]), passes=passes,
            expects=started is not None and started.proposer != "none",
        )  # fmt: skip

    @staticmethod
    def together(replies: Sequence[Figures]) -> Figures:
        """Return the sums over replies; a count is None unless it is known of each."""
        return Figures(
            tokens=total([one.tokens for one in replies]),
            rounds=total([one.rounds for one in replies]),
            drafted=total([one.drafted for one in replies]),
            accepted=total([one.accepted for one in replies]),
            decode_ms=sum(one.decode_ms for one in replies),
            draft_ms=sum(one.draft_ms for one in replies),
            verify_ms=sum(one.verify_ms for one in replies),
            at_most=any(one.at_most for one in replies),
            replies=len(replies),
        )


def _first(started: Started, done: RoundDone) -> FirstToken:
    whole, before = 1e3 * done.t_s, (started.tokenize_ms, started.queue_ms)
    return FirstToken(
        whole, *before, max(whole - sum(before) - done.took_ms, 0.0), step=done.took_ms
    )


@dataclass(slots=True)
class Histogram:
    """Numbers counted by size, as Prometheus does.

    It counts how many are at most each of ``bounds``, ascending, and adds them up.
    """

    bounds: Sequence[float]
    sum: float = 0.0
    _counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield (upper bound, numbers up to it)."""
        total = 0
        for bound, count in zip((*self.bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield str(bound), total

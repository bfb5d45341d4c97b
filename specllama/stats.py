"""Counters of speculation, and histograms.

Only counts are stored; every rate is derived, None when undefined.

Counting rule: *drafted* is every token sent to the target as a guess, *accepted* those that were
really emitted (after a stop cut), and ``emitted = accepted + rounds - cut``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from specllama.events import RoundDone

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


@dataclass(slots=True)
class SpecStats:
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
        depth = _depth(done.parents)
        while len(self.drafted_at) < depth:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for i in range(depth):
            self.drafted_at[i] += 1
        for i in range(done.accepted):
            self.accepted_at[i] += 1

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def per_position(self) -> list[float | None]:
        """The acceptance at depth i over all rounds, even those that drafted less far."""
        return [a / self.rounds if self.rounds else None for a in self.accepted_at]

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted


def _depth(parents: tuple[int, ...]) -> int:
    """Return the length of the longest path of a draft tree."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


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

    def join(self, other: Histogram) -> None:
        """Add the numbers of another one with the same bounds."""
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        self.sum += other.sum

    @property
    def count(self) -> int:
        return sum(self._counts)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield (upper bound, numbers up to it)."""
        total = 0
        for bound, count in zip((*self.bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield str(bound), total

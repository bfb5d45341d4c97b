"""Counters of speculation. Only counts are stored; every rate is derived, None when undefined.

Counting rule: *drafted* is every token sent to the target as a guess, *accepted* those that were
really emitted (after a stop cut), and ``emitted = accepted + rounds - cut``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specllama.events import RoundDone


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
        """Unconditional: accepted at depth i / all rounds, even those that drafted less far."""
        return [a / self.rounds if self.rounds else None for a in self.accepted_at]

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted


def _depth(parents: tuple[int, ...]) -> int:
    """Length of the longest path of a draft tree."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)

"""Lessons about a pair at one rule and temperature, kept between requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from specllama.speculative.policy.acceptance import Acceptance, Kind
from specllama.speculative.policy.constants import MEAN, MEMORY, SINGLES


@dataclass
class Mean:
    """A running mean."""

    value: float = 0.0
    n: int = 0

    def add(self, value: float) -> None:
        self.n = min(self.n + 1, MEMORY)
        self.value += (value - self.value) / self.n


@dataclass
class Learned:
    """The sources of a pair, and the usual course of its replies.

    Attributes:
        asked: by method, what rounds that asked for copies or rows gained, in plain steps.
        pace: tokens written of late, and the plain steps that they took.
        reply: tokens of a reply. round: tokens of a round that the paying source drafted.
    """

    sources: dict[str, Acceptance] = field(default_factory=dict)
    asked: dict[str, Mean] = field(default_factory=dict)
    pace: tuple[float, float] = (SINGLES, SINGLES)
    reply: Mean = field(default_factory=lambda: Mean(MEMORY, 1))
    round: Mean = field(default_factory=lambda: Mean(1.0 / (1.0 - MEAN), 1))

    def source(self, name: str, kind: Kind) -> Acceptance:
        if name not in self.sources:
            self.sources[name] = Acceptance(kind)
        return self.sources[name]

    def wrote(self, tokens: int, steps: float) -> None:
        """Record that a round wrote some tokens in the time of some plain steps."""
        written, took = self.pace
        keep = 1.0 - 1.0 / MEMORY
        self.pace = keep * written + tokens, keep * took + steps

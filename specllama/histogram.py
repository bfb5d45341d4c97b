"""Numbers by size, as Prometheus counts them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


@dataclass(slots=True)
class Histogram:
    """How many numbers were at most each of ``bounds``, ascending, and their sum."""

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
        """(upper bound, numbers up to it)."""
        total = 0
        for bound, count in zip((*self.bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield str(bound), total

"""Copies of a running state, to return to where a state cannot be cut as cells can.

A few are kept for a text, the newest two always, the others spread over it: going far back reads at
most what lies between two of them again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specllama.arrays import Rows
from specllama.models.running_state import checkpoints


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state after the first ``length`` tokens of a text.

    Attributes:
        state: a buffer of bytes.
        hidden: the hidden state [1, width] of the last of them, where a head will read on from it.
    """

    length: int
    state: Any
    hidden: Rows | None = None


class Checkpoints:
    """The checkpoints of one text."""

    def __init__(self) -> None:
        self._all: list[Checkpoint] = []  # lengths ascend

    def copy(self) -> Checkpoints:
        """Return an independent copy."""
        new = Checkpoints()
        new._all = list(self._all)
        return new

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._all)

    @property
    def lengths(self) -> list[int]:
        return [one.length for one in self._all]

    @property
    def n_bytes(self) -> int:
        """Memory that they take."""
        return sum(len(one.state) for one in self._all)

    def add(self, one: Checkpoint) -> None:
        """Keep this checkpoint, which comes after all others."""
        self._all.append(one)
        while len(self._all) > checkpoints(len(one.state)):
            # the one whose neighbours stay nearest to each other, never the newest two
            ends = [0, *self.lengths]
            gaps = [ends[i + 2] - ends[i] for i in range(len(ends) - 3)]
            del self._all[gaps.index(min(gaps))]

    def cut(self, n: int) -> None:
        """Drop the checkpoints after the first ``n`` tokens of the text."""
        del self._all[bisect_right(self.lengths, n) :]

    def before(self, n: int) -> Checkpoint | None:
        """Return the last checkpoint within the first ``n`` tokens."""
        at = bisect_right(self.lengths, n)
        return self._all[at - 1] if at else None

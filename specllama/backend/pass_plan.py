"""The plan of a pool's passes: how many rows each takes, and how many guesses have room in one.

=======  ====================================================================================
kept     with ``--exact`` rows have the same bits in passes of some widths only
shared   conversations share a pass only as far as each gets the rows that it gets alone
parts    prompts are read in parts, in tiles where that is possible
=======  ====================================================================================

Everybody else asks here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from specllama.backend.kernels import GROUP, LACKING, TILE, ZONE, Kernels


class Planned(Protocol):
    """A pool whose passes are planned."""

    kernels: Kernels
    n_ctx: int
    n_batch: int
    max_rows: int


class PassPlan:
    """The plan of one pool.

    Attributes:
        measured: costs of passes by rows, in single ones, as far as they were measured at rest.
    """

    def __init__(self, pool: Planned) -> None:
        self._pool = pool
        self.measured: Mapping[int, float] = {}

    def rows(self, n: int) -> int:
        """Return the rows of a pass that is asked for ``n``."""
        return next((w for w in self._pool.kernels.widths if w >= n), n)

    def rows_at(self, past: int) -> int:
        """Return the widest pass with rows that is allowed after ``past`` tokens.

        llama.cpp computes attention over a multiple of 256 cells. Where its kernels choose by that,
        a row has to be judged over as many as it has in a pass of its own.
        """
        most, kernels = self._pool.max_rows, self._pool.kernels
        if kernels.any_width or not kernels.widths:
            return most
        least = self.rows(1)
        fits = -(-(past + least) // ZONE) * ZONE - past
        rows = (n for n in range(most, 1, -1) if max(self.rows(n), n - 1 + least) <= fits)
        return next(rows, 1)

    def guesses(self, past: int, remaining: float) -> int:
        """Return the most guesses of a round after ``past`` tokens that may add ``remaining``: the
        last of these is never one, and all have to fit into a pass and the context."""
        return int(min(remaining, self._pool.n_ctx - past, self.rows_at(past))) - 1

    def part(self, left: int, chunk: int) -> int:
        """Return how many of ``left`` tokens of a prompt are read next, about ``chunk``: if passes
        have room for tiles, the rest is then read in tiles, too."""
        if (n_batch := self._pool.n_batch) < 2 * TILE:
            return n_batch
        size = min(chunk, n_batch)
        if size < left < size + TILE:
            return left if left < 2 * TILE else left - TILE
        return size

    @staticmethod
    def lacks(n: int, room: int) -> int:
        """Return how many pads fill the last group of rows of a text of ``n`` tokens, if it nearly
        does that; ``room``: for all of it."""
        lacks = -n % GROUP
        return lacks if lacks <= min(LACKING, room - n) else 0

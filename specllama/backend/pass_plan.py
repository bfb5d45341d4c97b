"""The plan of a pool's passes: how many rows each takes, and how many guesses have room in one.

=======  ====================================================================================
kept     with ``--exact`` rows have the same bits in passes of some widths only
cheap    kernels make some passes cheaper than narrower ones: v(n), as it was measured
shared   conversations share a pass only as far as each gets the rows that it gets alone
parts    prompts are read in parts, in tiles where that is possible
=======  ====================================================================================

Everybody else asks here. What a pass lacks is filled with guesses where there are any, for the
window knows the same costs; the rest are pads (``pool``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from specllama.backend.kernels import GROUP, LACKING, TILE, ZONE, Kernels
from specllama.settings.params import DRAFT_MAX_EXACT


class Planned(Protocol):
    """A pool whose passes are planned."""

    kernels: Kernels
    lanes: int
    n_ctx: int
    n_batch: int
    max_rows: int


class PassPlan:
    """The plan of one pool.

    Args:
        pads: the pool pads passes, and can give pads up each time.

    Attributes:
        cheapest: the rows of the cheapest pass with room for some (rows, depth, rows at most), by
            what was measured; None pads none.
        measured: costs of passes by rows, in single ones, as far as they were measured at rest.
    """

    def __init__(self, pool: Planned, *, pads: bool = False) -> None:
        self._pool, self.pads = pool, pads
        self.cheapest: Callable[[int, int, int], int] | None = None
        self.measured: Mapping[int, float] = {}

    def rows(self, n: int, depth: int = 0, *, cheap: bool = False) -> int:
        """Return the rows of a pass that is asked for ``n`` after ``depth`` tokens; ``cheap``: it
        may be wider where that costs less. A step never is: everything is compared with it."""
        if kept := self._pool.kernels.widths:
            return next((w for w in kept if w >= n), n)
        if not cheap or n < 2 or self.cheapest is None:
            return n
        return self.cheapest(n, depth, min(self.widest, self._pool.n_ctx - depth))

    @property
    def widest(self) -> int:
        """The widest pass that a narrower one is padded to; 0 if none is."""
        pool = self._pool
        if pool.kernels.widths or not self.pads:
            return 0
        most = min(DRAFT_MAX_EXACT + 1, pool.max_rows)
        return min(most, pool.kernels.shared(pool.n_batch)) if pool.lanes > 1 else most

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

"""The times of the target's passes while it runs, and the time that a prompt may hold up others."""

from __future__ import annotations

import math

from specllama.backend.kernels import TILE
from specllama.figures import ROWS, SECONDS, Histogram

CHUNK = 512  # tokens of a prompt that are read at once, at most
_WAIT = 3.0  # passes of those who write that reading a part of a prompt may take
_DRIFT = 0.25  # weight of the newest time


class Pace:
    """Times of passes.

    Attributes:
        step_s: of short ones, in which texts are written; None before there was one.
        token_s: of prompts, by token; None before one was read.
        read_s: the least of any pass, by token; inf before there was one.
        run_s: of copying a stretch of neighboring cells out of the cache; 0 before that was done.
    """

    def __init__(self) -> None:
        self.rows, self.seconds = Histogram(ROWS), Histogram(SECONDS)
        self.longest_s = 0.0
        self.step_s: float | None = None
        self.token_s: float | None = None
        self.read_s, self.run_s = math.inf, 0.0

    def passed(self, tokens: int, seconds: float, *, whole: bool = True) -> None:
        """Record one pass; a GPU may still compute one that is not ``whole``."""
        if whole:
            self.read_s = min(self.read_s, seconds / tokens)
        self.rows.add(tokens)
        self.seconds.add(seconds)
        self.longest_s = max(self.longest_s, seconds)
        if tokens < TILE:
            self.step_s = _drifted(self.step_s, seconds)
        else:
            self.token_s = _drifted(self.token_s, seconds / tokens)

    def copied(self, runs: int, seconds: float) -> None:
        """Record how long the copying of a text took, whose cells lie in ``runs`` stretches."""
        self.run_s = _drifted(self.run_s or None, seconds / runs)

    def copy_pays(self, tokens: int, runs: int) -> bool:
        """True if copying a text takes less time than reading it again, as far as is known: a GPU
        reads fast, and its cells are copied one stretch in one layer at a time."""
        return runs * self.run_s < tokens * self.read_s

    def left_ms(self, n: int) -> float | None:
        """Estimate the milliseconds of reading ``n`` tokens; None before anything was read."""
        return None if self.token_s is None else n * self.token_s * 1e3

    def chunk(self) -> int:
        """Return how many tokens of a prompt are read while others wait for their next pass: at
        least a tile or two, which are read with the bits that the whole would have."""
        if self.step_s is None or not self.token_s:
            return 2 * TILE
        return min(max(int(_WAIT * self.step_s / self.token_s), TILE), CHUNK)


def _drifted(old: float | None, new: float) -> float:
    return new if old is None else old + _DRIFT * (new - old)

"""What the target's passes take while it runs, and how long a prompt may hold the others up."""

from __future__ import annotations

from specllama.backend.kernels import TILE
from specllama.stats import ROWS, SECONDS, Histogram

CHUNK = 512  # tokens of a prompt that are read at once, at most
_WAIT = 3.0  # passes of those who write that reading a part of a prompt may take
_DRIFT = 0.25  # weight of the newest time


def part(left: int, chunk: int, n_batch: int) -> int:
    """How many of ``left`` tokens of a prompt are read next, about ``chunk``: where passes have
    room for tiles, what is left then is read in tiles, too."""
    if n_batch < 2 * TILE:
        return n_batch
    size = min(chunk, n_batch)
    if size < left < size + TILE:
        return left if left < 2 * TILE else left - TILE
    return size


class Pace:
    """Times of passes: of short ones, in which texts are written, and of prompts, by token."""

    def __init__(self) -> None:
        self.rows, self.seconds = Histogram(ROWS), Histogram(SECONDS)
        self.longest_s = 0.0
        self._writing_s: float | None = None  # of a pass
        self._reading_s: float | None = None  # of a token

    def passed(self, tokens: int, seconds: float) -> None:
        """One pass."""
        self.rows.add(tokens)
        self.seconds.add(seconds)
        self.longest_s = max(self.longest_s, seconds)
        if tokens < TILE:
            self._writing_s = _drifted(self._writing_s, seconds)
        else:
            self._reading_s = _drifted(self._reading_s, seconds / tokens)

    @property
    def step_s(self) -> float | None:
        """What a short pass takes, None before there was one."""
        return self._writing_s

    @property
    def token_s(self) -> float | None:
        """What a token of a prompt takes, None before one was read."""
        return self._reading_s

    def chunk(self) -> int:
        """How many tokens of a prompt are read while others wait for their next pass: a tile or two
        in any case, which are read with the bits that the whole would have."""
        if self._writing_s is None or not self._reading_s:
            return 2 * TILE
        return min(max(int(_WAIT * self._writing_s / self._reading_s), TILE), CHUNK)


def _drifted(old: float | None, new: float) -> float:
    return new if old is None else old + _DRIFT * (new - old)

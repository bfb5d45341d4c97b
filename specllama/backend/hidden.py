"""Hidden states of a cache's tokens, by position, for proposers that read them.

The rows come from the same forward passes as the logits. A reader takes what it needs after a pass,
and tells with ``forget`` what it will not need again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specllama.arrays import Rows


class HiddenRows:
    """One row per position for one stretch of positions, in step with the cache.

    Attributes:
        first: the first position that is known.
    """

    def __init__(self) -> None:
        self.first = 0
        self._n = 0
        self._rows: Rows | None = None  # [capacity, width]

    @property
    def end(self) -> int:
        """One past the last position that is known."""
        return self.first + self._n

    def rows(self, first: int, end: int) -> Rows | None:
        """Return rows [end - first, width] of positions first..end - 1; None if one is unknown.

        A view: valid until the next pass.
        """
        if self._rows is None or not self.first <= first < end <= self.end:
            return None
        return self._rows[first - self.first : end - self.first]

    def add(self, past: int, rows: Rows) -> None:
        """Add the states of a pass over a cache of ``past`` tokens; copy ``rows`` [n, width]."""
        if past != self.end:  # a pass before it was not kept: what is known starts here
            self.clear(past)
        n = len(rows)
        if self._rows is None or self._rows.shape[1] != rows.shape[1]:
            self._rows = np.empty((max(64, n), rows.shape[1]), np.float32)
        if self._n + n > len(self._rows):
            grown = np.empty((2 * (self._n + n), rows.shape[1]), np.float32)
            grown[: self._n] = self._rows[: self._n]
            self._rows = grown
        self._rows[self._n : self._n + n] = rows
        self._n += n

    def keep_path(self, past: int, path: Sequence[int]) -> None:
        """Keep the nodes of ``path`` (indices in the pass) of a tree pass over ``past`` tokens."""
        at = past - self.first
        if self._rows is None or not 0 <= at <= self._n:
            return
        self._rows[at : at + len(path)] = self._rows[[at + node for node in path]]
        self._n = at + len(path)

    def cut(self, keep_len: int) -> None:
        """Forget positions from ``keep_len`` on."""
        if keep_len < self.first:
            self.clear(keep_len)
        self._n = min(self._n, keep_len - self.first)

    def forget(self, before: int) -> None:
        """Forget positions below ``before``; nothing asks for them again."""
        drop = min(before - self.first, self._n)
        if drop > 0 and self._rows is not None:
            left = self._n - drop
            self._rows[:left] = self._rows[drop : self._n].copy()
            self.first += drop
            self._n = left

    def copy(self) -> HiddenRows:
        """Return an independent copy."""
        other = HiddenRows()
        other.first, other._n = self.first, self._n
        if self._rows is not None:
            other._rows = self._rows[: self._n].copy()
        return other

    def clear(self, first: int = 0) -> None:
        self.first, self._n = first, 0

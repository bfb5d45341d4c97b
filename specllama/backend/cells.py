"""The books of a pool: its held cells, their lanes, and the places of new cells.

A row's bits depend on the order in which its lane's cells lie, and on nothing else in the pool (see
``symbols``). New cells therefore go after all others: below the tail everything is occupied. A
cell that is given up below a living one cannot be freed, since the next token, of any lane,
would fill the gap: it stays as a *ghost*. Ghosts go when nothing living lies above any of them, or
when the pool is compacted.

Where order does not count (draft models, GPUs) cells are freed and filled again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]  # indices of cells

_FEW = 16  # cells that are looked at one by one: most passes are cut by no more


class Cells:
    """The cells of one pool.

    Args:
        n: how many there are.
        in_order: keep every lane's cells in the order of its tokens.
    """

    def __init__(self, n: int, *, in_order: bool) -> None:
        self.n = n
        self.in_order = in_order
        self.tail = 0  # in order: every cell below is held or a ghost, every other one is free
        self._holders: npt.NDArray[np.int32] = np.zeros(n, np.int32)  # lanes that hold each cell
        self._ghost: npt.NDArray[np.bool_] = np.zeros(n, np.bool_)
        self.has_ghosts = False  # there are ghosts

    @property
    def held(self) -> int:
        """Cells that lanes hold; a shared one counts once."""
        return int(np.count_nonzero(self._holders))

    @property
    def ghosts(self) -> int:
        """Cells that no lane holds and no text may fill."""
        return self.tail - self.held if self.in_order else 0

    @property
    def room(self) -> int:
        """Cells that the next pass may fill."""
        return self.n - (self.tail if self.in_order else self.held)

    def fill(self, n: int) -> None:
        """Give the first ``n`` cells to one lane and clear the rest."""
        self.clear()
        self._holders[:n] = 1
        self.tail = n if self.in_order else 0

    def take(self, n: int) -> Places:
        """Take the next ``n`` cells, which must be there, for a lane."""
        if not self.in_order:
            free: Places = np.flatnonzero(self._holders == 0)[:n]
            self._holders[free] = 1
            return free
        begin, self.tail = self.tail, self.tail + n
        self._holders[begin : self.tail] = 1
        return np.arange(begin, self.tail)

    def untake(self, places: Places) -> None:
        """Give back the cells of the last ``take``: its pass failed."""
        self._holders[self._where(places)] -= 1
        if self.in_order:
            self.tail -= len(places)

    def share(self, places: Places) -> None:
        """Count one more lane as a holder of these cells."""
        self._holders[self._where(places)] += 1

    def drop(self, places: Places) -> None:
        """Count one lane less as a holder. ``settle`` must follow before the next ``take``."""
        self._holders[self._where(places)] -= 1

    def settle(self) -> bool:
        """Lower the tail after some ``drop``; return True if every ghost must be freed.

        Dropped cells below the tail become ghosts: see ``gaps`` and ``make_ghosts``.
        """
        if not self.in_order:
            return False
        top = self._top()
        if not self.has_ghosts:
            self.tail = top
            return False
        if self._ghost[:top].any():
            self.tail = max(top, _end(self._ghost[: self.tail]))
            return False
        self._ghost[:] = self.has_ghosts = False
        self.tail = top
        return True

    def _top(self) -> int:
        """Return the index after the last cell that a lane holds."""
        top = self.tail
        for _ in range(_FEW):
            if not top or self._holders[top - 1]:
                return top
            top -= 1
        return _end(self._holders[:top] > 0)

    def gaps(self, places: Places) -> tuple[int, int]:
        """Return the range of ``places`` (ascending, dropped) that becomes ghosts; (0, 0): none.

        The range may include cells that others hold.
        """
        if not self.in_order or not len(places) or places[0] >= self.tail:
            return 0, 0
        below = np.flatnonzero((places < self.tail) & (self._holders[places] == 0))
        return (int(below[0]), int(below[-1]) + 1) if len(below) else (0, 0)

    def make_ghosts(self, places: Places) -> None:
        """Turn these cells into ghosts."""
        self._ghost[places] = self.has_ghosts = True

    def _where(self, places: Places) -> slice | Places:
        """Return a slice if the places are contiguous; otherwise return them as they are."""
        n = len(places)
        if self.in_order and n and places[-1] - places[0] == n - 1:  # they ascend
            return slice(int(places[0]), int(places[0]) + n)
        return places

    def compact(self) -> Places:
        """Close every gap; return the new place of each cell below the old tail (for held ones)."""
        held = self._holders[: self.tail] > 0
        moved: Places = np.cumsum(held) - 1
        kept = self._holders[: self.tail][held]
        self._holders[:] = 0
        self._holders[: len(kept)] = kept
        self._ghost[:] = self.has_ghosts = False
        self.tail = len(kept)
        return moved

    def clear(self) -> None:
        self.tail = 0
        self._holders[:] = 0
        self._ghost[:] = self.has_ghosts = False


def _end(marks: npt.NDArray[np.bool_]) -> int:
    """Return the index after the last True."""
    return len(marks) - int(marks[::-1].argmax()) if marks.any() else 0

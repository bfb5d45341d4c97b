"""The best of very many numbers, without sorting them all. Sorting 150,000 takes 10 ms."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from specllama.arrays import FloatArray, IntArray, Row
from specllama.text_history import Places

Numbers = npt.NDArray[np.floating]

_GROUP = 4, 128  # numbers of which only the largest is looked at, least and most
_GROUPS = 1024  # between these, there are about so many groups
_SUMMED = 8192  # numbers whose exponentials take no time
_SORTED = 4096  # numbers that are sorted at once
_BINS = 2048


class Peaks:
    """The best of very many numbers, by groups that are read once, at the speed of memory.

    Kept is the largest of each group. Groups are the columns of a table; what does not fill a row
    of it is one group more.

    Args:
        values: floating-point numbers [n], not changed as long as this is asked.

    Attributes:
        maxima: of the groups.
    """

    __slots__ = ("_bar", "_found", "_table", "maxima", "top", "values")

    def __init__(self, values: Numbers) -> None:
        self.maxima = values[:0]
        self.read(values)

    def read(self, values: Numbers) -> Peaks:
        """Take other numbers, and forget those before; return itself."""
        least, most = _GROUP
        group = min(max(1 << (len(values) // _GROUPS).bit_length(), least), most)
        columns = len(values) // group
        rest = values[group * columns :]
        self.values = values
        self._table = values[: group * columns].reshape(group, columns)
        if len(self.maxima) != columns + 1 or self.maxima.dtype != values.dtype:
            self.maxima = np.empty(columns + 1, values.dtype)
        np.maximum.reduce(self._table, axis=0, out=self.maxima[:-1])
        self.maxima[-1] = rest.max() if len(rest) else -np.inf
        self.top = float(self.maxima.max())  # NaN where one of them is
        self._bar = 0, -np.inf
        self._found: tuple[float, Places] | None = None
        return self

    def bar(self, k: int) -> float:
        """Return a number that at least ``k`` of them reach, and not many more; -inf if none."""
        below = len(self.maxima) - k
        if self._bar[0] != k:
            ordered = self.maxima.copy()
            ordered.partition(max(below, 0))
            self._bar = k, float(ordered[below]) if below >= 0 else -np.inf
        return self._bar[1]

    def reaching(self, bar: float) -> Places:
        """Return the indices of those that reach ``bar``, ascending."""
        if self._found is None or not bar >= self._found[0]:
            self._found = bar, self._reaching(bar)
            return self._found[1]
        places = self._found[1]
        return places if bar == self._found[0] else places[self.values[places] >= bar]

    def _reaching(self, bar: float) -> Places:
        columns = (self.maxima >= bar).nonzero()[0]
        n, width = self._table.shape[1], len(columns)
        if width > n // 4 or (width and columns[-1] == n):
            return (self.values >= bar).nonzero()[0]
        found = (self._table.take(columns, axis=1).ravel() >= bar).nonzero()[0]
        rows = found // max(width, 1)
        found -= rows * width
        rows *= n
        rows += columns[found]
        return rows

    def best(self, n: int) -> Places:
        """Return the indices of the ``n`` largest, best first; of equal ones the first."""
        near = self.reaching(self.bar(n))
        return near[np.argsort(-self.values[near], kind="stable")][:n]

    def among(self, bar: float) -> IntArray:
        """Return indices, ascending, that include all that reach ``bar``: simply all indices if a
        choice would take longer."""
        if 4 * np.count_nonzero(self.maxima >= bar) < len(self.maxima):
            return self.reaching(bar).astype(np.int32)
        return every(len(self.values))


@lru_cache(maxsize=2)  # of the target and of the draft
def every(n: int) -> IntArray:
    indices = np.arange(n, dtype=np.int32)
    indices.flags.writeable = False
    return indices


def confidence(row: Row) -> float:
    """Return the probability of the best token under the plain softmax of a row; of very many
    tokens, only the best of each group also counts. 0 for a row that cannot be sampled (NaN, +inf,
    all -inf)."""
    logits = Peaks(row).maxima if len(row) > _SUMMED else row
    top = logits.max()
    if not np.isfinite(top):
        return 0.0
    weights = logits - top
    return float(1.0 / np.exp(weights, out=weights).sum(dtype=np.float64))


def smallest(keys: FloatArray, weights: FloatArray, mass: float) -> Places:
    """Return the indices of the smallest keys, ascending, until their weights reach ``mass``.

    Of equal keys the first come first. Many keys are put into bins, so that those of one bin only
    have to be sorted.
    """
    n = len(keys)
    least, most = (float(keys.min()), float(keys.max())) if n > _SORTED else (0.0, 0.0)
    if least < most:
        scaled = keys - least
        scaled *= (_BINS - 1) / (most - least)
        bins = scaled.astype(np.int32)
        reached = np.cumsum(np.bincount(bins, weights, _BINS))
        edge = int(np.searchsorted(reached, mass - 1e-12))
        on_edge = np.flatnonzero(bins == edge)
        if len(on_edge) < n:
            inside = bins < edge
            before = float(reached[edge - 1]) if edge else 0.0
            if len(on_edge):
                inside[on_edge[smallest(keys[on_edge], weights[on_edge], mass - before)]] = True
            return np.flatnonzero(inside)
    order = np.argsort(keys, kind="stable")
    reached = np.cumsum(weights[order])
    return np.sort(order[: int(np.searchsorted(reached, mass - 1e-12)) + 1])

"""The best of very many numbers, without sorting them all. Sorting 150,000 takes 10 ms."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specllama.arrays import FloatArray
from specllama.history import Places

_GROUP = 64  # numbers of which only the largest is looked at
_SORTED = 4096  # numbers that are sorted at once
_BINS = 2048


def reached_by(values: npt.NDArray[np.floating], k: int) -> float:
    """A number that at least ``k`` of ``values`` reach, and not many more; -inf for none found.

    It is the k-th largest of the maxima of groups. Groups are columns, so that the maxima are taken
    at the speed of memory.
    """
    groups = len(values) // _GROUP
    if k > groups:
        return -np.inf
    maxima = values[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
    return float(np.partition(maxima, groups - k)[groups - k])


def smallest(keys: FloatArray, weights: FloatArray, mass: float) -> Places:
    """The indices of the smallest keys, ascending, until their weights reach ``mass``.

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

"""Texts to copy from that do not change: a repository, say.

They are sorted once by what stands before each token (a suffix array, of the reversed text), so the
longest end of another text that occurs here is found by halves, whatever their size. All
conversations share one: 12 bytes a token.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

from specllama.arrays import IntArray
from specllama.text_history import common_prefix

BREAK = -1  # stands between texts; never proposed
_DEEP = 64  # tokens before a place that it is sorted by: a longer match says nothing more
_LOOKED = 1024  # places of a match that are looked at: bounds the work


class Library:
    """Earlier texts in the target's tokens, oldest first.

    Attributes:
        text: their tokens, a BREAK behind each.
    """

    def __init__(self, texts: Iterable[Sequence[int]] = ()) -> None:
        self.text = array("i")
        for text in texts:
            self.text.extend(text)
            self.text.append(BREAK)
        self._back = self.text[::-1]
        self._sorted = _sorted(np.array(self._back, np.int32))

    def __len__(self) -> int:
        return len(self.text)

    def find(self, end: Sequence[int], most: int) -> tuple[list[int], int]:
        """Find the longest end of a text: return the places of its last token, ascending, among the
        newest ``most``; and the number of tokens that agree, up to 64."""
        back, order = self._back, self._sorted
        wanted = array("i", end[: -_DEEP - 1 : -1])
        at = bisect_left(order, wanted, key=lambda place: back[place : place + _DEEP])
        beside = order[max(at - 1, 0) : at + 1]
        length = max((common_prefix(back[p : p + len(wanted)], wanted) for p in beside), default=0)
        if not length:
            return [], 0
        part = wanted[:length]

        def head(place: int) -> array[int]:
            return back[place : place + length]

        low, high = bisect_left(order, part, key=head), bisect_right(order, part, key=head)
        last, high = len(self.text) - 1, min(high, low + _LOOKED)
        return sorted([last - place for place in order[low:high]])[-most:], length


def _sorted(back: IntArray) -> array[int]:
    """Sort the places of a text by the next ``_DEEP`` tokens: by one, by two, by four, ..."""
    rank, depth = np.unique(back, return_inverse=True)[1].astype(np.int64), 1
    while depth < _DEEP and len(rank):
        behind = np.zeros_like(rank)
        behind[:-depth] = rank[depth:] + 1
        pair = rank * (int(rank.max()) + 2) + behind
        rank, depth = np.unique(pair, return_inverse=True)[1].astype(np.int64), 2 * depth
    return array("i", np.argsort(rank, kind="stable").astype(np.int32).tobytes())

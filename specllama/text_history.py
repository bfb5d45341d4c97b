"""The text of a conversation: its end grows or is cut off, and all readers follow.

What a source of drafts knows of a text it keeps between rounds. The history remembers where it was
cut, so a follower asks how much of what it read still stands, in constant time; two histories are
compared at the speed of memory. It also knows where each token stands, for the sources that copy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specllama.arrays import IntArray

Places = npt.NDArray[np.int64]  # ascending positions in a text
Mark = tuple[int, int]  # edition and length of a history that a reader has read, see ``kept``

_UNSORTED = 4096  # newest tokens that are scanned rather than sorted: both take microseconds
_POSITION_BITS = 32


class History(list[int]):
    """A list of tokens that changes at its end only.

    ``extend``, ``append``, ``+=``, ``cut``, ``replace`` and ``clear`` are all that may change it.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        super().__init__(tokens)
        self._edition = 0
        # (edition, length it was cut to) of the cuts that still tell something, both rising
        self._cuts: list[tuple[int, int]] = []
        self._buffer: IntArray = np.empty(max(len(self), 256), np.int32)
        self._filled = 0  # tokens of the buffer that are right
        self._keys: Places = np.empty(0, np.int64)  # token and position in one number, sorted
        self._sorted = 0  # tokens of the text they hold; entries beyond were cut off

    # -- changes --

    def cut(self, n: int) -> None:
        """Drop everything after the first ``n`` tokens."""
        if n >= len(self):
            return
        super().__delitem__(slice(n, None))
        self._edition += 1
        while self._cuts and self._cuts[-1][1] >= n:
            self._cuts.pop()
        self._cuts.append((self._edition, n))
        self._filled = min(self._filled, n)
        self._sorted = min(self._sorted, n)

    def replace(self, tokens: Sequence[int]) -> int:
        """Become ``tokens``; return how many of the old ones stay in front."""
        keep = common_prefix(self, tokens)
        self.cut(keep)
        self.extend(tokens[keep:])
        return keep

    def clear(self) -> None:
        self.cut(0)

    def __delitem__(self, at: Any) -> None:
        if not isinstance(at, slice) or at.stop is not None or at.step is not None:
            raise TypeError("a history changes at its end only")
        self.cut(range(len(self))[at].start)

    def _fixed(self, *args: object, **kwargs: object) -> Any:
        raise TypeError("a history changes at its end only")

    __setitem__ = __imul__ = insert = pop = remove = reverse = sort = _fixed

    def copy(self) -> History:
        """Return the same text, to continue it in another way."""
        other = History()
        list.extend(other, self)
        other._buffer = np.empty(len(self) + 256, np.int32)
        other._buffer[: len(self)] = self.array
        other._filled = len(self)
        other._keys, other._sorted = self._keys, self._sorted
        return other

    # -- followers --

    def mark(self) -> Mark:
        """Return the mark of a reader that has read the whole text."""
        return self._edition, len(self)

    def kept(self, mark: Mark) -> int:
        """Count the tokens read at ``mark`` that are unchanged."""
        edition, length = mark
        at = bisect_right(self._cuts, edition, key=lambda cut: cut[0])
        return length if at == len(self._cuts) else min(length, self._cuts[at][1])

    # -- look-ups --

    @property
    def array(self) -> IntArray:
        """The tokens, int32 [n]; a view, good until the next change."""
        n = len(self)
        if n > len(self._buffer):
            grown = np.empty(2 * n, np.int32)
            grown[: self._filled] = self._buffer[: self._filled]
            self._buffer = grown
        if self._filled < n:
            self._buffer[self._filled : n] = self[self._filled :]
            self._filled = n
        return self._buffer[:n]

    def places(self, token: int) -> Places:
        """Return every position of ``token``, ascending."""
        text = self.array
        if len(text) - self._sorted > _UNSORTED:
            # by halves of 16 bits, which numpy sorts by counting; the upper one has the sign:
            # what stands between two texts is no token, and less than any
            order = np.lexsort((text.astype(np.uint16), (text >> 16).astype(np.int16)))
            self._keys = (text[order].astype(np.int64) << _POSITION_BITS) | order
            self._sorted = len(text)
        newest: Places = np.flatnonzero(text[self._sorted :] == token)
        if not self._sorted:
            return newest
        low = token << _POSITION_BITS
        begin, end = self._keys.searchsorted((low, low + self._sorted))
        known: Places = self._keys[begin:end] - low
        return np.concatenate((known, newest + self._sorted)) if len(newest) else known


class Follower:
    """A reader that follows a text round after round without comparing all of it each time.

    Attributes:
        text: what was read last; a list of a caller's as a history of our own.
    """

    def __init__(self) -> None:
        self.text = self._own = History()
        self._mark = self.text.mark()

    def follow(self, tokens: Sequence[int]) -> tuple[int, bool]:
        """Read ``tokens``: how many of them had been read before, and whether others were cut."""
        text = tokens if isinstance(tokens, History) else self._own
        if text is self._own:
            text.replace(tokens)
        kept = self.kept if text is self.text else 0
        edited = kept < self._mark[1]
        self.text, self._mark = text, text.mark()
        return kept, edited

    @property
    def kept(self) -> int:
        """The number of read tokens that are unchanged."""
        return self.text.kept(self._mark)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    n = min(len(a), len(b))
    if isinstance(a, History) and isinstance(b, History):
        differ = a.array[:n] != b.array[:n]
        return int(differ.argmax()) if differ.any() else n
    if a[:n] == b[:n]:
        return n
    low, high = 0, n  # a[:low] == b[:low] always; slices compare at C speed
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low

"""Where the end of a text occurs elsewhere, and how far back it does.

A token more lengthens the matches that it continues and starts those of its own places anew, so
following a text costs what its newest token's places cost. Nothing is kept per substring: what an
edit changes is looked up again.
"""

from __future__ import annotations

import numpy as np

from specllama.spec.history import History, Mark, Places
from specllama.spec.types import IntArray

_STEPS = 16  # new tokens that are followed one by one; more are looked up at once
_FEW = 4  # places compared one by one, each at the speed of memory


class Matches:
    """Places of one text where the end of another (or its own) stands.

    ``places`` are positions of the last token in ``within``, ascending; ``lengths[i]`` tells how
    many tokens up to there equal those up to the text's end, at least 1. The end itself is none.
    """

    def __init__(self, within: History) -> None:
        self.within = within
        self.places: Places = np.empty(0, np.int64)
        self.lengths: Places = np.empty(0, np.int64)
        self._text: History | None = None
        self._mark = Mark(0, 0)

    @property
    def longest(self) -> int:
        """Tokens of the longest match, 0 for none."""
        return int(self.lengths.max()) if len(self.lengths) else 0

    def at_least(self, length: int) -> Places:
        """Places where ``length`` tokens or more agree."""
        return self.places[self.lengths >= length]

    def follow(self, text: History) -> None:
        """Find the end of ``text``; ``within`` may have grown only if it is the text itself."""
        read = text.kept(self._mark) if text is self._text else 0
        new = len(text) - read
        if read < self._mark.length or text is not self._text or new > _STEPS:
            self.places, self.lengths = self._look_up(text)
        else:
            for end in range(read, len(text)):
                self._step(text, end)
        self._text, self._mark = text, text.mark()

    def _places(self, text: History, end: int) -> Places:
        places = self.within.places(text[end])
        return places[: np.searchsorted(places, end)] if self.within is text else places

    def _step(self, text: History, end: int) -> None:
        places = self._places(text, end)
        lengths = np.ones(len(places), np.int64)
        if len(self.places) and len(places):
            before = self.within.array[places - 1] == text[end - 1]
            if places[0] == 0:
                before[0] = False  # nothing stands before the first token
            lengths[before] += self.lengths[np.searchsorted(self.places, places[before] - 1)]
        self.places, self.lengths = places, lengths

    def _look_up(self, text: History) -> tuple[Places, Places]:
        if not text:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        end = len(text) - 1
        there, here = self.within.array, text.array
        places = self._places(text, end)
        lengths = np.ones(len(places), np.int64)
        alive, back = np.arange(len(places)), 1
        while len(alive) > _FEW and back <= end:
            before = places[alive] - back
            alive = alive[(before >= 0) & (there[before] == here[end - back])]
            back += 1
            lengths[alive] = back
        for i in alive.tolist():
            lengths[i] = common_suffix(there[: places[i] + 1], here)
        return places, lengths


def common_suffix(a: IntArray, b: IntArray) -> int:
    """Length of the longest common suffix."""
    n, size, most = 0, 64, min(len(a), len(b))
    while n < most:
        size = min(2 * size, most - n)
        differ = np.flatnonzero(
            a[len(a) - n - size : len(a) - n] != b[len(b) - n - size : len(b) - n]
        )
        if len(differ):
            return n + size - 1 - int(differ[-1])
        n += size
    return n

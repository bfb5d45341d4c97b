"""Where the end of a text occurs elsewhere, and how far back it does.

New tokens lengthen the matches that they continue, so following a text costs what the places of its
last token cost. Nothing is kept per substring: after an edit the end is looked up again.
"""

from __future__ import annotations

import numpy as np

from specllama.spec.history import History, Mark, Places
from specllama.spec.types import IntArray

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

    def at_least(self, length: int, most: int) -> list[int]:
        """The newest ``most`` places where ``length`` tokens or more agree, ascending."""
        places: list[int] = self.places[np.flatnonzero(self.lengths >= length)[-most:]].tolist()
        return places

    def follow(self, text: History) -> None:
        """Find the end of ``text``; ``within`` may have grown only if it is the text itself."""
        same = text is self._text and text.kept(self._mark) == self._mark.length
        known = self._mark.length if same else 0
        if len(text) > known:
            self.places, self.lengths = self._look_up(text, known)
        elif not same:
            self.places = self.lengths = np.empty(0, np.int64)
        self._text, self._mark = text, text.mark()

    def _look_up(self, text: History, known: int) -> tuple[Places, Places]:
        """Follow every place of the last token back, as far as tokens are new.

        From there on the matches are those of the first ``known`` tokens.
        """
        end = len(text) - 1
        there, here = self.within.array, text.array
        places = self.within.places(text[end])
        if self.within is text:
            places = places[:-1]
        lengths = np.ones(len(places), np.int64)
        alive, agree = np.arange(len(places)), 1
        while len(alive) and agree <= end:
            if not known and len(alive) <= _FEW:
                for i in alive.tolist():
                    lengths[i] = common_suffix(there[: places[i] + 1], here)
                break
            before = places[alive] - agree
            same = (before >= 0) & (there[before] == here[end - agree])
            alive, before = alive[same], before[same]
            if agree == end + 1 - known:
                lengths[alive] = agree + self.lengths[self.places.searchsorted(before)]
                break
            agree += 1
            lengths[alive] = agree
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

"""Other places of a text's end, and the number of tokens that agree there.

New tokens lengthen the matches that they continue, so following a text costs what the places of its
last token cost. Nothing is kept per substring: after an edit the end is looked up again.
"""

from __future__ import annotations

import numpy as np

from specllama.arrays import IntArray
from specllama.text_history import Follower, History, Places

_FEW = 4  # places compared one by one, each at the speed of memory
_DEEP = 64  # a longer match says nothing more, but for the few that are left


class Matches:
    """Places in one text where the end of another (or its own) also occurs.

    ``places`` are positions of the last token in ``within``, ascending; ``lengths[i]`` tells how
    many tokens up to there equal those up to the text's end, from 1 to at least 64 if so many do.
    The end itself is no place.
    """

    def __init__(self, within: History) -> None:
        self.within = within
        self.places: Places = np.empty(0, np.int64)
        self.lengths: Places = np.empty(0, np.int64)
        self._seen = Follower()
        self._there = Follower()
        self._known = 0  # tokens of ``within`` whose places were compared

    @property
    def longest(self) -> int:
        """Tokens of the longest match, 0 for none."""
        return int(self.lengths.max()) if len(self.lengths) else 0

    def at_least(self, length: int, most: int) -> list[int]:
        """Return the newest ``most`` places where at least ``length`` tokens agree, ascending."""
        places: list[int] = self.places[np.flatnonzero(self.lengths >= length)[-most:]].tolist()
        return places

    def follow(self, text: History) -> None:
        """Find the end of ``text`` in the whole of ``within``, as it is now."""
        kept, edited = self._seen.follow(text)
        known = 0 if edited else kept
        if len(text) > known:
            there, here = self.within.array, text.array
            places = self.within.places(text[-1])
            if self.within is text:
                places = places[:-1]
            elif self._there.follow(self.within)[1]:
                known = 0
            before = (self.places, self.lengths) if known else None
            new = len(text) - known
            # behind them stands what was written there since
            old = places.searchsorted(self._known + new) if known else len(places)
            self.lengths = agreement(there, here, places[:old], new, before, _DEEP)
            if old < len(places):
                more = agreement(there, here, places[old:], new, None, _DEEP)
                self.lengths = np.concatenate((self.lengths, more))
            self.places, self._known = places, len(there)
        elif edited:
            self.places = self.lengths = np.empty(0, np.int64)


def agreement(
    there: IntArray,
    here: IntArray,
    places: Places,
    new: int,
    before: tuple[Places, Places] | None,
    deepest: int,
) -> Places:
    """Count the tokens up to each place of ``there`` that equal the end of ``here``, [places].

    Args:
        places: where the last token of ``here`` stands in ``there``, ascending.
        new: tokens at the end of ``here`` that came after ``before``.
        before: every place of the token before those, and its agreement; None looks back anew.
        deepest: how far, at least; without a bound a text of one token would take for ever.
    """
    lengths = np.ones(len(places), np.int64)
    alive, agree = np.arange(len(places)), 1
    deepest = min(len(here), deepest if before is None else new + 1)
    while len(alive) and agree < deepest:
        if before is None and len(alive) <= _FEW:
            for i in alive.tolist():
                lengths[i] = common_suffix(there[: places[i] + 1], here)
            break
        back = places[alive] - agree
        same = (back >= 0) & (there[back] == here[len(here) - 1 - agree])
        alive, back = alive[same], back[same]
        if before is not None and agree == new:
            lengths[alive] = agree + before[1][before[0].searchsorted(back)]
            break
        agree += 1
        lengths[alive] = agree
    return lengths


def common_suffix(a: IntArray, b: IntArray) -> int:
    """Return the length of the longest common suffix."""
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

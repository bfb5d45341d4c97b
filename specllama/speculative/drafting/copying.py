"""A text as read by the sources that copy from it: once for all of them.

A copy is judged by more than the length of its match: a token that always followed the one before
it is a safer guess than one of many (the value after the same key). How likely a token follows the
last two is told from the counts of this text: the estimate backs off from two tokens to one to
none, each weighed against the number of different ways it went on (Witten and Bell 1991, method C).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specllama.speculative.matches import Matches
from specllama.text_history import Follower, History

Keys = npt.NDArray[np.int64]

_ANY = 0.02  # of a token that never followed
_BITS = 21  # of a token in a key: three fit, and no vocabulary has two million
_ONE = ((1 << _BITS) - 1) << _BITS  # a context of one token: no token has this number
_NO_KEY = (1 << 63) - 1  # after all others
_NEWEST = 4096  # tokens counted one by one before all are sorted again


class _Counts:
    """Counts of the tokens that followed each context, sorted; the newest in a dictionary.

    Args:
        keys: a context and a token in one number for each time, sorted.
    """

    def __init__(self, keys: Keys) -> None:
        new = np.ones(len(keys), np.bool_)
        np.not_equal(keys[1:], keys[:-1], out=new[1:])
        first = new.nonzero()[0]
        self._keys = np.append(keys[first], _NO_KEY)
        self._before = np.append(first, (len(keys), len(keys)))  # occurrences of all smaller keys
        # context -> [tokens that followed lately, ways the sorted part does not know, {way: count}]
        self._newest: dict[int, tuple[list[int], dict[int, int]]] = {}

    def add(self, context: int, token: int) -> None:
        (totals, after) = self._newest.setdefault(context, ([0, 0], {}))
        if token not in after:
            key = (context << _BITS) | token
            totals[1] += int(self._keys[self._keys.searchsorted(key)]) != key
        after[token] = after.get(token, 0) + 1
        totals[0] += 1

    def look_up(self, contexts: Keys, tokens: Keys) -> tuple[Keys, Keys, Keys]:
        """Count, after each context, the token, all tokens and the different tokens, each [n]."""
        low = contexts << _BITS
        keys = np.array((low, low + (1 << _BITS), low | tokens))
        at = self._keys.searchsorted(keys)
        begin, end, exact = self._before[at]
        total, ways = end - begin, at[1] - at[0]
        count = (self._before[at[2] + 1] - exact) * (self._keys[at[2]] == keys[2])
        for i, (context, token) in enumerate(zip(contexts.tolist(), tokens.tolist(), strict=True)):
            if (lately := self._newest.get(context)) is not None:
                (more, new), after = lately
                count[i] += after.get(token, 0)
                total[i] += more
                ways[i] += new
        return count, total, ways


class Backoff:
    """Counts of the tokens after one and two tokens of a text."""

    def __init__(self) -> None:
        self._seen = Follower()
        self._sorted = 0
        self._counts = _Counts(np.empty(0, np.int64))
        self._likely: dict[tuple[int, ...], tuple[float, ...]] = {}  # sources often agree

    def follow(self, text: History) -> None:
        """Count the new tokens of ``text``; forget those that were cut off."""
        read, edited = self._seen.follow(text)
        if edited or not read or len(text) - self._sorted > _NEWEST:
            a = text.array.astype(np.int64)
            two = (((a[:-2] << _BITS) | a[1:-1]) << _BITS) | a[2:]
            two.sort()
            self._counts = _Counts(np.concatenate((two, (_ONE << _BITS) | (two >> _BITS))))
            if len(text) > 1:  # nothing follows the last pair
                self._counts.add(_ONE | text[-2], text[-1])
            self._sorted = len(text)
            self._likely.clear()
        else:
            for i in range(read, len(text)):
                if i >= 1:
                    self._counts.add(_ONE | text[i - 1], text[i])
                if i >= 2:
                    self._counts.add((text[i - 2] << _BITS) | text[i - 1], text[i])
                self._likely.clear()

    def likely(self, copied: Sequence[int]) -> tuple[float, ...]:
        """Return the probability of each of these tokens, given the text and those before it."""
        key = tuple(copied)
        if key not in self._likely:
            self._likely[key] = self._chances(key)
        return self._likely[key]

    def _chances(self, copied: tuple[int, ...]) -> tuple[float, ...]:
        text = self._seen.text
        if not text or not copied:
            return (_ANY,) * len(copied)
        known = min(len(text), 2)
        behind = np.array([*text[-known:], *copied], np.int64)
        tokens = behind[known:]
        pairs = (behind[:-2] << _BITS) | behind[1:-1]
        n, second = len(tokens), 2 - known  # the first token that the text has two before
        count, total, ways = self._counts.look_up(
            np.concatenate((_ONE | behind[known - 1 : -1], pairs)),
            np.concatenate((tokens, tokens[second:])),
        )
        ways = np.maximum(ways, 1)  # where nothing followed, the estimate stays
        total += ways
        p = (count[:n] + ways[:n] * _ANY) / total[:n]
        p[second:] = (count[n:] + ways[n:] * p[second:]) / total[n:]
        return tuple(p.tolist())


class TextFollower:
    """A reader of one text: it tracks the earlier places of its end, and its habits."""

    def __init__(self) -> None:
        self._seen = Follower()
        self.habits = Backoff()
        self.matches = Matches(self._seen.text)

    @property
    def text(self) -> History:
        return self.matches.within

    def follow(self, tokens: Sequence[int]) -> History:
        """Read the new part of ``tokens``."""
        read, edited = self._seen.follow(tokens)
        text = self._seen.text
        if text is not self.matches.within:
            self.matches = Matches(text)
        elif read == len(text) and not edited:
            return text  # another source asked before
        self.matches.follow(text)
        self.habits.follow(text)
        return text

"""How likely a token follows the last two, by what followed them in this text.

A copy is judged by more than the length of its match: a token that always follows the one before it
is safer than one of many that do (the value behind the same key). The estimate backs off from two
tokens to one to none, each weighed against the number of different ways it went on (Witten and Bell
1991, method C).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_ANY = 0.02  # of a token that never followed


class Backoff:
    """Counts of what followed one and two tokens of a text; constant time per token."""

    def __init__(self) -> None:
        self._one: dict[int, dict[int, int]] = {}
        self._two: dict[tuple[int, int], dict[int, int]] = {}
        self._n_one: dict[int, int] = {}
        self._n_two: dict[tuple[int, int], int] = {}
        self._last: tuple[int, int] | None = None
        self._newest: int | None = None

    def extend(self, tokens: Iterable[int]) -> None:
        """The text goes on with ``tokens``."""
        one, two, n_one, n_two = self._one, self._two, self._n_one, self._n_two
        for token in tokens:
            newest, last = self._newest, self._last
            if newest is not None:
                after = one.setdefault(newest, {})
                after[token] = after.get(token, 0) + 1
                n_one[newest] = n_one.get(newest, 0) + 1
                if last is not None:
                    after = two.setdefault(last, {})
                    after[token] = after.get(token, 0) + 1
                    n_two[last] = n_two.get(last, 0) + 1
                self._last = newest, token
            self._newest = token

    def likely(self, copied: Sequence[int]) -> tuple[float, ...]:
        """The probability of each of these tokens, behind the text and those before it."""
        one, two = self._one, self._two
        newest, last = self._newest, self._last
        out = []
        for token in copied:
            p = _ANY
            if newest is not None:
                if (after := one.get(newest)) is not None:
                    ways = len(after)
                    p = (after.get(token, 0) + ways * p) / (self._n_one[newest] + ways)
                if last is not None and (after := two.get(last)) is not None:
                    ways = len(after)
                    p = (after.get(token, 0) + ways * p) / (self._n_two[last] + ways)
                last = newest, token
            newest = token
            out.append(p)
        return tuple(out)

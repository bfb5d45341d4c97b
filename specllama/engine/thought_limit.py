"""A budget for thoughts: after N tokens, only tokens that end the thought are allowed.

It is a constraint on the next token as a grammar is, a function of the tokens before: drafts follow
it, and the text is the same with and without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
import numpy.typing as npt

from specllama.arrays import IntArray
from specllama.replies.thoughts import Reader

_LONGEST = 4  # bytes of a character


class ThoughtLimit:
    """A constraint that closes a thought as the template would.

    Args:
        reader: at the place in the reply where the first token comes.
        limit: tokens of thoughts that may still come.
        closing: tokens that stand between a thought and its answer.
    """

    def __init__(self, reader: Reader, limit: int, closing: Sequence[int]) -> None:
        self._reader: Reader | None = reader.fork()
        self._left = limit
        self._closing = tuple(closing)
        self._forced: int | None = None
        self._tail = b""
        self._look()

    def allowed(self, ids: IntArray) -> npt.NDArray[np.bool_]:
        if self._forced is None:
            return np.ones(len(ids), np.bool_)
        return np.asarray(ids == self._closing[self._forced])

    def accept(self, token: int) -> None:
        if self._forced is not None:
            self._forced += 1
            if self._forced == len(self._closing):
                self._forced = self._reader = None
        elif self._reader is not None:
            unit = self._reader.spelling.unit(token)
            was_thinking = self._reader.thinking
            self._reader.feed(unit)
            if self._reader.thinking:
                self._left -= was_thinking
                self._tail = (self._tail + self._reader.spelling.bytes(unit))[-_LONGEST:]
                self._look()
            elif was_thinking:
                self._reader = None  # it ended by itself

    def fork(self) -> ThoughtLimit:
        other = copy(self)
        other._reader = self._reader and self._reader.fork()
        return other

    def ahead(self, most: int, habits: dict[bytes, dict[bytes, float]]) -> list[tuple[int, float]]:
        left = () if self._forced is None else self._closing[self._forced :]
        return [(token, 1.0) for token in left[:most]]

    def _look(self) -> None:
        """Force the end once the budget is used up, but not within a character."""
        thinking = self._reader is not None and self._reader.thinking
        whole = self._left <= -_LONGEST or not _cut_off(self._tail)
        if thinking and self._left <= 0 and whole and self._closing:
            self._forced = 0


def _cut_off(text: bytes) -> bool:
    """True if a text ends within a character of UTF-8."""
    for n in range(1, min(len(text), _LONGEST) + 1):
        byte = text[-n]
        if byte < 0x80:
            return False
        if byte >= 0xC0:
            return n < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False

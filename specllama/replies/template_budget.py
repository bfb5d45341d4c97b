"""The budget for rendering one chat template: the size of each value, of all together, and time.

A template can name one list many times over (``[x, x]`` holds two pointers and prints as two
lists), so a value is measured as if nothing in it were shared. Every value that a template builds
is measured when it is built. So whatever exists is small enough to be printed, compared, hashed or
sorted, and no single operation needs a guard of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from contextvars import ContextVar
from itertools import chain
from typing import Any

MAX_STEPS = 300_000  # operations: loop turns, calls, filters, comparisons, pieces of output
MAX_SECONDS = 2.0  # of CPU time: on a busy machine a template is not to blame for taking longer
MAX_INT_BITS = 16 * 1024  # the time to divide and print integers grows with the square
_BYTES_PER_CHAR = 4  # the widest Python stores
_SPARE_BYTES = 64 * 1024  # so that a small limit on texts leaves room for empty containers
_BUILT_IN_ALL = 16  # times the largest single value; templates append to one text turn by turn
_REMEMBERED = 10_000  # sizes

_CONTAINERS = (list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView)


class TooMuch(Exception):
    """An error: the template exceeds its budget."""


class Budget:
    """The budget of one rendering.

    Args:
        max_chars: the longest text; other values may take as many bytes as its widest form.
    """

    __slots__ = ("_built", "_deadline", "_max_bytes", "_max_chars", "_sizes", "_steps")

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._max_bytes = _BYTES_PER_CHAR * max_chars + _SPARE_BYTES
        self._built = 0
        self._steps = 0
        self._deadline = time.thread_time() + MAX_SECONDS
        # sizes by id; the value is kept as well, so that its id stays its own
        self._sizes: dict[int, tuple[Any, int]] = {}

    def step(self) -> None:
        """Count a step before every operation.

        Raises:
            TooMuch: too many of them, or out of time.
        """
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise TooMuch("the chat template loops too long")
        if time.thread_time() > self._deadline:
            raise TooMuch("the chat template takes too long")

    def room(self, chars: int) -> None:
        """Raise TooMuch if a text of this many characters is too long."""
        if chars > self._max_chars:
            raise TooMuch("the chat template builds a text that is too long")

    def size(self, value: Any) -> int:
        """Return the bytes of a value and everything in it, counted as often as it appears.

        Raises:
            TooMuch: more than there is room for.
        """
        if isinstance(value, str):
            self.room(len(value))
        elif isinstance(value, _CONTAINERS):
            return self._deep_size(value)
        elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise TooMuch("a number in the chat template is too large")
        return sys.getsizeof(value)

    def keep(self, value: Any) -> Any:
        """Return the value, after counting it as built."""
        self.size(value)
        self._built += sys.getsizeof(value)
        if self._built > _BUILT_IN_ALL * self._max_bytes:
            raise TooMuch("the chat template builds too much")
        return value

    def _deep_size(self, value: Any) -> int:
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        total = sys.getsizeof(value)
        items = chain(value.keys(), value.values()) if isinstance(value, dict) else value
        for item in items:
            total += self.size(item)
            if total > self._max_bytes:
                raise TooMuch("the chat template builds a list that is too large")
        if len(self._sizes) >= _REMEMBERED:
            self._sizes.clear()  # bounds what is remembered here
        self._sizes[id(value)] = (value, total)
        return total


budget: ContextVar[Budget] = ContextVar("budget")


def counted(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items; count each as a step, and bound all together as one value."""
    current = budget.get()
    total = 0
    for item in items:
        current.step()
        total += current.size(item)
        if total > current._max_bytes:
            raise TooMuch("the chat template loops over too much")
        yield item

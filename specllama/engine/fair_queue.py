"""A queue that is fair among clients: they take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """The waiting items, by client; those of one client in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}  # the client whose turn it is comes first

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[T]:
        return (one for queue in self._waiting.values() for one in queue)

    def put(self, client: str, one: T) -> None:
        self._waiting.setdefault(client, deque()).append(one)

    @property
    def first(self) -> T:
        """The next item of ``pop``."""
        return next(iter(self))

    def pop(self) -> T:
        """Remove and return the first; its client then comes after the others."""
        client, queue = next(iter(self._waiting.items()))
        del self._waiting[client]
        one = queue.popleft()
        if queue:
            self._waiting[client] = queue
        return one

    def remove(self, client: str, one: T) -> bool:
        """Remove an item that its client no longer wants; return True if it waited."""
        queue = self._waiting.get(client)
        if queue is None or one not in queue:
            return False
        queue.remove(one)
        if not queue:
            del self._waiting[client]
        return True

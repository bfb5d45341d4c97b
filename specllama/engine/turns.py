"""What waits for something that takes one at a time: clients take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """What waits, by client; that of one client in the order in which it came."""

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
        """What ``pop`` would take."""
        return next(iter(self))

    def pop(self) -> T:
        """Take the first; its client comes after the others then."""
        client, queue = next(iter(self._waiting.items()))
        del self._waiting[client]
        one = queue.popleft()
        if queue:
            self._waiting[client] = queue
        return one

    def remove(self, client: str, one: T) -> bool:
        """Take one that its client wants no longer; whether it waited."""
        queue = self._waiting.get(client)
        if queue is None or one not in queue:
            return False
        queue.remove(one)
        if not queue:
            del self._waiting[client]
        return True

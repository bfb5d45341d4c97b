"""What clients have the server hold at once: requests that are answered, and bytes of bodies."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from specllama.server.refusals import Refusal, shutting_down

IN_ALL = 4  # what all clients have together: so many times as much as one of them


@dataclass(eq=False, slots=True)
class Load:
    """One request; ``bytes``: of its body, so far."""

    traffic: Traffic
    client: str
    bytes: int = 0

    def take(self, size: int) -> None:
        """More of the body came.

        Raises:
            Refusal: it is too much together with what other requests brought.
        """
        self.traffic.take(self.client, size)
        self.bytes += size

    @asynccontextmanager
    async def arriving(self, seconds: float) -> AsyncIterator[None]:
        """While the body comes.

        Raises:
            Refusal: it did not come within so long, or the server ends first.
        """
        try:
            async with asyncio.timeout(seconds) as limit:
                self.traffic.limits.add(limit)
                try:
                    yield
                finally:
                    self.traffic.limits.discard(limit)
        except TimeoutError:
            if self.traffic.cut:
                raise shutting_down() from None
            raise Refusal(408, f"the body did not come within {seconds:g} s", code="slow") from None


class Traffic:
    """The requests of one server.

    Args:
        most: bytes of one client.

    Attributes:
        requests: that are answered now and may take long.
        closing: no more are taken.
        cut: bodies that did not come yet are not waited for.
        limits: of the bodies that come.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.requests = 0
        self.closing = False
        self.cut = False
        self.limits: set[asyncio.Timeout] = set()
        self._bytes: Counter[str] = Counter()  # by client

    @contextmanager
    def request(self, client: str, *, long: bool) -> Iterator[Load]:
        load = Load(self, client)
        self.requests += long
        try:
            yield load
        finally:
            self.requests -= long
            self._bytes[client] -= load.bytes
            if not self._bytes[client]:
                del self._bytes[client]

    def take(self, client: str, size: int) -> None:
        whose = "this client" if self._bytes[client] + size > self.most else ""
        if not whose and self._bytes.total() + size > IN_ALL * self.most:
            whose = "all clients"
        if whose:
            raise Refusal(
                429,
                f"requests of {whose} hold too many bytes; send them one after another",
                "rate_limit_error",
                "too_much",
                headers={"Retry-After": "2"},
            )
        self._bytes[client] += size

    def cut_off(self) -> None:
        """What has not come by now is not waited for."""
        self.cut = True
        for limit in self.limits:
            limit.reschedule(0.0)

"""The load that clients put on the server: requests being answered, and bytes of bodies."""

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
    """The load of one request; ``bytes``: those of its body that have arrived."""

    traffic: Traffic
    client: str
    bytes: int = 0

    def take(self, size: int) -> None:
        """Count a further part of the body.

        Raises:
            Refusal: it is too much together with the bodies of other requests.
        """
        self.traffic.take(self.client, size)
        self.bytes += size

    @asynccontextmanager
    async def arriving(self, seconds: float) -> AsyncIterator[None]:
        """Limit the time in which the body arrives.

        Raises:
            Refusal: it did not arrive in time, or the server ends first.
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
        requests: those being answered that may take long.
        closing: no more are accepted.
        cut: bodies that have not arrived are not awaited.
        limits: time limits of the bodies that arrive.
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
        """Stop waiting for bodies that have not arrived."""
        self.cut = True
        for limit in self.limits:
            limit.reschedule(0.0)

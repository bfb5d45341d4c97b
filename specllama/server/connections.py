"""Connections: how many one address may have, and how long the head of a request may take.

A connection that says nothing, or a header every now and then, costs no lane, but a socket and some
memory for as long as it likes to.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0  # from the first to the last byte of the head of a request
_TOO_MANY = (
    b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 2\r\n"
    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
)


def protocol(per_client: int) -> type[asyncio.Protocol]:
    """For uvicorn; ``per_client``: connections of one address."""
    connected: Counter[str] = Counter()

    class Limited(H11Protocol):
        _address = ""  # counted under it
        _slow: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            line = transport.get_extra_info("socket")
            if line.family in (socket.AF_INET, socket.AF_INET6):  # asyncio leaves this out here
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            address = self.client[0] if self.client else ""
            if connected[address] >= per_client:
                transport.write(_TOO_MANY)
                transport.close()
                return
            connected[address] += 1
            self._address = address
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._slow is not None:
                self._slow.cancel()
            if self._address:
                connected[self._address] -= 1
                if not connected[self._address]:
                    del connected[self._address]

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def _watch(self) -> None:
            """Only the head of a request is waited for so; its body has a limit of its own, and
            between two requests uvicorn looks."""
            if self.conn.their_state is h11.IDLE:
                if self._slow is None:
                    self._slow = self.loop.call_later(HEAD_S, self.transport.close)
            elif self._slow is not None:
                self._slow.cancel()
                self._slow = None

    return Limited

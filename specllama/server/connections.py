"""Connections: how many there may be, how long a head may take, how they end.

A silent or very slow connection costs no lane, but it holds a socket and some memory. A body may
come in so many small parts that parsing them takes seconds. If a request is answered before its
body is read, that body may never come.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Callable, Container
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0  # from the first to the last byte of the head of a request
LINGER_S = 5.0  # for a client to take the last answer; again for as long as it takes some of it
_READ = 16 << 10  # bytes that are parsed at once, before others have their turn
_PARTS = 1024  # of a body that may be small
_PART = 64  # bytes of a part on average, beyond those
_TOO_MANY = (
    b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 2\r\n"
    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
)


class _Parting:
    """A transport that ends so that the client can read the last answer.

    If a socket is closed while it has unread bytes, it is reset, and the answer may be lost on the
    way. So our side ends first; later bytes are dropped unread until the client ends, too.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        left: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._left = left
        self._look: asyncio.TimerHandle | None = None
        self._unsent = 0
        self.parting = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.parting or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        self.parting = True
        self._left()
        with contextlib.suppress(OSError):  # the client has left already
            self._transport.write_eof()
        with contextlib.suppress(RuntimeError):  # it was not paused
            self._transport.resume_reading()
        self._unsent = self._transport.get_write_buffer_size()
        self._look = self._loop.call_later(LINGER_S, self._progress)

    def _progress(self) -> None:
        unsent = self._transport.get_write_buffer_size()
        if not unsent or unsent >= self._unsent:
            self._transport.abort()
        else:
            self._unsent = unsent
            self._look = self._loop.call_later(LINGER_S, self._progress)

    def over(self) -> None:
        if self._look is not None:
            self._look.cancel()


class _Counting(h11.Connection):
    """A connection that refuses a body of very many tiny parts: each costs much time."""

    def __init__(self, most: int) -> None:
        super().__init__(h11.SERVER, most)
        self._parts = self._bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._parts += 1
            self._bytes += len(event.data)
            if self._parts > _PARTS and self._bytes < _PART * self._parts:
                raise h11.RemoteProtocolError("the body comes in too many parts")
        elif isinstance(event, h11.Request):
            self._parts = self._bytes = 0
        return event


def protocol(per_client: int, most: int, proxies: Container[str] = ()) -> type[asyncio.Protocol]:
    """Make the protocol class that uvicorn uses for connections.

    Args:
        per_client: connections of one address.
        most: of all.
        proxies: addresses that stand for many clients.
    """
    connected: Counter[str] = Counter()

    class Limited(H11Protocol):
        _address: str | None = None  # counted under it
        _slow: asyncio.TimerHandle | None = None
        _end: _Parting

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self._end = _Parting(transport, self.loop, self._leave)
            super().connection_made(self._end)  # type: ignore[arg-type]
            self.conn = _Counting(self.config.h11_max_incomplete_event_size or _READ)
            if hasattr(transport, "max_size"):  # asyncio reads 256 KiB at once
                transport.max_size = _READ
            line = transport.get_extra_info("socket")
            if line.family in (socket.AF_INET, socket.AF_INET6):  # asyncio leaves this out here
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            address = self.client[0] if self.client else ""
            full = address not in proxies and connected[address] >= per_client
            if full or connected.total() >= most:
                transport.write(_TOO_MANY)
                transport.close()
                return
            connected[address] += 1
            self._address = address
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._end.over()
            if self._slow is not None:
                self._slow.cancel()
            if self._address is not None:
                connected[self._address] -= 1
                if not connected[self._address]:
                    del connected[self._address]

        def data_received(self, data: bytes) -> None:
            if not self._end.parting:
                super().data_received(data)
                self._watch()

        def send_400_response(self, msg: str) -> None:
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                super().send_400_response(msg)
            else:  # an answer was begun
                self.transport.close()

        def _leave(self) -> None:
            """Stop answering: the client has left."""
            if self.cycle is not None and not self.cycle.response_complete:
                self.cycle.disconnected = True
                self.cycle.message_event.set()

        def _watch(self) -> None:
            """Limit the time for the head of a request; its body has a limit of its own, and
            uvicorn limits the time between two requests."""
            if self.conn.their_state is h11.IDLE:
                if self._slow is None:
                    self._slow = self.loop.call_later(HEAD_S, self.transport.close)
            elif self._slow is not None:
                self._slow.cancel()
                self._slow = None

    return Limited

"""A server from its socket to its last answer.

Connections are limited: how many there may be, how long a head may take, how they end. A silent or
very slow one costs no lane, but it holds a socket and some memory. A body may come in so many small
parts that parsing them takes seconds. If a request is answered before its body is read, that body
may never come.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import resource
import socket
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from specllama.errors import UsageError
from specllama.server.guard import IN_ALL
from specllama.server.routes import make_app
from specllama.server.service import Service

logger = logging.getLogger("specllama.server")

DRAIN_S = 30.0
_HINTS = {errno.EADDRINUSE: "choose another --port", errno.EACCES: "choose a --port from 1024 on"}
_LOOK_S = 0.1
_LAST_S = 2.0  # for those that are cut off to take the last word
_DESCRIPTORS = 128  # besides those of connections
HEAD_S = 20.0  # from the first to the last byte of the head of a request
LINGER_S = 5.0  # for a client to end, too, once it has taken the last answer
STALL_S = 30.0  # a client that takes nothing of its answer for so long is dropped
_KNOCK_S = 0.05  # until the system of a client that has left has answered; again, twice as long
_BUFFER = 16 << 10  # bytes of an answer that our system keeps for a client, besides its own
_READ = 16 << 10  # bytes that are parsed at once, before others have their turn
_PARTS = 1024  # of a body that may be small
_PART = 64  # bytes of a part on average, beyond those
_TOO_MANY = (
    b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 2\r\n"
    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
)


def bind(host: str, port: int) -> socket.socket:
    """Open a socket that listens.

    Raises:
        UsageError: the address is taken, or not of this machine.
    """
    try:
        found = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, *_, address = found[0]
        listening = socket.create_server(address[:2], family=family, backlog=512)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        return listening
    except OSError as error:
        said = error.strerror or str(error)
        hint = _HINTS.get(error.errno or 0, "--host is a name or an address of this machine")
        raise UsageError(f"cannot listen at {host}:{port}: {said}", hint) from None


def _beside(listening: socket.socket) -> list[socket.socket]:
    """Return a socket at the other loopback address, which clients may take "localhost" for."""
    host, port = listening.getsockname()[:2]
    other = {"127.0.0.1": "::1", "::1": "127.0.0.1"}.get(host)
    try:
        return [bind(other, port)] if other else []
    except UsageError:  # this machine has none, or somebody else listens there
        return []


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(eq=False)
class _Parting:
    """A transport that ends so that the client can read the last answer.

    If a socket is closed while it has unread bytes, it is reset, and the answer may be lost on the
    way. So our side ends first; later bytes are dropped unread until the client ends, too.
    """

    _transport: asyncio.Transport
    _loop: asyncio.AbstractEventLoop
    _left: Callable[[], None]
    _look: asyncio.TimerHandle | None = None
    parting: bool = False

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
        self._linger()

    def _linger(self) -> None:
        unsent = self._transport.get_write_buffer_size()  # ``STALL_S`` is for that
        again = self._linger if unsent else self._transport.abort
        self._look = self._loop.call_later(LINGER_S, again)

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


class _Connection(H11Protocol):
    """One connection: how long its client may take, and how it ends."""

    _slow: asyncio.TimerHandle | None = None
    _untaken: asyncio.TimerHandle | None = None
    _knocks: asyncio.TimerHandle | None = None
    _half = False  # the client has ended its side
    _end: _Parting

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._end = _Parting(transport, self.loop, self._leave)
        super().connection_made(self._end)  # type: ignore[arg-type]
        self.conn = _Counting(self.config.h11_max_incomplete_event_size or _READ)
        if hasattr(transport, "max_size"):  # asyncio reads 256 KiB at once
            transport.max_size = _READ
        transport.set_write_buffer_limits(0)  # what the system does not take is not taken
        self._line = line = transport.get_extra_info("socket")
        if line.family in (socket.AF_INET, socket.AF_INET6):  # asyncio leaves this out here
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end.over()
        for timer in (self._slow, self._untaken, self._knocks):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        if not self._end.parting:
            super().data_received(data)
            self._watch()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection while a request that came whole is answered: its client may have
        ended its side alone, as ``nc -N`` does."""
        cycle = self.cycle
        answers = cycle is not None and not (cycle.more_body or cycle.response_complete)
        self._half = answers and not self._end.parting
        if self._half:
            with contextlib.suppress(OSError), self._line.dup() as line:
                line.send(b"\0", socket.MSG_OOB)
            self._knock(_KNOCK_S)
        return self._half

    def _knock(self, seconds: float) -> None:
        """Drop a client that has left: its system refuses the urgent byte, which who still
        listens never reads."""
        if self._line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        elif seconds < LINGER_S:
            self._knocks = self.loop.call_later(seconds, self._knock, 2 * seconds)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half and self.cycle.response_complete:  # no further request was sent
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._drop(math.inf)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._untaken is not None:
            self._untaken.cancel()

    def _drop(self, before: float) -> None:
        """Drop a client that took nothing meanwhile, else look again later."""
        unsent = self._end.get_write_buffer_size()
        if unsent < before:
            self._untaken = self.loop.call_later(STALL_S, self._drop, unsent)
            return
        state = self.scope["state"]
        state["cut"] = f"the client took nothing for {STALL_S:g} s"
        logger.info("%s was dropped: it took nothing of its answer for %g s, %s",
                    state["client"] or "no key", STALL_S, state["id"])  # fmt: skip
        self.transport.abort()

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


def protocol(per_client: int, most: int, proxies: Container[str] = ()) -> type[asyncio.Protocol]:
    """Make the protocol class that uvicorn uses for connections.

    Args:
        per_client: connections of one address.
        most: of all.
        proxies: addresses that stand for many clients.
    """
    connected: Counter[str] = Counter()

    class Limited(_Connection):
        _address: str | None = None  # counted under it

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            address = self.client[0] if self.client else ""
            full = address not in proxies and connected[address] >= per_client
            if full or connected.total() >= most:
                transport.write(_TOO_MANY)
                self._end.close()
                return
            connected[address] += 1
            self._address = address

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._address is not None:
                connected[self._address] -= 1
                if not connected[self._address]:
                    del connected[self._address]

    return Limited


class _Server(uvicorn.Server):
    """A uvicorn server that wakes only for requests: it awaits ``end`` and never polls."""

    def __init__(self, config: uvicorn.Config, end: asyncio.Event) -> None:
        super().__init__(config)
        self._end = end

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the command line."""
        yield

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._end.wait()


def run(service: Service, listening: socket.socket, **how: Any) -> None:
    """See ``serve``, which this runs in an event loop."""
    asyncio.run(serve(service, listening, **how))


async def serve(
    service: Service,
    listening: socket.socket,
    *,
    stop: Event,
    ready: Callable[[], None],
    drain_s: float = DRAIN_S,
    load: bool = True,
) -> None:
    """Serve until ``stop`` is set, then give running requests ``drain_s`` seconds to end.

    Args:
        load: load the first model at once.

    Raises:
        SpecllamaError, Refusal: that model cannot be loaded.
    """
    config = uvicorn.Config(
        make_app(service),
        http=protocol(service.access.connections, _connections(service), service.access.proxies),
        proxy_headers=bool(service.access.proxies),
        forwarded_allow_ips=list(service.access.proxies),
        loop="asyncio",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,  # the guard's: uvicorn's is made anew every second
        timeout_keep_alive=75,
        h11_max_incomplete_event_size=64 << 10,
    )
    # its warnings are of clients that speak no HTTP, and advise packages that would not help
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    end = asyncio.Event()
    server = _Server(config, end)
    serving = asyncio.create_task(server.serve(sockets=[listening, *_beside(listening)]))
    stopped = _awaited(stop)
    begun = asyncio.create_task(service.models.begin(load=load))
    failed: BaseException | None = None
    try:
        await asyncio.wait({serving, stopped, begun}, return_when=asyncio.FIRST_COMPLETED)
        if begun.done() and (failed := begun.exception()) is None:
            while not (server.started or serving.done()):
                await asyncio.sleep(_LOOK_S)
            ready()
            await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
        await _drained(service, drain_s)
    finally:
        # who did not take the last word by now is cut off, and that is no news
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        end.set()
        server.should_exit = True
        server.force_exit = True
        await service.models.close()
        await asyncio.gather(begun, return_exceptions=True)  # one that was cut off is no news
        await serving
        for connection in list(server.server_state.connections):
            connection.transport.abort()  # a socket outlives its event loop otherwise
        await asyncio.sleep(0)  # the loop closes them in its next round
    if failed is not None:
        raise failed


def _awaited(stop: Event) -> asyncio.Future[None]:
    """Return a future that is done when another thread, or a signal, sets ``stop``."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[None] = loop.create_future()

    def told() -> None:
        if not stopped.done():
            stopped.set_result(None)

    def wait() -> None:
        stop.wait()
        with contextlib.suppress(RuntimeError):  # the loop is over
            loop.call_soon_threadsafe(told)

    Thread(target=wait, name="specllama-stop", daemon=True).start()
    return stopped


def _connections(service: Service) -> int:
    """Return the most connections of all clients, within the process's limit."""
    most = IN_ALL * service.access.connections
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft - _DESCRIPTORS))


async def _drained(service: Service, seconds: float) -> None:
    """Let requests end; then cut off the others with an error."""
    queues, traffic = [model.queue for model in service.models.all.values()], service.traffic
    for queue in queues:
        queue.closing = True
    traffic.closing = True
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while traffic.requests and loop.time() < until:
        await asyncio.sleep(_LOOK_S)
    for queue in queues:
        queue.cut_off()
    traffic.cut_off()
    until = loop.time() + _LAST_S
    while traffic.requests and loop.time() < until:
        await asyncio.sleep(_LOOK_S)
    await asyncio.sleep(_LOOK_S)  # the last words cross the network

"""A server from its socket to its last answer."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

import uvicorn

from specllama.errors import UsageError
from specllama.server.app import make_app
from specllama.server.connections import protocol
from specllama.server.service import Service
from specllama.server.traffic import IN_ALL

DRAIN_S = 30.0
_HINTS = {
    errno.EADDRINUSE: "choose another --port",
    errno.EACCES: "choose a --port from 1024 on",
}
_LOOK_S = 0.1
_LAST_S = 2.0  # for those that are cut off to take the last word
_DESCRIPTORS = 128  # besides those of connections


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
        return socket.create_server(address[:2], family=family, backlog=512)
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


def run(
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
    asyncio.run(_run(service, listening, stop, ready, drain_s, load))


async def _run(
    service: Service,
    listening: socket.socket,
    stop: Event,
    ready: Callable[[], None],
    drain_s: float,
    load: bool,
) -> None:
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
    """Return the most connections of all clients; raise the process's limit for them if allowed."""
    most = IN_ALL * service.access.connections
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = most + _DESCRIPTORS
        if soft != resource.RLIM_INFINITY and soft < needed:
            more = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            most = max(1, more - _DESCRIPTORS)
    return most


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

"""A server from its socket to its last answer."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event

import uvicorn

from specllama.errors import SpecllamaError, UsageError
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
    """A socket that listens.

    Raises:
        UsageError: the address is taken, or not of this machine.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=512)
    except OSError as error:
        said = error.strerror or str(error)
        hint = _HINTS.get(error.errno or 0, "--host is a name or an address of this machine")
        raise UsageError(f"cannot listen at {host}:{port}: {said}", hint) from None


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the command line's."""
        yield


def run(
    service: Service,
    listening: socket.socket,
    *,
    stop: Event,
    ready: Callable[[], None],
    drain_s: float = DRAIN_S,
) -> None:
    """Serve until ``stop`` is set, then let what is being written end, for so long.

    Raises:
        SpecllamaError: the model cannot be loaded.
    """
    asyncio.run(_run(service, listening, stop, ready, drain_s))


async def _run(
    service: Service,
    listening: socket.socket,
    stop: Event,
    ready: Callable[[], None],
    drain_s: float,
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
        timeout_keep_alive=75,
        h11_max_incomplete_event_size=64 << 10,
    )
    # its warnings are of clients that speak no HTTP, and advise packages that would not help
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    load = asyncio.create_task(service.queue.start())
    failed: SpecllamaError | None = None
    try:
        while not stop.is_set() and not serving.done():
            if load.done() and not load.cancelled() and failed is None:
                try:
                    load.result()
                except SpecllamaError as error:
                    failed = error
                    break
                if not server.started:
                    await asyncio.sleep(_LOOK_S)
                    continue
                ready()
                break
            await asyncio.sleep(_LOOK_S)
        while not stop.is_set() and not serving.done() and failed is None:
            await asyncio.sleep(_LOOK_S)
        await _drained(service, drain_s)
    finally:
        # who did not take the last word by now is cut off, and that is no news
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        server.should_exit = True
        server.force_exit = True
        await asyncio.to_thread(service.queue.host.close)
        await asyncio.gather(load, return_exceptions=True)  # one that was cut off is no news
        await serving
        for connection in list(server.server_state.connections):
            connection.transport.abort()  # a socket outlives its event loop otherwise
        await asyncio.sleep(0)  # the loop closes them in its next round
    if failed is not None:
        raise failed


def _connections(service: Service) -> int:
    """Of all clients; the process is allowed as many descriptors where it may allow itself."""
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
    """Let requests end; those that are left then hear that they are cut off."""
    queue, traffic = service.queue, service.traffic
    queue.closing = traffic.closing = True
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while traffic.requests and loop.time() < until:
        await asyncio.sleep(_LOOK_S)
    queue.cut_off()
    traffic.cut_off()
    until = loop.time() + _LAST_S
    while traffic.requests and loop.time() < until:
        await asyncio.sleep(_LOOK_S)
    await asyncio.sleep(_LOOK_S)  # the last words cross the network

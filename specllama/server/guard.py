"""The guard before all routes: it checks the host, origin, key, size and load of a request.

A page in a browser can send requests to any address of this machine. ``Origin`` holds the page's
own name; if a name of its own was made to point here (DNS rebinding), ``Host`` holds that. Neither
is let in unless it was named when the server was started.

Pages of programs on this machine (Electron, Tauri, VS Code) name a scheme that no page of the web
can have; they are let in. ``null`` is not: any page of the web can put a frame into a sandbox and
send requests under that name.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from email.utils import formatdate

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specllama.server.exchange import Json
from specllama.server.refusals import Refusal, busy, refusal, shutting_down, spelled
from specllama.settings.hardware import is_loopback
from specllama.text import sanitize_line

logger = logging.getLogger("specllama.server")

BODY_S = 60.0  # for a further part of a body
OPEN = ("/health", "/v1/health", "/ping")  # without a key and without a name of this machine
_UNTOLD = (*OPEN, "/metrics")  # in the log: they are asked for every few seconds
# also answered while the server ends: they show what it still does
_FIGURES = ("/metrics", "/slots", "/load", "/api/ps")
_METHODS = "GET, POST, DELETE, OPTIONS"
_HEADERS = 200  # of one request
_PROGRAMS = ("app://", "file://", "tauri://", "vscode-webview://", "vscode-file://")
_PLAIN = ("", "identity")
_FORM = "application/x-www-form-urlencoded"
# they call every body a form, and documentation is full of them; a page may not send such a name
# without permission
_NO_BROWSERS = ("curl/", "Wget/")
_GIVEN_ID = re.compile(r"[!-~]{1,128}")
IN_ALL = 4  # what all clients have together: so many times as much as one of them
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::\d{1,5})?")


@dataclass(slots=True)
class Access:
    """The rules for letting a request in.

    Attributes:
        hosts: names besides loopback that requests may use for this server.
        origins: of pages besides those of this machine that may read answers; "*" is every one.
        keys: one of them has to be sent, in UTF-8 or in Latin-1; none: no key is required.
        body: most bytes of a request.
        bodies: most bytes of all requests of one client that are answered at once.
        connections: most of one address.
        proxies: addresses whose ``X-Forwarded-For`` names the client.
    """

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    body: int = 8 << 20
    bodies: int = 64 << 20
    connections: int = 256  # the queue, the lanes, and as many that only look
    proxies: tuple[str, ...] = ()

    def refused(self, method: str, path: str, headers: Headers) -> Refusal | None:
        """Return the reason for refusing a request; None if it is let in."""
        if len(headers) > _HEADERS:
            return Refusal(431, f"a request has at most {_HEADERS} headers", code="too_large")
        if "transfer-encoding" in headers and "content-length" in headers:
            # a proxy between could see another end of the body, and another next request
            return Refusal(400, "the body has two lengths", headers={"Connection": "close"})
        host = _name(headers.get("host", ""))
        nameless = "host" not in headers and (path in OPEN or method == "OPTIONS")  # plain checks
        if not (nameless or is_loopback(host) or _is_address(host) or host in self.hosts):
            return Refusal(
                403, f"this server is not called {host[:80]!r}", "permission_error", "bad_host"
            )
        origin = headers.get("origin")
        if origin is not None and not self.trusts(origin):
            return Refusal(
                403, f"pages of {origin[:80]!r} may not ask", "permission_error", "bad_origin"
            )
        if method == "OPTIONS":
            return None
        if self.keys and path not in OPEN and self._key(headers) is None:
            return Refusal(
                401,
                "the key is missing or wrong",
                "authentication_error",
                "invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if method == "POST":
            # programs may leave the kind out; a page could do so only to go unasked
            unsaid = "application/json" if origin is None else ""
            kind = headers.get("content-type", unsaid).partition(";")[0].strip().lower()
            agent = headers.get("user-agent", "")
            if kind == _FORM and origin is None and agent.startswith(_NO_BROWSERS):
                kind = "application/json"
            if kind != "application/json":
                said = f"the body is called {kind[:80]!r}; send JSON under this header"
                said = f"{said}: Content-Type: application/json"
                return Refusal(415, said, code="content_type")
            packed = headers.get("content-encoding", "").strip().lower()
            if packed not in _PLAIN:
                said = f"the body is packed as {packed[:80]!r}; send it without Content-Encoding"
                plain = {"Accept-Encoding": "identity"}
                return Refusal(415, said, code="content_encoding", headers=plain)
            if int(headers.get("content-length", "0") or 0) > self.body:
                return too_large(self.body)
        return None

    def trusts(self, origin: str) -> bool:
        if "*" in self.origins or origin in self.origins or origin.startswith(_PROGRAMS):
            return True
        return is_loopback(_name(origin.partition("://")[2]))

    def _key(self, headers: Headers) -> str | None:
        """Return the key of ours that was sent, under either of the two headers, or None."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        sent = [one.encode("latin-1") for one in (bearer, headers.get("x-api-key", "")) if one]
        # every key is compared, so that the time says nothing
        same = [
            (key, hmac.compare_digest(one, spelling))
            for key in self.keys
            for spelling in _spellings(key)
            for one in sent
        ]
        return next((key for key, equal in same if equal), None)

    def client(self, scope: Scope) -> str:
        """Name the client: one name for each key, however it was sent; without keys, its address.

        The name is made from the key itself, not from its place in a file: if the file changes, no
        client may get what is cached for another.
        """
        if self.keys:
            key = self._key(Headers(scope=scope))
            return f"key {hashlib.blake2b(key.encode(), digest_size=4).hexdigest()}" if key else ""
        return scope["client"][0] if scope.get("client") else ""


def _spellings(key: str) -> set[bytes]:
    """Return a key as clients send it: some languages write headers in Latin-1."""
    spellings = {key.encode()}
    with contextlib.suppress(UnicodeEncodeError):
        spellings.add(key.encode("latin-1"))
    return spellings


def too_large(most: int) -> Refusal:
    return Refusal(413, f"a request has at most {most} bytes", code="too_large")


def _is_address(host: str) -> bool:
    """True if a host is an address: a name could be made to point elsewhere."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _name(host: str) -> str:
    """Return the host of a ``Host`` header, without its port; "" if it is none."""
    found = _HOST.fullmatch(host)
    return "" if found is None else found[1].strip("[]").lower()


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

    @contextlib.asynccontextmanager
    async def arriving(self, seconds: float) -> AsyncIterator[Callable[[int], None]]:
        """Limit the time that the body may make no progress; yields what counts a further part.

        Raises:
            Refusal: nothing of it came for so long, or the server ends first.
        """
        loop, traffic = asyncio.get_running_loop(), self.traffic
        try:
            async with asyncio.timeout(seconds) as limit:

                def came(size: int) -> None:
                    self.take(size)
                    if not traffic.cut:
                        limit.reschedule(loop.time() + seconds)

                traffic.limits.add(limit)
                try:
                    yield came
                finally:
                    traffic.limits.discard(limit)
        except TimeoutError:
            if traffic.cut:
                raise shutting_down() from None
            said = f"nothing more of the body came for {seconds:g} s"
            raise Refusal(408, said, code="slow") from None


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

    @contextlib.contextmanager
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
            said = f"requests of {whose} hold too many bytes; send them one after another"
            raise busy(said, "too_much")
        self._bytes[client] += size

    def cut_off(self) -> None:
        """Stop waiting for bodies that have not arrived."""
        self.cut = True
        for limit in self.limits:
            limit.reschedule(0.0)


@dataclass(slots=True)
class Guard:
    """The ASGI app that applies ``Access`` to another, and adds preflights and common headers.

    All of ``request.state`` is set here, so that nothing is read before it is set: the name of the
    ``client``, the ``id`` of the request, its ``load`` on the server, and ``until_over``, the
    callbacks for when it is answered or left. Who answers sets, once it is known: ``asked`` and
    ``naming`` (see ``Service.read``), the model that it ``waits_for``, and for the log why it was
    ``undrafted`` and why an answer that was begun was ``cut``.

    Args:
        log: takes a line for each request.
    """

    app: ASGIApp
    access: Access
    traffic: Traffic
    log: Callable[[str], object] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        state |= {"asked": "", "naming": None, "waits_for": None, "undrafted": "", "cut": ""}
        given = headers.get("x-request-id", "")  # if it can stand in a header and a log
        state["id"] = given if _GIVEN_ID.fullmatch(given) else uuid.uuid4().hex
        client = state["client"] = self.access.client(scope)
        begun, status, ended = time.monotonic(), 0, False
        origin = headers.get("origin")
        unread = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"

        async def hear() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and bool(message.get("more_body"))
            return message

        async def answer(message: Message) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
                more = MutableHeaders(scope=message)
                more["X-Request-Id"] = state["id"]
                more["Date"] = formatdate(usegmt=True)
                # what is left of the body would be taken for the next request; and a server that
                # ends takes none
                if unread or self.traffic.closing:
                    more["Connection"] = "close"
                if origin is not None and self.access.trusts(origin):
                    more["Access-Control-Allow-Origin"] = origin
                    more["Access-Control-Expose-Headers"] = "*"
                    more.add_vary_header("Origin")
            ended = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        try:
            with (
                self.traffic.request(client, long=scope["method"] == "POST") as state["load"],
                contextlib.ExitStack() as state["until_over"],
            ):
                await self._answered(scope, headers, hear, answer)
        except Exception as error:
            logger.exception("%s failed, %s", scope["path"], state["id"])
            state["cut"] = "the server failed"
            if not status:
                await _refuse(refusal(error), scope, hear, answer)
        finally:
            if status and not ended:
                state["cut"] = state["cut"] or "the client left"
            if self.log is not None and is_told(scope["path"], status):
                self.log(_line(scope, client or "no key", status, time.monotonic() - begun))

    async def _answered(self, scope: Scope, headers: Headers, hear: Receive, answer: Send) -> None:
        method, path = scope["method"], scope["path"]
        refused = self.access.refused(method, path, headers)
        asks = method == "OPTIONS" and "origin" in headers  # a page, whether it may
        if refused is None and self.traffic.closing and path not in _FIGURES and not asks:
            refused = shutting_down()
        if refused is not None:
            await _refuse(refused, scope, hear, answer)
        elif method == "OPTIONS":
            asked = headers.get("access-control-request-headers", "authorization, content-type")
            allowed = {
                "Access-Control-Allow-Methods": _METHODS,
                "Access-Control-Allow-Headers": asked,
                "Access-Control-Max-Age": "600",
            }
            await Json({}, 200, allowed)(scope, hear, answer)
        else:
            await self.app(scope, hear, answer)


async def _refuse(refused: Refusal, scope: Scope, hear: Receive, answer: Send) -> None:
    """Answer with an error, which a page can read only if it is trusted."""
    error = Json(spelled(scope["path"], refused), refused.status, dict(refused.headers))
    await error(scope, hear, answer)


def is_told(path: str, status: int) -> bool:
    """True if a request stands in the log: a poll does only if it fails, and not during a load,
    which has lines of its own."""
    return path not in _UNTOLD or (status >= 400 and not (status == 503 and path in OPEN))


def _line(scope: Scope, client: str, status: int, took_s: float) -> str:
    """Write the log line of a request, without its query or its body."""
    said = status or "left"  # before there was an answer
    line = f"{scope['method']} {scope['path'][:200]} {said} {took_s:.2f} s, {client}"
    state = scope["state"]
    told = {"nothing drafted": state["undrafted"], "cut": state["cut"] if status < 400 else ""}
    more = "".join(f", {what}: {why}" for what, why in told.items() if why)
    return sanitize_line(f"{line}, {state['id']}{more}")


async def read_body(request: Request, most: int) -> bytes:
    """Read the body of a request.

    Raises:
        Refusal: it is too long, takes too long to come, or the client left.
    """
    load: Load = request.state.load
    parts: list[bytes] = []
    try:
        async with load.arriving(BODY_S) as came:
            async for part in request.stream():
                came(len(part))
                if load.bytes > most:
                    raise too_large(most)
                parts.append(part)
    except ClientDisconnect:
        raise Refusal(499, "the client left") from None
    return b"".join(parts)


def hosts_of(bound: str, more: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a server that is bound to an address."""
    return tuple({bound.lower(), *(name.lower() for name in more)})

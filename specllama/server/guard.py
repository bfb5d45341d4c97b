"""Who may ask: before a route sees a request, its host, origin, key and size are looked at.

A page in a browser can send requests to any address of this machine. Its own name stands in
``Origin``; where a name of its own was made to point here (DNS rebinding), in ``Host``. Neither is
let in unless it was named when the server was started.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specllama.hardware import is_loopback
from specllama.server.dialect import openai_error
from specllama.server.exchange import Json
from specllama.server.refusals import Refusal

BODY_S = 60.0  # for the whole of a body
OPEN = ("/health", "/v1/health")  # without a key
_METHODS = "GET, POST, OPTIONS"
_HEADERS = 200  # of one request
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::\d{1,5})?")


@dataclass(frozen=True, slots=True)
class Access:
    """Who is let in.

    Attributes:
        hosts: names beside loopback that requests may call this server by.
        origins: of pages beside those of this machine that may read answers; "*" is every one.
        keys: one of them has to be sent; none: nobody is asked.
        body: most bytes of a request.
        connections: most of one address.
    """

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    body: int = 8 << 20
    connections: int = 256  # the queue, the lanes, and as many that only look

    def refused(self, method: str, path: str, headers: Headers) -> Refusal | None:
        """Why not, if not."""
        if len(headers) > _HEADERS:
            return Refusal(431, f"a request has at most {_HEADERS} headers", code="too_large")
        if "transfer-encoding" in headers and "content-length" in headers:
            # whoever stands between could see another end of the body, and another next request
            return Refusal(400, "the body has two lengths", headers={"Connection": "close"})
        host = _name(headers.get("host", ""))
        if not (is_loopback(host) or _is_address(host) or host in self.hosts):
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
        if self.keys and path not in OPEN and not self._knows(headers):
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
            if kind != "application/json":
                said = f"a request has Content-Type: application/json, not {kind[:80]!r}"
                return Refusal(415, said, code="content_type")
            if int(headers.get("content-length", "0") or 0) > self.body:
                return too_large(self.body)
        return None

    def trusts(self, origin: str) -> bool:
        if "*" in self.origins or origin in self.origins:
            return True
        return is_loopback(_name(origin.partition("://")[2]))

    def _knows(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        sent = given.encode()
        # every key is compared, so that the time says nothing
        return any([hmac.compare_digest(sent, key.encode()) for key in self.keys])

    def key_of(self, request: Request) -> str:
        """Who asks, for fairness: the key, else the address."""
        if self.keys:
            return request.headers.get("authorization") or request.headers.get("x-api-key", "")
        return "" if request.client is None else request.client.host


def too_large(most: int) -> Refusal:
    return Refusal(413, f"a request has at most {most} bytes", code="too_large")


def _is_address(host: str) -> bool:
    """A name is what can be made to point elsewhere; an address cannot."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _name(host: str) -> str:
    """The host of a ``Host`` header, without its port; "" if it is none."""
    found = _HOST.fullmatch(host)
    return "" if found is None else found[1].strip("[]").lower()


class Guard:
    """The app behind ``Access``; answers preflights and adds the headers for pages of others."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")

        async def answer(message: Message) -> None:
            if origin is not None and message["type"] == "http.response.start":
                allow = MutableHeaders(scope=message)
                allow["Access-Control-Allow-Origin"] = origin
                allow.add_vary_header("Origin")
            await send(message)

        try:
            refused = self._access.refused(scope["method"], scope["path"], headers)
        except ValueError:
            refused = Refusal(400, "a header cannot be read")
        if refused is not None:
            # a page that is not trusted cannot read why
            error = Json(openai_error(refused), refused.status, dict(refused.headers))
            await error(scope, receive, send)
        elif scope["method"] == "OPTIONS":
            asked = headers.get("access-control-request-headers", "authorization, content-type")
            preflight = Json({}, 200, _preflight(asked))
            await preflight(scope, receive, answer)
        else:
            await self._app(scope, receive, answer)


def _preflight(asked: str) -> dict[str, str]:
    return {
        "Access-Control-Allow-Methods": _METHODS,
        "Access-Control-Allow-Headers": asked,
        "Access-Control-Max-Age": "600",
    }


async def read_body(request: Request, most: int) -> bytes:
    """The body of a request.

    Raises:
        Refusal: it is too long, takes too long to come, or the client left.
    """
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise too_large(most)
                parts.append(part)
    except TimeoutError:
        raise Refusal(408, f"the body did not come within {BODY_S:g} s", code="slow") from None
    except ClientDisconnect:
        raise Refusal(499, "the client left") from None
    return b"".join(parts)


def hosts_of(bound: str, more: Sequence[str]) -> tuple[str, ...]:
    """Names that a server bound to an address is called by."""
    return tuple({bound.lower(), *(name.lower() for name in more)})

"""The routes of a server, and their common parts."""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from specllama.events import LoadProgress
from specllama.server import anthropic, direct, native, ollama_api, openai_api
from specllama.server.dialect import Frame
from specllama.server.exchange import HEAD_S, TYPES, UNSTORED, Json, encode, failed
from specllama.server.guard import Guard
from specllama.server.refusals import Refusal, loading, restarting, spelled
from specllama.server.served import ServedModel
from specllama.server.service import Handler, Row, Service

TELL_S = 1.0  # between two words of how far a load is
OWN = "/specllama/generate"


def make_app(service: Service) -> Starlette:
    """Make the ASGI application of a server; the model may still be loading."""

    async def health(request: Request) -> Response:
        if not service.models.begun:
            raise loading()
        if not all(model.queue.host.ready for model in service.models.loaded):
            raise restarting()
        return Json({"status": "ok"})

    async def metrics(request: Request) -> Response:
        figures = {one.name: await one.queue.figures() for one in service.models.loaded}
        return PlainTextResponse(
            service.metrics.text(figures, [one.queue for one in service.models.all.values()]),
            media_type="text/plain; version=0.0.4; charset=utf-8",
            headers={"Process-Start-Time-Unix": str(service.started)},
        )

    async def greet(request: Request) -> Response:
        return PlainTextResponse("specllama is running")

    rows: list[Row] = [
        ("GET /", greet),
        ("GET /health", health),
        ("GET /v1/health", health),
        ("GET|POST /ping", health),
        ("GET /metrics", metrics),
        *(
            row
            for family in (openai_api, anthropic, native, ollama_api, direct)
            for row in family.rows(service)
        ),
    ]
    return Starlette(
        routes=[_route(*row) for row in rows],
        middleware=[
            Middleware(Guard, access=service.access, traffic=service.traffic, log=service.log)
        ],
        exception_handlers={HTTPException: _unknown},
    )


def _route(where: str, handler: Handler) -> Route:
    """Make a route that answers errors in the words of its family."""
    methods, path = where.split()

    async def handle(request: Request) -> Response:
        try:
            return await answered(request, asyncio.ensure_future(handler(request)))
        except Exception as error:
            refused = failed(request.scope, error)
            return Json(spelled(request.url.path, refused), refused.status, dict(refused.headers))

    return Route(path, handle, methods=methods.split("|"))


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: f"there is no route {request.url.path[:200]!r}"}.get(
        error.status_code, f"{request.method} is not for {request.url.path[:200]!r}"
    )
    refused = Refusal(error.status_code, said, code="unknown_route")
    return Json(spelled(request.url.path, refused), error.status_code, error.headers)


async def answered(request: Request, work: asyncio.Future[Response]) -> Response:
    """Return the response that ``work`` makes; while a model loads, a stream may begin early.

    Raises:
        Exception: the error that ended the work, if no stream has begun.
    """
    path = request.url.path
    try:
        while not (await asyncio.wait({work}, timeout=HEAD_S))[0]:
            model: ServedModel | None = request.state.waits_for  # none before the body was read
            if model is not None and (
                path == OWN or (request.state.naming.stream and not path.startswith("/api/"))
            ):
                return Loading(request, work, model)
        return await work
    except BaseException:
        work.cancel()
        raise


class Loading(StreamingResponse):
    """A stream that sends the load's progress, then the response that follows.

    Clients that want a stream give up if nothing comes within seconds. Server-sent events have
    comments for that, which every client passes over; our own front ends get the engine's event.
    """

    def __init__(
        self, request: Request, work: asyncio.Future[Response], model: ServedModel
    ) -> None:
        super().__init__((), headers=UNSTORED, media_type=TYPES["sse"])
        self._path, self._work, self._model = request.url.path, work, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        model, own = self._model, self._path == OWN
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            while not self._work.done():
                body = f": loading {model.name} {model.progress:.0%}\n\n".encode()
                if own:
                    told = LoadProgress("target", model.target.path, model.progress).to_dict()
                    body = encode("sse", [Frame(told)])
                await send({"type": "http.response.body", "body": body, "more_body": True})
                await asyncio.wait({self._work}, timeout=TELL_S)
            response = await self._work
        except Exception as error:
            told = spelled(self._path, failed(scope, error))
            told = {"type": "error", **told} if own else told
            body = encode("sse", [Frame.error(told)])
            await send({"type": "http.response.body", "body": body, "more_body": False})
            return
        finally:
            self._work.cancel()

        async def go_on(message: Message) -> None:
            if message["type"] != "http.response.start":
                await send(message)

        await response(scope, receive, go_on)

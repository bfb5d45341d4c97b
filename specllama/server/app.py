"""The routes of a server, and their common parts."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from specllama.errors import SpecllamaError
from specllama.server import (
    anthropic,
    direct,
    live,
    native,
    ollama,
    openai,
    router,
)
from specllama.server.dialect import openai_error
from specllama.server.exchange import Json
from specllama.server.guard import Guard
from specllama.server.patience import answered
from specllama.server.refusals import Refusal, loading, refusal, restarting
from specllama.server.service import Handler, Row, Service

logger = logging.getLogger("specllama.server")


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
            for family in (
                router,
                openai,
                anthropic,
                native,
                ollama,
                live,
                direct,
            )
            for row in family.rows(service)
        ),
    ]
    return Starlette(
        routes=[_route(*row) for row in rows],
        middleware=[
            Middleware(
                Guard,
                access=service.access,
                traffic=service.traffic,
                spelled=spelled,
                log=service.log,
            )
        ],
        exception_handlers={HTTPException: _unknown},
    )


def _route(where: str, handler: Handler) -> Route:
    """Make a route that answers errors in the words of its family."""
    methods, path = where.split()

    async def handle(request: Request) -> Response:
        try:
            return await answered(request, asyncio.ensure_future(handler(request)), spelled)
        except Exception as error:
            if not isinstance(error, (Refusal, SpecllamaError)):
                logger.exception("%s failed, %s", request.url.path, request.state.id)
            refused = refusal(error)
            said = spelled(request.url.path, refused)
            return Json(said, refused.status, dict(refused.headers))

    return Route(path, handle, methods=methods.split("|"))


def spelled(path: str, refused: Refusal) -> dict[str, Any]:
    """Spell an error in the words of the family that a path belongs to."""
    if path.startswith("/v1/messages"):
        return anthropic.error_of(refused)
    if path.startswith("/api/"):
        return ollama.error_of(refused)
    prompt = "messages" if "/chat/" in path else "input" if "/responses" in path else "prompt"
    return openai_error(refused, prompt)


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: f"there is no route {request.url.path[:200]!r}"}.get(
        error.status_code, f"{request.method} is not for {request.url.path[:200]!r}"
    )
    refused = Refusal(error.status_code, said, code="unknown_route")
    return Json(spelled(request.url.path, refused), error.status_code, error.headers)

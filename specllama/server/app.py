"""The routes of a server, and what is common to all of them."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from specllama.server import anthropic, direct, live, lmstudio, native, ollama, openai
from specllama.server.dialect import openai_error
from specllama.server.exchange import Json
from specllama.server.guard import Guard
from specllama.server.refusals import Refusal, loading, restarting
from specllama.server.service import Service, guarded


def make_app(service: Service) -> Starlette:
    """The ASGI application of a server; the model may still be loading."""

    async def health(request: Request) -> Response:
        if not service.queue.ready:
            raise restarting() if service.queue.loaded else loading()
        return Json({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(
            service.metrics.text(await service.queue.figures()),
            media_type="text/plain; version=0.0.4; charset=utf-8",
            headers={"Process-Start-Time-Unix": str(service.started)},
        )

    async def greet(request: Request) -> Response:
        return PlainTextResponse("specllama is running")

    routes = [
        Route("/", greet, methods=["GET"]),
        Route("/health", guarded(health), methods=["GET"]),
        Route("/v1/health", guarded(health), methods=["GET"]),
        Route("/ping", guarded(health), methods=["GET", "POST"]),
        Route("/metrics", metrics, methods=["GET"]),
        *(
            route
            for family in (openai, anthropic, native, ollama, lmstudio, live, direct)
            for route in family.routes(service)
        ),
    ]
    return Starlette(
        routes=routes,
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


def spelled(path: str, refused: Refusal) -> dict[str, Any]:
    """An error in the words of the family that a path belongs to."""
    if path.startswith("/v1/messages"):
        return anthropic.error_of(refused)
    if path.startswith("/api/") and not path.startswith("/api/v0/"):
        return ollama.error_of(refused)
    return openai_error(refused)


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: f"there is no route {request.url.path[:200]!r}"}.get(
        error.status_code, f"{request.method} is not for {request.url.path[:200]!r}"
    )
    refused = Refusal(error.status_code, said, code="unknown_route")
    return Json(spelled(request.url.path, refused), error.status_code, error.headers)

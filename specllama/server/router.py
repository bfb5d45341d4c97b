"""llama-server's routes for several models: list, load and unload them, follow their changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from specllama.server.dialect import Frame
from specllama.server.exchange import PING_S, Json, encode
from specllama.server.refusals import Refusal
from specllama.server.served import ServedModel
from specllama.server.service import Row, Service


class ModelRequest(msgspec.Struct):
    model: str


def status(model: ServedModel) -> dict[str, Any]:
    """Return the state of a model, and the progress or error of its load."""
    told: dict[str, Any] = {"value": model.state}
    if model.state == "loading":
        told["progress"] = {"value": round(model.progress, 3)}
    if model.failed:
        told |= {"failed": True, "error": model.failed}
    return told


def rows(service: Service) -> list[Row]:
    models = service.models

    async def load(request: Request) -> Response:
        """Begin a load and answer at once, as llama-server does; lists and events show progress."""
        body = await service.read(request, ModelRequest)
        found = await models.listed(body.model)
        if found.queue.loaded:
            raise Refusal(400, f"model {found.name!r} is loaded already", param="model")
        models.load_later(found)
        return Json({"success": True})

    async def unload(request: Request) -> Response:
        body = await service.read(request, ModelRequest)
        found = await models.listed(body.model)
        if found.state == "unloaded":
            raise Refusal(400, f"model {found.name!r} is not loaded", param="model")
        models.unload_later(found)
        return Json({"success": True})

    async def events(request: Request) -> Response:
        return StreamingResponse(_events(service), media_type="text/event-stream")

    return [
        ("POST /models/load", load),
        ("POST /models/unload", unload),
        ("GET /models/sse", events),
    ]


async def _events(service: Service) -> AsyncIterator[bytes]:
    """Yield every change of every model, from now on."""
    changed: dict[ServedModel, None] = {}
    something = asyncio.Event()

    def hear(model: ServedModel) -> None:
        changed[model] = None
        something.set()

    service.models.hearers.add(hear)
    try:
        yield b": models\n\n"
        while not service.traffic.closing:
            try:
                async with asyncio.timeout(PING_S):
                    await something.wait()
            except TimeoutError:
                yield b": still here\n\n"
            something.clear()
            told = [_told(model) for model in changed]
            changed.clear()
            yield encode("sse", told)
    finally:
        service.models.hearers.discard(hear)


def _told(model: ServedModel) -> Frame:
    now = status(model)
    data = {"status": now["value"], **{name: now[name] for name in now if name != "value"}}
    return Frame({"model": model.name, "event": "model_status", "data": data})

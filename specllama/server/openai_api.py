"""OpenAI's routes, and those of llama-server for several models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from specllama.server.chat_completions import (
    ChatDialect,
    ChatRequest,
    CompletionDialect,
    CompletionRequest,
    parse_chat,
    parse_completion,
)
from specllama.server.dialect import Frame
from specllama.server.exchange import PING_S, Json, encode, happens
from specllama.server.native import ending
from specllama.server.refusals import Refusal
from specllama.server.responses import CompactDialect, ResponsesDialect, ResponsesRequest, compact
from specllama.server.responses import parse as parse_responses
from specllama.server.served import ServedModel
from specllama.server.service import KNOWN, Row, Service, refuses


class ModelRequest(msgspec.Struct):
    model: str


def model_card(model: ServedModel, started: int) -> dict[str, Any]:
    """Describe a model in OpenAI's words, Anthropic's and llama-server's."""
    target = model.target
    n_ctx = target.n_ctx or target.n_ctx_train  # of one that was not loaded yet
    return {
        "id": model.name,
        "object": "model",
        "created": started,
        "owned_by": "specllama",
        "type": "model",
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(started, UTC).isoformat(),
        "path": target.path,
        "status": status(model),
        "max_input_tokens": n_ctx,
        "max_model_len": n_ctx,
        "context_length": n_ctx,
        "meta": {
            "vocab_type": None,
            "n_vocab": target.n_vocab,
            "n_ctx": n_ctx,
            "n_ctx_train": target.n_ctx_train,
            "n_params": target.n_params,
            "size": target.file_bytes,
        },
    }


def rows(service: Service) -> list[Row]:
    async def models(request: Request) -> Response:
        cards = [model_card(one, service.started) for one in await service.models.look()]
        more = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
        return Json({"object": "list", "data": cards, **more})

    async def model(request: Request) -> Response:
        found = await service.models.listed(request.path_params["id"])
        return Json(model_card(found, service.started))

    async def chat(request: Request) -> Response:
        body, job, model = await service.job(request, ChatRequest, parse_chat)
        verbose = None
        if body.verbose:
            equipped = await service.aside(request, model.equipped, job)
            asked = equipped.prompts[0], equipped.params
            prompt = await service.ask(request, model, "render", *asked)
            verbose = partial(ending, model=model.name, params=equipped.params, prompt=prompt)
        return await service.answer(request, model, job, ChatDialect(body, model.name, verbose))

    async def completions(request: Request) -> Response:
        body, job, model = await service.job(request, CompletionRequest, parse_completion)
        if body.suffix:
            job = await model.infilled(job, str(body.prompt), body.suffix)
        return await service.answer(request, model, job, CompletionDialect(body, model.name))

    told = {"object": "response.input_tokens"}
    found: list[Row] = [
        ("POST /chat/completions", chat),
        ("POST /completions", completions),
        ("POST /responses", service.writes(ResponsesRequest, parse_responses, ResponsesDialect)),
        ("POST /responses/compact", service.writes(ResponsesRequest, compact, CompactDialect)),
        ("POST /chat/completions/input_tokens", service.counts(ChatRequest, parse_chat, **told)),
        ("POST /responses/input_tokens", service.counts(ResponsesRequest, parse_responses, **told)),
        ("GET /models", models),
        ("GET /models/{id:path}", model),
        *((f"GET|POST {path}", refuses(path[1:], why)) for path, why in KNOWN.openai.items()),
    ]
    return _several(service) + [
        (where.replace(" ", f" {prefix}"), handler)
        for prefix in ("/v1", "")
        for where, handler in found
        if (prefix, handler) != ("", completions)  # that is llama-server's own
    ]


def status(model: ServedModel) -> dict[str, Any]:
    """Return the state of a model, and the progress or error of its load."""
    told: dict[str, Any] = {"value": model.state}
    if model.state == "loading":
        told["progress"] = {"value": round(model.progress, 3)}
    if model.failed:
        told |= {"failed": True, "error": model.failed}
    return told


def _several(service: Service) -> list[Row]:
    """Return the routes for several models: load and unload them, follow their changes."""
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
            if not await happens(something, PING_S):
                yield b": still here\n\n"
            something.clear()
            told = [_changed(model) for model in changed]
            changed.clear()
            yield encode("sse", told)
    finally:
        service.models.hearers.discard(hear)


def _changed(model: ServedModel) -> Frame:
    now = status(model)
    data = {"status": now["value"], **{name: now[name] for name in now if name != "value"}}
    return Frame({"model": model.name, "event": "model_status", "data": data})

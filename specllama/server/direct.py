"""The engine itself over HTTP, for our own front ends: every event as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from specllama.interface import Message, Prompt
from specllama.server.dialect import Frame, Job, openai_error
from specllama.server.exchange import PING_S, Exchange, Json, Stream, encode
from specllama.server.refusals import Refusal, refusal, wrong
from specllama.server.service import Row, Service
from specllama.store.codec import params_from_dict


class DirectTurn(msgspec.Struct):
    role: str
    content: str
    reasoning: str = ""
    seams: tuple[str, str] | None = None


class DirectRequest(msgspec.Struct):
    text: str | None = None
    ids: list[int] | None = None
    messages: list[DirectTurn] | None = None
    params: dict[str, Any] = {}
    id: str = ""  # by which it can be stopped

    def prompt(self) -> Prompt:
        """Return the prompt; raise Refusal if there is none."""
        if self.messages is not None:
            return tuple(Message(t.role, t.content, t.reasoning, t.seams) for t in self.messages)
        if self.ids is not None:
            return tuple(self.ids)
        if self.text is None:
            raise wrong("text", "there is no prompt")
        return self.text


def rows(service: Service) -> list[Row]:
    # by client and id, so that no client ends the replies of another
    going: WeakValueDictionary[tuple[str, str], Exchange] = WeakValueDictionary()

    def named(request: Request, id: str) -> Exchange | None:
        """Return the unfinished replies that a client gave this id; None without an id."""
        found = going.get((request.state.client, id)) if id else None
        return None if found is None or found.over else found

    async def info(request: Request) -> Response:
        """Return the engine's properties; a model is loaded only if the query has "load"."""
        model = await service.named(request)
        if "load" in request.query_params:
            (await service.models.use(model))()
        if model.known_info is None:
            return Json({"target": dataclasses.asdict(model.target)})
        return Json(dataclasses.asdict(model.known_info))

    async def count(request: Request) -> Response:
        body = await service.read(request, DirectRequest)
        client = request.state.client
        prompt = await service.aside(request, body.prompt)
        queue = (await service.model(request)).queue
        return Json({"tokens": await queue.ask("count_tokens", prompt, client=client)})

    async def generate(request: Request) -> Response:
        body = await service.read(request, DirectRequest)
        params = params_from_dict(body.params)
        prompt = await service.aside(request, body.prompt)
        client = request.state.client
        model = await service.model(request)
        if named(request, body.id) is not None:
            raise Refusal(409, f"id: {body.id[:80]!r} is being written", code="id_in_use")
        exchange = Exchange(
            model.queue,
            Job((prompt,), params, stream=True, client=client, asked=request.state.asked),
        )

        if body.id:
            going[client, body.id] = exchange

        async def events() -> AsyncIterator[bytes]:
            try:
                while not exchange.done:
                    while not await exchange.wait(PING_S):
                        yield b": still here\n\n"
                    for _, said in exchange.take():
                        yield encode("sse", [Frame(event.to_dict()) for event in said])
            except Exception as error:
                yield encode("sse", [Frame({"type": "error", **openai_error(refusal(error))})])

        return Stream(exchange, "sse", events())

    async def stop(request: Request) -> Response:
        body = await service.read(request, DirectRequest)
        if (exchange := named(request, body.id)) is not None:
            exchange.stop()
        return Json({"stopped": exchange is not None})

    return [
        ("GET /specllama/info", info),
        ("POST /specllama/count", count),
        ("POST /specllama/generate", generate),
        ("POST /specllama/stop", stop),
    ]

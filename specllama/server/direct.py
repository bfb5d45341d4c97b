"""The engine itself over HTTP, for our own front ends: every event as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from specllama.interface import Message, Prompt
from specllama.server.dialect import Frame, Wanted, openai_error
from specllama.server.exchange import PING_S, Exchange, Json, encode
from specllama.server.refusals import refusal, wrong
from specllama.server.service import Service, guarded
from specllama.store.codec import params_from_dict


class Turn(msgspec.Struct):
    role: str
    content: str
    reasoning: str = ""
    seams: tuple[str, str] | None = None


class Asked(msgspec.Struct):
    text: str | None = None
    ids: list[int] | None = None
    messages: list[Turn] | None = None
    params: dict[str, Any] = {}
    id: str = ""  # by which it can be stopped

    @property
    def prompt(self) -> Prompt:
        """Raises Refusal if there is none."""
        if self.messages is not None:
            return tuple(Message(t.role, t.content, t.reasoning, t.seams) for t in self.messages)
        if self.ids is not None:
            return tuple(self.ids)
        if self.text is None:
            raise wrong("text", "there is no prompt")
        return self.text


def routes(service: Service) -> list[Route]:
    desk = service.desk
    going: dict[str, Exchange] = {}

    async def info(request: Request) -> Response:
        return Json(dataclasses.asdict(service.info))

    async def count(request: Request) -> Response:
        body = await service.read(request, Asked)
        client = request.state.client
        return Json({"tokens": await desk.ask("count_tokens", body.prompt, client=client)})

    async def generate(request: Request) -> Response:
        body = await service.read(request, Asked)
        params = params_from_dict(body.params)
        client = request.state.client
        exchange = Exchange(
            desk,
            Wanted((body.prompt,), params, stream=True, client=client, asked=request.state.asked),
        )

        async def events() -> AsyncIterator[bytes]:
            going[body.id] = exchange
            try:
                while not exchange.done:
                    while not await exchange.wait(PING_S):
                        yield b": still here\n\n"
                    for _, said in exchange.take():
                        yield encode("sse", [Frame(event.to_dict()) for event in said])
            except Exception as error:
                yield encode("sse", [Frame({"type": "error", **openai_error(refusal(error))})])
            finally:
                going.pop(body.id, None)
                exchange.cancel()

        return StreamingResponse(events(), media_type="text/event-stream")

    async def stop(request: Request) -> Response:
        body = await service.read(request, Asked)
        if (exchange := going.get(body.id)) is not None:
            exchange.stop()
        return Json({"stopped": exchange is not None})

    return [
        Route("/specllama/info", guarded(info), methods=["GET"]),
        Route("/specllama/count", guarded(count), methods=["POST"]),
        Route("/specllama/generate", guarded(generate), methods=["POST"]),
        Route("/specllama/stop", guarded(stop), methods=["POST"]),
    ]

"""The engine itself over HTTP, for our own front ends: every event as it is, and every lane's."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import deque
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from specllama.events import Event
from specllama.interface import Message, Prompt
from specllama.server.dialect import Frame, Job
from specllama.server.exchange import PING_S, Exchange, Json, Stream, encode, failed, happens
from specllama.server.refusals import Refusal, spelled, wrong
from specllama.server.request_queue import QueuedReply
from specllama.server.service import Row, Service
from specllama.store.codec import params_from_dict
from specllama.told import Told

_BEHIND = 2000  # events that a slow reader may be behind; older ones are dropped
LOOK_S = 1.0  # between two looks at the engine's figures
_TOLD = ("live", "dead", "free", "compactions", "preemptions", "parked_bytes")
_TEXTS = ("drafted_text", "target_text", "emitted_text", "text", "reasoning", "seams",
          "drafted", "target_token", "emitted", "token_ids", "chances", "stop", "seed")  # fmt: skip


class DirectRequest(msgspec.Struct):
    text: str | None = None
    ids: list[int] | None = None
    messages: list[Message] | None = None
    params: dict[str, Any] = {}
    id: str = ""  # by which it can be stopped

    def prompt(self) -> Prompt:
        """Return the prompt; raise Refusal if there is none."""
        if self.messages is not None:
            return tuple(self.messages)
        if self.ids is not None:
            return tuple(self.ids)
        if self.text is None:
            raise wrong("text", "there is no prompt")
        return self.text


class Live:
    """A ``Watcher`` that sends events of requests to those that follow them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._ids = itertools.count(1)
        self._numbers: dict[QueuedReply, int] = {}
        self._watching: dict[asyncio.Event, deque[dict[str, Any]]] = {}
        service.models.watch(self)

    def sent(self, queued: QueuedReply) -> None:
        self._numbers[queued] = next(self._ids)

    def received(self, queued: QueuedReply, events: list[Event]) -> None:
        told = Told.of(events if self._watching else ())
        for event in (told.started, *told.rounds, told.finished):
            if event is not None:
                self._tell(queued, self._shown(event))

    def ended(self, queued: QueuedReply, error: BaseException | None) -> None:
        if self._watching:
            self._tell(queued, {"type": "over", "error": None if error is None else str(error)})
        self._numbers.pop(queued, None)

    def _shown(self, event: Event) -> dict[str, Any]:
        told = event.to_dict()
        if not self._service.expose_text:
            for name in told.keys() & {"drafted", "emitted"}:
                told[f"{name}_n"] = len(told[name])
            for name in _TEXTS:
                told.pop(name, None)
        return told

    def _tell(self, queued: QueuedReply, told: dict[str, Any]) -> None:
        queue = queued.place.queue
        told = {
            "model": queue.name,
            "lane": self._numbers.get(queued, 0),
            "slice": queued.label,
            "arm": queued.arm,
            "running": len(queue.running),
            "waiting": queue.n_waiting,
            **told,
        }
        for something, backlog in self._watching.items():
            backlog.append(told)
            something.set()

    async def _figures(self) -> dict[str, Any]:
        """Return the current load, and the engines' own figures."""
        queues = [model.queue for model in self._service.models.all.values()]
        told = {
            "type": "figures",
            "running": sum(len(queue.running) for queue in queues),
            "waiting": sum(queue.n_waiting for queue in queues),
        }
        found = [await queue.figures() for queue in queues]
        engines = [engine for engine in found if engine is not None]
        if not engines:
            return told
        return {
            **told,
            **{name: sum(getattr(engine, name) for engine in engines) for name in _TOLD},
            "passes": sum(engine.pass_seconds.count for engine in engines),
            "pass_rows": sum(engine.pass_rows.sum for engine in engines),
            "pass_seconds": sum(engine.pass_seconds.sum for engine in engines),
        }

    async def frames(self) -> AsyncIterator[bytes]:
        something, backlog = asyncio.Event(), deque[dict[str, Any]](maxlen=_BEHIND)
        self._watching[something] = backlog
        try:
            models, look = self._service.models, 0.0
            lanes = sum(model.queue.lanes for model in models.loaded) or models.first.queue.lanes
            names = ", ".join(model.name for model in models.loaded) or models.first.name
            yield encode("sse", [Frame({"type": "hello", "model": names, "lanes": lanes})])
            while not self._service.traffic.closing:
                if monotonic() >= look:
                    look = monotonic() + LOOK_S
                    yield encode("sse", [Frame(await self._figures())])
                if await happens(something, LOOK_S):
                    something.clear()
                    yield encode("sse", [Frame(backlog.popleft()) for _ in range(len(backlog))])
        finally:
            del self._watching[something]


def rows(service: Service) -> list[Row]:
    # by client and id, so that no client ends the replies of another
    going: WeakValueDictionary[tuple[str, str], Exchange] = WeakValueDictionary()
    live = Live(service)

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
        prompt = await service.aside(request, body.prompt)
        model = await service.model(request)
        return Json({"tokens": await service.ask(request, model, "count_tokens", prompt)})

    async def generate(request: Request) -> Response:
        body = await service.read(request, DirectRequest)
        params = params_from_dict(body.params)
        prompt = await service.aside(request, body.prompt)
        client = request.state.client
        model = await service.model(request)
        if named(request, body.id) is not None:
            raise Refusal(409, f"id: {body.id[:80]!r} is being written", code="id_in_use")
        job = Job((prompt,), params, stream=True, client=client, asked=request.state.asked)
        exchange = Exchange(model.queue, job)
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
                told = spelled(request.url.path, failed(request.scope, error))
                yield encode("sse", [Frame({"type": "error", **told})])

        return Stream(exchange, "sse", events())

    async def lanes(request: Request) -> Response:
        """Send every round of every lane, as it happens."""
        service.require_slots()
        return StreamingResponse(live.frames(), media_type="text/event-stream")

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
        ("GET /specllama/events", lanes),
    ]

"""``GET /specllama/events``: every round of every lane, as it happens."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from specllama.events import Event
from specllama.server.dialect import Frame
from specllama.server.exchange import encode
from specllama.server.request_queue import QueuedReply
from specllama.server.service import Row, Service
from specllama.told import Told

_MOST = 2000  # events that a slow reader may be behind; older ones are dropped
LOOK_S = 1.0  # between two looks at the engine's figures
_TOLD = ("live", "dead", "free", "compactions", "preemptions", "parked_bytes")
_TEXTS = ("drafted_text", "target_text", "emitted_text", "text", "reasoning", "seams",
          "drafted", "target_token", "emitted", "token_ids", "chances", "stop", "seed")  # fmt: skip


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
        something, backlog = asyncio.Event(), deque[dict[str, Any]](maxlen=_MOST)
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
                try:
                    async with asyncio.timeout(LOOK_S):
                        await something.wait()
                except TimeoutError:
                    continue
                something.clear()
                yield encode("sse", [Frame(backlog.popleft()) for _ in range(len(backlog))])
        finally:
            del self._watching[something]


def rows(service: Service) -> list[Row]:
    live = Live(service)

    async def events(request: Request) -> Response:
        service.require_slots()
        return StreamingResponse(live.frames(), media_type="text/event-stream")

    return [("GET /specllama/events", events)]

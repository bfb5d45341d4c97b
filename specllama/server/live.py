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
from starlette.routing import Route

from specllama.events import Event
from specllama.server.desk import Ticket
from specllama.server.dialect import Frame
from specllama.server.exchange import encode
from specllama.server.service import Service, guarded
from specllama.told import Told

_MOST = 2000  # events that somebody who reads slowly may be behind; older ones are dropped
LOOK_S = 1.0  # between two looks at the engine's figures
_TOLD = ("live", "dead", "free", "compactions", "preemptions", "parked_bytes")
_TEXTS = ("drafted_text", "target_text", "emitted_text", "text", "reasoning", "seams",
          "drafted", "target_token", "emitted", "token_ids", "chances", "stop", "seed")  # fmt: skip


class Live:
    """Tells watchers what happens at the desk; a ``Watcher`` itself."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._ids = itertools.count(1)
        self._numbers: dict[Ticket, int] = {}
        self._watching: dict[asyncio.Event, deque[dict[str, Any]]] = {}
        service.desk.watchers.append(self)

    def sent(self, ticket: Ticket) -> None:
        self._numbers[ticket] = next(self._ids)

    def said(self, ticket: Ticket, events: list[Event]) -> None:
        told = Told.of(events if self._watching else ())
        for event in (told.started, *told.rounds, told.finished):
            if event is not None:
                self._tell(ticket, self._shown(event))

    def ended(self, ticket: Ticket, error: BaseException | None) -> None:
        if self._watching:
            self._tell(ticket, {"type": "over", "error": None if error is None else str(error)})
        self._numbers.pop(ticket, None)

    def _shown(self, event: Event) -> dict[str, Any]:
        told = event.to_dict()
        if not self._service.expose_text:
            for name in told.keys() & {"drafted", "emitted"}:
                told[f"{name}_n"] = len(told[name])
            for name in _TEXTS:
                told.pop(name, None)
        return told

    def _tell(self, ticket: Ticket, told: dict[str, Any]) -> None:
        desk = self._service.desk
        told = {
            "lane": self._numbers.get(ticket, 0),
            "slice": ticket.label,
            "arm": ticket.arm,
            "running": len(desk.running),
            "waiting": desk.n_waiting,
            **told,
        }
        for something, queue in self._watching.items():
            queue.append(told)
            something.set()

    async def _figures(self) -> dict[str, Any]:
        """What is going on now, and what the engine says of itself."""
        desk = self._service.desk
        told = {"type": "figures", "running": len(desk.running), "waiting": desk.n_waiting}
        engine = await desk.figures()
        if engine is None:
            return told
        rows, seconds = engine.pass_rows, engine.pass_seconds
        return {
            **told,
            **{name: getattr(engine, name) for name in _TOLD},
            "passes": seconds.count,
            "pass_rows": rows.sum,
            "pass_seconds": seconds.sum,
        }

    async def frames(self) -> AsyncIterator[bytes]:
        something, queue = asyncio.Event(), deque[dict[str, Any]](maxlen=_MOST)
        self._watching[something] = queue
        try:
            desk, look = self._service.desk, 0.0
            yield encode("sse", [Frame({"type": "hello", "model": self._service.model,
                                        "lanes": desk.lanes})])  # fmt: skip
            while not desk.closing:
                if monotonic() >= look:
                    look = monotonic() + LOOK_S
                    yield encode("sse", [Frame(await self._figures())])
                try:
                    async with asyncio.timeout(LOOK_S):
                        await something.wait()
                except TimeoutError:
                    continue
                something.clear()
                yield encode("sse", [Frame(queue.popleft()) for _ in range(len(queue))])
        finally:
            del self._watching[something]


def routes(service: Service) -> list[Route]:
    live = Live(service)

    async def events(request: Request) -> Response:
        service.require_slots()
        return StreamingResponse(live.frames(), media_type="text/event-stream")

    return [Route("/specllama/events", guarded(events), methods=["GET"])]

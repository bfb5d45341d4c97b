"""A stream that begins while its model is still being loaded, and sends the load's progress.

Clients that want a stream give up if nothing comes within seconds. Server-sent events have
comments for that, which every client passes over; our own front ends get the engine's event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from specllama.errors import SpecllamaError
from specllama.events import LoadProgress
from specllama.server.dialect import Frame
from specllama.server.exchange import HEAD_S, encode
from specllama.server.refusals import Refusal, refusal
from specllama.server.served import ServedModel

TELL_S = 1.0  # between two words of how far it is
OWN = "/specllama/generate"

Spelled = Callable[[str, Refusal], dict[str, Any]]


async def answered(request: Request, work: asyncio.Future[Response], spelled: Spelled) -> Response:
    """Return the response that ``work`` makes; while a model loads, a stream may begin early.

    Raises:
        Exception: the error that ended the work, if no stream has begun.
    """
    try:
        await asyncio.wait({work}, timeout=HEAD_S)
        if not work.done():
            model: ServedModel | None = getattr(request.state, "waits_for", None)
            path = request.url.path
            streams = not path.startswith("/api/") and bool(request.state.naming.stream)
            if model is not None and (path == OWN or streams):
                return Loading(request, work, model, spelled)
        return await work
    except BaseException:
        work.cancel()
        raise


class Loading(Response):
    """A stream that sends the load's progress, then the response that follows."""

    def __init__(
        self, request: Request, work: asyncio.Future[Response], model: ServedModel, spelled: Spelled
    ) -> None:
        super().__init__(
            media_type="text/event-stream; charset=utf-8",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self._path, self._work, self._model = request.url.path, work, model
        self._spelled = spelled

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
            if not isinstance(error, (SpecllamaError, Refusal)):
                raise
            told = self._spelled(self._path, refusal(error))
            told = {"type": "error", **told} if own else told
            body = encode("sse", [Frame(told, "error" if told.get("type") == "error" else "")])
            await send({"type": "http.response.body", "body": body, "more_body": False})
            return
        finally:
            self._work.cancel()

        async def go_on(message: Message) -> None:
            if message["type"] != "http.response.start":
                await send(message)

        await response(scope, receive, go_on)

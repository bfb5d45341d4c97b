"""The way from a request to its answer: submit, receive, send, stop if the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from specllama.errors import SpecllamaError
from specllama.events import Event, RoundDone
from specllama.server.dialect import Dialect, Frame, Job, Piece, Reply, Wire
from specllama.server.refusals import Refusal, refusal
from specllama.server.request_queue import QueuedReply, RequestQueue
from specllama.server.tools import ToolReader
from specllama.settings.params import SEED_DRAWN
from specllama.told import news

logger = logging.getLogger("specllama.server")

# A stream begins after so long, even if the engine has not sent a word, and is never silent for
# longer: clients give up on such.
HEAD_S = PING_S = 4.0
# comments and pings are dropped before a client's own clock hears them; agents wait 300 s
NEWS_S = 60.0

_MANY = 2000  # probabilities that are not written in the event loop

_json = msgspec.json.Encoder()
_ENDS = tuple((chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029))
UNSTORED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
TYPES = {"sse": "text/event-stream; charset=utf-8", "ndjson": "application/x-ndjson"}


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return _json.encode(content)


def _line(data: Any) -> bytes:
    """Encode JSON without any character that a reader may take for the end of a line."""
    line = _json.encode(data)
    for character, escape in _ENDS:
        line = line.replace(character, escape)
    return line


def encode(wire: str, frames: Iterable[Frame]) -> bytes:
    parts: list[bytes] = []
    for frame in frames:
        data = frame.data.encode() if isinstance(frame.data, str) else _line(frame.data)
        if wire == "ndjson":
            parts += (data, b"\n")
        else:
            if frame.event:
                parts += (b"event: ", frame.event.encode(), b"\n")
            parts += (b"data: ", data, b"\n\n")
    return b"".join(parts)


def seed_of(seed: int, index: int) -> int:
    """Return the seed of a further reply to the same request; reply 0 has the seed itself."""
    if not index:
        return seed
    mixed = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8)
    return int.from_bytes(mixed.digest(), "big") % SEED_DRAWN


async def happens(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for an event; return False if the time is up before."""
    try:
        async with asyncio.timeout(seconds):  # wait_for may swallow a cancel
            await event.wait()
    except TimeoutError:
        return False
    return True


class Exchange:
    """The replies to one request, while they are written.

    Further replies to a prompt begin when the first has read it: they go on from there.
    """

    def __init__(self, queue: RequestQueue, job: Job) -> None:
        self._queue = queue
        self._job = job
        alone = bool(job.params.calls) and job.params.json_schema is not None
        self.replies = [
            Reply(i, ToolReader(job.tools, alone=alone) if job.tools else None, silent=job.silent)
            for i in range(len(job.prompts) * job.n)
        ]
        self._inbox: deque[tuple[int, str, Any]] = deque()
        self._something = asyncio.Event()
        self._queued: dict[int, QueuedReply] = {}
        self._later: dict[int, range] = {}  # replies that begin after the one with this index
        self._left = len(self.replies)
        self._place = queue.admit(job.client)
        try:
            for first in range(0, self._left, job.n):
                self._ask(first)
                self._later[first] = range(first + 1, first + job.n)
        except BaseException:
            self.cancel()
            raise

    def _ask(self, index: int) -> None:
        job, (prompt, nth) = self._job, divmod(index, self._job.n)
        params = job.params
        if nth:
            assert params.seed is not None
            params = params.replace(seed=seed_of(params.seed, nth), fresh=False)
        heard, told = partial(self._on_message, index), (job.asked, job.label, job.arm)
        queued = QueuedReply(job.prompts[prompt], params, self._place, heard, *told)
        self._queued[index] = self._queue.take(queued)

    def _on_message(self, index: int, message: tuple[str, Any]) -> None:
        self._inbox.append((index, *message))
        self._something.set()

    def cancel(self) -> None:
        self._later.clear()
        self._place.leave()
        for queued in self._queued.values():
            queued.cancel()

    def stop(self) -> None:
        """End the replies, but keep receiving: each still sends its last event."""
        for queued in self._queued.values():
            queued.end()

    async def wait(self, seconds: float | None) -> bool:
        """Wait until there are events or the time is up; return True if there are events."""
        if not self._inbox:
            self._something.clear()
            return await happens(self._something, seconds)
        return True

    def take(self) -> list[tuple[Reply, list[Event]]]:
        """Return the new events, by reply.

        Raises:
            SpecllamaError, Refusal: the error that ended one of them; the others were cancelled.
        """
        said: dict[int, list[Event]] = {}
        while self._inbox:
            index, kind, payload = self._inbox.popleft()
            if kind == "error":
                self.cancel()
                if said:  # what was written before is told first
                    self._inbox.appendleft((index, kind, payload))
                    break
                raise payload
            if kind == "end":
                self._left -= 1
            else:
                said.setdefault(index, []).extend(payload)
                self.replies[index].queue_ms = self._queued[index].queue_ms
            if kind == "end" or any(news(event).rounds for event in payload):
                for later in self._later.pop(index, ()):
                    self._ask(later)
        return [(self.replies[index], events) for index, events in said.items()]

    @property
    def done(self) -> bool:
        return self._left == 0

    @property
    def over(self) -> bool:
        """True if the client no longer receives anything."""
        return self._place not in self._queue.places


P = ParamSpec("P")
T = TypeVar("T")


class Aside:
    """A thread for work on large bodies, so that the event loop goes on.

    Each client has at most one call there, so clients take turns.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "specllama-bodies")
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self, client: str, call: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """Run a call in the thread; return its result or raise its error."""
        lock = self._locks.setdefault(client, asyncio.Lock())
        async with lock:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, partial(call, *args, **more))

    async def write(
        self, client: str, call: Callable[[], bytes], rounds: Iterable[RoundDone]
    ) -> bytes:
        """Encode an answer, in the thread if much is told of rounds in it."""
        told = sum(1 + len(chance.top) for done in rounds for chance in done.chances)
        return call() if told <= _MANY else await self.run(client, call)


Scribe = Callable[[Callable[[], bytes], Iterable[RoundDone]], Awaitable[bytes]]
"""Writes what is told of rounds."""


async def answer(
    request: Request, queue: RequestQueue, job: Job, dialect: Dialect, write: Scribe
) -> Response:
    """Answer a request: whole, or as a stream.

    Raises:
        Refusal, SpecllamaError: before anything was sent.
    """
    exchange = Exchange(queue, job)

    def over() -> None:
        queue.undrafted = request.state.undrafted = exchange.replies[0].undrafted

    request.state.until_over.callback(over)
    try:
        if job.stream:
            early = await _unless_gone(request.receive, _early(exchange))
            if early is not None:
                bodies = _bodies(exchange, dialect, early, write, request.scope)
                return Stream(exchange, dialect.wire, bodies)
        elif await _unless_gone(request.receive, _collect(exchange)):
            exchange.cancel()
            replies = exchange.replies
            rounds = (done for reply in replies for done in reply.rounds)
            whole = await write(lambda: _json.encode(dialect.whole(replies)), rounds)
            return Response(whole, media_type=Json.media_type)
    except BaseException:
        exchange.cancel()
        raise
    exchange.cancel()
    return Response(status_code=499)


async def _collect(exchange: Exchange) -> bool:
    while not exchange.done:
        await exchange.wait(None)
        for reply, events in exchange.take():
            reply.receive(events)
    return True


async def _early(exchange: Exchange) -> list[tuple[Reply, list[Event]]]:
    """Wait for the first events, so that a request that fails at once gets an error status."""
    await exchange.wait(HEAD_S)
    return exchange.take()


async def _unless_gone(receive: Receive, work: Any) -> Any:
    """Return the result, or None if the client leaves first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        gone.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def failed(scope: Scope, error: Exception) -> Refusal:
    """Convert the error that ended an answer; the log is told, without the words of a request."""
    state, refused = scope["state"], refusal(error)
    if not isinstance(error, (SpecllamaError, Refusal)):
        logger.exception("%s failed, %s", scope["path"], state["id"])
    state["cut"] = refused.message if refused.status >= 500 else f"refused as {refused.status}"
    return refused


class Stream(StreamingResponse):
    """Frames, sent as they come. A client that leaves or stops reading ends its replies."""

    def __init__(self, exchange: Exchange, wire: Wire, bodies: AsyncIterator[bytes]) -> None:
        super().__init__(bodies, headers=UNSTORED, media_type=TYPES[wire])
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(OSError, ClientDisconnect):
                await super().__call__(scope, receive, send)
        finally:
            self._exchange.cancel()


async def _bodies(
    exchange: Exchange,
    dialect: Dialect,
    early: list[tuple[Reply, list[Event]]],
    write: Scribe,
    scope: Scope,
) -> AsyncIterator[bytes]:
    wire = dialect.wire
    try:
        said = [(reply, reply.receive(events)) for reply, events in early]
        yield encode(wire, dialect.begun(exchange.replies))
        due, news_due = monotonic() + PING_S, monotonic() + NEWS_S
        while True:
            rounds = (done for _, piece in said for done in piece.rounds)
            body = await write(partial(_spoken, dialect, said), rounds)
            if not body and monotonic() >= due:
                told = dialect.news(exchange.replies) if monotonic() >= news_due else ()
                body = encode(wire, told)
                if not body:
                    yield encode(wire, dialect.waiting()) or b": still here\n\n"
                    due = monotonic() + PING_S
            if body:
                yield body
                due, news_due = monotonic() + PING_S, monotonic() + NEWS_S
            if exchange.done:
                break
            await exchange.wait(max(due - monotonic(), 0.0))
            said = [(reply, reply.receive(events)) for reply, events in exchange.take()]
        yield encode(wire, dialect.ended(exchange.replies))
    except Exception as error:
        yield encode(wire, dialect.failed(scope["path"], failed(scope, error)))


def _spoken(dialect: Dialect, said: Iterable[tuple[Reply, Piece]]) -> bytes:
    frames: list[Frame] = []
    for reply, piece in said:
        if piece.text or piece.reasoning or piece.rounds or piece.read:
            frames += dialect.said(piece)
        if reply.finished is not None:
            frames += dialect.finished(reply)
    return encode(dialect.wire, frames)

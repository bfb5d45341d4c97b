"""The queue of requests before the engine, and of its answers: all of it in one event loop.

The engine's process takes as many requests as it has lanes; the others wait here, by client, and
clients take turns. A request that is over, however it ends, makes room for the next one at once.
An engine that died is started again at once; one that dies soon after its start, or cannot be
started, after a pause that grows each time. A request that comes meanwhile starts it at once.

A request that was running when the engine died is a suspect. If it comes again, it runs with no
other beside it: if it ends, it is no suspect any more, and if the engine dies again, it is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from time import monotonic, perf_counter
from typing import Any, Protocol

from specllama.engine.host import EngineHost
from specllama.engine.process import OnMessage
from specllama.engine.serving import Turns
from specllama.errors import EngineDied, EngineStuck, SpecllamaError
from specllama.events import Event
from specllama.interface import EngineFigures, EngineInfo, Prompt, ToolSyntax
from specllama.server.refusals import busy, ended_engine, loading, shutting_down
from specllama.settings.params import SERVER, GenerateParams
from specllama.told import news

logger = logging.getLogger("specllama.server")

FIGURES_S = 2.0  # how long the engine's figures are waited for, behind other calls
POISON_S = 600.0  # for so long a suspect is one, or refused
AGAIN_S = 30.0  # an engine that died sooner after its start is started again after a pause
PAUSE_S, LONGEST_S = 1.0, 60.0  # the first such pause, and the last; each is twice the one before

_STORES = ("state", "profile")  # topics of notices about what an engine keeps
IN_ALL = 4  # requests of all clients that may wait: so many times as many as of one


@dataclass(eq=False, slots=True)
class Place:
    """A request that was let in: none of its replies is refused because others wait or because
    the server ends.

    Attributes:
        waiting: number of its replies that the engine did not get yet.
    """

    client: str
    queue: RequestQueue
    waiting: int = 0

    def leave(self) -> None:
        """Leave the queue, because no more replies come."""
        self.queue.places.pop(self, None)


@dataclass(eq=False, slots=True)
class QueuedReply:
    """One reply to a request.

    Attributes:
        asked: the request as it came, without the seed that was drawn for it: this recognizes it
            if it comes again.
        label, arm: of the workload and of an experiment, for the figures.
        on_message: called in the event loop with ("events", list), then with ("end", None) or
            ("error", exception).
        arrived_s, sent_s: ``perf_counter`` when it came, and when the engine got it.
    """

    prompt: Prompt
    params: GenerateParams
    place: Place
    on_message: OnMessage
    asked: str = ""
    label: str = ""
    arm: str = ""
    arrived_s: float = field(default_factory=perf_counter)
    sent_s: float = 0.0
    life: int = 0  # of the engine that got it
    stop: Callable[[], None] | None = None
    again: bool = False  # it waits for the second time: an engine died before it heard of it
    over: bool = False
    left: bool = False

    @property
    def client(self) -> str:
        return self.place.client

    @property
    def queue_ms(self) -> float:
        return ((self.sent_s or perf_counter()) - self.arrived_s) * 1e3

    def cancel(self) -> None:
        """Cancel the reply of a client that has left; its lane is free before the next pass."""
        if not self.over and not self.left:
            self.left = True
            self.end()

    def end(self) -> None:
        """End the reply where it is; its last event still comes."""
        if self.stop is not None:
            self.stop()
        else:
            self.place.queue.withdraw(self)


@dataclass(slots=True)
class Suspect:
    """A request that was running when the engine died.

    Attributes:
        life: number of times that the engine had died before it got this request.
        until_s: time when the suspicion ends.
    """

    life: int
    until_s: float
    refused: bool


class Watcher(Protocol):
    """An observer of every request: when it is sent to the engine, answered and ended."""

    def sent(self, queued: QueuedReply) -> None: ...

    def received(self, queued: QueuedReply, events: list[Event]) -> None: ...

    def ended(self, queued: QueuedReply, error: BaseException | None) -> None: ...


class RequestQueue:
    """The requests of one engine.

    Args:
        name: the model's name in answers.
        lanes: most requests that the engine takes at once; it may take fewer.
        most: most requests of one client that may wait.

    Attributes:
        places: of the requests that were let in and are not over.
        undrafted: why nothing was drafted for the reply that ended last; "" if something was.
    """

    def __init__(self, host: EngineHost, name: str, *, lanes: int, most: int = 64) -> None:
        self.host = host
        self.name = name
        self.lanes = lanes
        self.most = most
        self.watchers: list[Watcher] = []
        self._warned: set[str] = set()  # topics of notices
        self.running: dict[QueuedReply, None] = {}
        self.restarts = 0
        self.closing = False
        self.cut = False  # nothing is waited for any more
        self.places: dict[Place, None] = {}
        self._queued: Counter[str] = Counter()  # requests that wait, by client
        self._asked: set[asyncio.Future[Any]] = set()
        self._waiting = Turns[QueuedReply]()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0  # that of the loop
        self._starting: asyncio.Task[None] | None = None
        self._pause_s = 0.0
        self._pausing: asyncio.TimerHandle | None = None
        self._suspects: dict[str, Suspect] = {}
        self._deaths = 0
        self._ran_s = -AGAIN_S  # since when it runs, or was tried to
        self.loaded = False
        self.tool_syntax: ToolSyntax = ""
        self.thinks = False
        self.undrafted = ""
        self._template: tuple[str, str, str] = "", "", ""

    @property
    def ready(self) -> bool:
        return self.loaded and self.host.ready

    @property
    def free(self) -> bool:
        """True if a lane is free: the engine gets no more requests than it has lanes."""
        return len(self.running) < self.lanes

    @property
    def n_waiting(self) -> int:
        """The number of requests with replies that the engine did not get yet."""
        return self._queued.total()

    async def start(self) -> EngineInfo:
        """Load the engine; raise the errors of ``EngineHost.start``."""
        self._loop = loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.host.loop = loop if isinstance(loop, asyncio.SelectorEventLoop) else None
        self.host.on_death = lambda death: self._soon(self._died, death)
        info = await asyncio.to_thread(self.host.start)
        self.lanes = min(self.lanes, info.lanes)
        self.loaded = True
        self.tool_syntax = await self.ask("tool_syntax")
        self.thinks = await self.ask("thinks")
        return info

    async def unload(self) -> None:
        """End the idle engine, until ``start``."""
        self.loaded = False
        await asyncio.to_thread(self.host.unload)

    def admit(self, client: str) -> Place:
        """Let a request in.

        Raises:
            Refusal: the model is loading, the server is about to end, or too many wait.
        """
        if self.closing:
            raise shutting_down()
        if not self.loaded:
            raise loading()
        free = self.free and not self._waiting
        for whose, wait, most in (
            (" of one client", self._queued[client], self.most),
            ("", self.n_waiting, IN_ALL * self.most),
        ):
            if wait >= most and not free:
                raise busy(f"at most {most} requests{whose} wait", "queue_full")
        place = Place(client, self)
        self.places[place] = None
        return place

    def take(self, queued: QueuedReply) -> QueuedReply:
        """Queue a reply of a request that was let in; its ``on_message`` is not called before this
        returns.

        Raises:
            Refusal: the server ends now, or the request ended the engine.
        """
        if self.cut:
            raise shutting_down()
        if (suspect := self._suspected(queued.asked)) is not None and suspect.refused:
            raise ended_engine("the engine did not survive this request before")
        self._wait(queued)
        self._serve()
        return queued

    def _wait(self, queued: QueuedReply) -> None:
        """Count a reply as waiting."""
        place = queued.place
        self._waiting.put(place.client, queued)
        if not place.waiting:
            self._queued[place.client] += 1
        place.waiting += 1

    def withdraw(self, queued: QueuedReply) -> None:
        """Remove a reply that waits."""
        if self._waiting.remove(queued.client, queued):
            self._called(queued)
            self._end(queued, "end", None)

    async def ask(self, method: str, *args: Any, client: str = "") -> Any:
        """Call a method of the engine, and return its result; clients take turns.

        Raises:
            SpecllamaError: the method's error. Refusal: there is no engine yet.
        """
        if not self.loaded:
            raise loading()
        if not self.host.ready:
            self._start_again()
            if self._starting is not None:
                await asyncio.shield(self._starting)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def on_message(message: tuple[str, Any]) -> None:
            kind, payload = message
            if answer.done():
                return
            if kind == "result":
                answer.set_result(payload)
            else:
                answer.set_exception(payload)

        if self.cut:
            raise shutting_down()
        self.host.ask(method, *args, on_message=partial(self._soon, on_message), whose=client)
        self._asked.add(answer)
        try:
            return await answer
        finally:
            self._asked.discard(answer)

    async def figures(self) -> EngineFigures | None:
        """Return the engine's own figures; None if no engine answers soon."""
        if self.ready:
            with contextlib.suppress(SpecllamaError, TimeoutError):
                found: EngineFigures = await asyncio.wait_for(self.ask("figures"), FIGURES_S)
                return found
        return None

    async def template(self) -> tuple[str, str, str]:
        """Return the template of chats and the texts that begin and end one; the last known ones if
        the model is not loaded."""
        if self.loaded:
            self._template = await self.ask("template")
        return self._template

    def cut_off(self) -> None:
        """Stop waiting for anything, and send all who wait an error."""
        self.cut = True
        for queued in [*self.running, *self._waiting]:
            if not queued.left:
                queued.on_message(("error", shutting_down()))
                queued.cancel()
        for answer in self._asked:
            if not answer.done():
                answer.set_exception(shutting_down())

    # -- inside --

    def _soon(self, call: Callable[..., object], *args: Any) -> None:
        """Call a function in the event loop, from any thread."""
        assert self._loop is not None
        if threading.get_ident() == self._thread:
            self._loop.call_soon(call, *args)  # which needs not be woken
            return
        with contextlib.suppress(RuntimeError):  # the loop is over, and so is its listener
            self._loop.call_soon_threadsafe(call, *args)

    def _serve(self) -> None:
        """Send as many requests as the engine can take; clients take turns."""
        while self._waiting and self.free and not self._starting:
            if not self.host.ready:
                self._start_again()
                return
            if not self._may_join(next(iter(self._waiting))):
                return  # nor may any other that came later: its turn has to come
            queued = self._waiting.pop()
            self._called(queued)
            self._send(queued)

    def _may_join(self, queued: QueuedReply) -> bool:
        """True if a request may join the running ones: a suspect runs only with other suspects."""
        others = [other.asked for other in self.running if other.asked != queued.asked]
        asked = [queued.asked, *others] if others else []
        return all(self._suspected(one) is None for one in asked)

    def _suspected(self, asked: str) -> Suspect | None:
        suspect = self._suspects.get(asked)
        return suspect if suspect is not None and monotonic() < suspect.until_s else None

    def _called(self, queued: QueuedReply) -> None:
        """Count a reply as no longer waiting."""
        place = queued.place
        place.waiting -= 1
        if not place.waiting:
            self._queued[place.client] -= 1
            if not self._queued[place.client]:
                del self._queued[place.client]

    def _send(self, queued: QueuedReply) -> None:
        self.running[queued] = None
        queued.sent_s = perf_counter()
        queued.life = self._deaths
        for watcher in self.watchers:
            watcher.sent(queued)

        def on_message(message: tuple[str, Any]) -> None:
            self._soon(self._on_message, queued, *message)

        try:
            # prompts are cached for each API key apart: how much was cached tells no one else
            scope = queued.client if queued.client.startswith("key ") else ""
            params = queued.params.replace(scope=scope, owner=SERVER)
            queued.stop = self.host.send(queued.prompt, params, on_message, whose=queued.client)
        except Exception as error:
            self._soon(self._on_message, queued, "error", error)

    def _on_message(self, queued: QueuedReply, kind: str, payload: Any) -> None:
        if queued.over:
            return
        if kind == "events":
            self._warn(payload)
            for watcher in self.watchers:
                watcher.received(queued, payload)
            if not queued.left:
                queued.on_message((kind, payload))
            return
        if isinstance(payload, EngineDied) and not (payload.heard or queued.again or queued.left):
            queued.again, queued.stop = True, None  # nothing of it was begun
            del self.running[queued]
            self._wait(queued)
            self._serve()
            return
        if isinstance(payload, EngineDied):
            self._suspect(queued, sure=isinstance(payload, EngineStuck) and payload.culprit)
        elif kind == "end" and not queued.left:
            self._suspects.pop(queued.asked, None)
        self._end(queued, kind, payload)
        self._serve()

    def _warn(self, events: list[Event]) -> None:
        """Log, once for each store, that it cannot be written or read: clients are not told."""
        for one in chain.from_iterable(news(event).notices for event in events):
            if one.topic in _STORES and one.topic not in self._warned:
                self._warned.add(one.topic)
                logger.warning("%s: %s", self.name, one.message)

    def _end(self, queued: QueuedReply, kind: str, payload: Any) -> None:
        queued.over = True
        sent = self.running.pop(queued, queued) is None
        for watcher in self.watchers if sent else ():
            watcher.ended(queued, payload)
        if not queued.left:
            queued.on_message((kind, payload))

    def _suspect(self, queued: QueuedReply, *, sure: bool) -> None:
        """Record a request that was running when the engine died; ``sure`` if it was the cause."""
        if not queued.asked:
            return
        before = self._suspected(queued.asked)
        # several replies to it may have been there, which is one death
        refused = before is not None and (before.refused or before.life != queued.life)
        self._suspects.pop(queued.asked, None)
        self._suspects[queued.asked] = Suspect(queued.life, monotonic() + POISON_S, sure or refused)
        while len(self._suspects) > 256:
            del self._suspects[next(iter(self._suspects))]

    def _died(self, death: SpecllamaError) -> None:
        self._deaths += 1
        self._again(death)

    def _again(self, why: Exception) -> None:
        """Start the engine again: at once if it ran for long, else after a pause."""
        soon = monotonic() - self._ran_s < AGAIN_S
        self._pause_s = min(max(2 * self._pause_s, PAUSE_S), LONGEST_S) if soon else 0.0
        when = f"in {self._pause_s:g} s" if soon else "now"
        logger.warning("%s: %s; it starts again %s", self.name, str(why).rstrip("."), when)
        loop = asyncio.get_running_loop()
        self._pausing = loop.call_later(self._pause_s, self._start_again)

    def _start_again(self) -> None:
        """Begin to start the engine unless that was begun, or it is not wanted any more."""
        if self._pausing is not None:
            self._pausing.cancel()
        if self.loaded and not (self.closing or self._starting or self.host.ready):
            self._starting = asyncio.get_running_loop().create_task(self._restart())

    async def _restart(self) -> None:
        error: Exception | None = None
        try:
            self.restarts += 1
            await asyncio.to_thread(self.host.start)
            logger.info("%s is started again", self.name)
        except Exception as refused:  # also of the system: no process, no file
            if not isinstance(refused, SpecllamaError):
                logger.exception("%s could not be started again", self.name)
            error = refused
        self._starting, self._ran_s = None, monotonic()
        if error is not None:  # no request waits for what does not come
            while self._waiting:
                queued = self._waiting.pop()
                self._called(queued)
                self._end(queued, "error", error)
            self._again(error)
        self._serve()

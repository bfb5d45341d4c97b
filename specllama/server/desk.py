"""Where requests wait for the engine, and hear from it: everything here runs in one event loop.

The engine's process takes as many requests as it has lanes; the others wait here, by client, and
clients take turns. A request that is over, however it ends, makes room for the next one at once.
An engine that died is started again at once; one that was hardly alive, when it is asked for.

A request that was there when the engine died is a suspect. When it comes again, it is written with
no other beside it: if it ends, it is none any more, and if the engine dies again, it is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import Any, Protocol

from specllama.engine.turns import Turns
from specllama.errors import EngineDied, EngineStuck, SpecllamaError
from specllama.events import Event
from specllama.interface import EngineFigures, EngineInfo, Prompt, ToolSyntax
from specllama.server.refusals import Refusal, ended_engine, loading, shutting_down
from specllama.settings.params import GenerateParams

logger = logging.getLogger("specllama.server")

FIGURES_S = 2.0  # how long the engine's figures are waited for, behind other calls
POISON_S = 600.0  # for so long a suspect is one, or refused
AGAIN_S = 30.0  # an engine that died sooner after its start is not started again unasked

Tell = Callable[[tuple[str, Any]], object]

IN_ALL = 4  # requests of all clients that may wait: so many times as many as of one


class Host(Protocol):
    """What runs the engine: ``EngineHost``."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def ready(self) -> bool: ...

    def start(self) -> EngineInfo: ...

    on_death: Callable[[], object]

    def send(
        self, prompt: Prompt, params: GenerateParams, tell: Tell, *, whose: str = ""
    ) -> Callable[[], None]: ...

    def ask(self, method: str, *args: Any, tell: Tell, whose: str = "") -> None: ...

    def close(self) -> None: ...


@dataclass(eq=False, slots=True)
class Place:
    """A request that was let in: none of its replies is refused for others that wait, nor for
    the end of the server.

    Attributes:
        waiting: how many of its replies the engine did not get yet.
    """

    client: str
    desk: Desk
    waiting: int = 0

    def leave(self) -> None:
        """There are no more replies to come."""
        self.desk.places.pop(self, None)


@dataclass(eq=False, slots=True)
class Ticket:
    """One reply to a request.

    Attributes:
        asked: what it was when it came, without the seed that was drawn for it: by this it is
            known when it comes again.
        label, arm: of the workload and of an experiment, for the figures.
        hear: called in the event loop with ("events", list), then with ("end", None) or
            ("error", exception).
        arrived_s, sent_s: ``perf_counter`` when it came, and when the engine got it.
    """

    prompt: Prompt
    params: GenerateParams
    place: Place
    hear: Tell
    asked: str = ""
    label: str = ""
    arm: str = ""
    arrived_s: float = field(default_factory=perf_counter)
    sent_s: float = 0.0
    life: int = 0  # of the engine that got it
    stop: Callable[[], None] | None = None
    over: bool = False
    left: bool = False

    @property
    def client(self) -> str:
        return self.place.client

    @property
    def queue_ms(self) -> float:
        return ((self.sent_s or perf_counter()) - self.arrived_s) * 1e3

    def cancel(self) -> None:
        """The client has left; its lane is free before the next pass."""
        if not self.over and not self.left:
            self.left = True
            self.end()

    def end(self) -> None:
        """End the reply where it is; its last word comes all the same."""
        if self.stop is not None:
            self.stop()
        else:
            self.place.desk.withdraw(self)


@dataclass(slots=True)
class Suspect:
    """A request that was there when the engine died.

    Attributes:
        life: of the engine that died of it, or beside it: so many had died before.
        until_s: when it is none any more.
    """

    life: int
    until_s: float
    refused: bool


class Watcher(Protocol):
    """Who sees everything that happens at the desk."""

    def sent(self, ticket: Ticket) -> None: ...

    def said(self, ticket: Ticket, events: list[Event]) -> None: ...

    def ended(self, ticket: Ticket, error: BaseException | None) -> None: ...


class Desk:
    """The requests of one engine.

    Args:
        lanes: how many the engine is to take at once; it may take fewer.
        most: how many requests of one client may wait.

    Attributes:
        places: of the requests that were let in and are not over.
    """

    def __init__(self, host: Host, *, lanes: int, most: int = 64) -> None:
        self.host = host
        self.lanes = lanes
        self.most = most
        self.watchers: list[Watcher] = []
        self.running: dict[Ticket, None] = {}
        self.restarts = 0
        self.closing = False
        self.cut = False  # nothing is waited for any more
        self.places: dict[Place, None] = {}
        self._queued: Counter[str] = Counter()  # requests that wait, by client
        self._asked: set[asyncio.Future[Any]] = set()
        self._waiting = Turns[Ticket]()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[None] | None = None
        self._suspects: dict[str, Suspect] = {}
        self._deaths = 0
        self._restarted_s = -AGAIN_S
        self.loaded = False
        self.tool_syntax: ToolSyntax = ""
        self.thinks = False

    @property
    def ready(self) -> bool:
        return self.loaded and self.host.ready

    @property
    def free(self) -> bool:
        """Whether a lane is: the engine gets no more requests than it has lanes."""
        return len(self.running) < self.lanes

    @property
    def n_waiting(self) -> int:
        """Requests of which the engine did not get all."""
        return self._queued.total()

    async def start(self) -> EngineInfo:
        """Load; raises what ``EngineHost.start`` raises."""
        self._loop = asyncio.get_running_loop()
        self.host.on_death = lambda: self._soon(self._died)
        info = await asyncio.to_thread(self.host.start)
        self.lanes = min(self.lanes, info.lanes)
        self.loaded = True
        self.tool_syntax = await self.ask("tool_syntax")
        self.thinks = await self.ask("thinks")
        return info

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
                raise Refusal(
                    429,
                    f"at most {most} requests{whose} wait",
                    "rate_limit_error",
                    "queue_full",
                    headers={"Retry-After": "2"},
                )
        place = Place(client, self)
        self.places[place] = None
        return place

    def take(
        self,
        place: Place,
        prompt: Prompt,
        params: GenerateParams,
        hear: Tell,
        *,
        asked: str = "",
        label: str = "",
        arm: str = "",
    ) -> Ticket:
        """Take a reply of a request that was let in; ``hear`` is not called before this returns.

        Raises:
            Refusal: the server ends now, or the request ended the engine.
        """
        if self.cut:
            raise shutting_down()
        if (suspect := self._suspected(asked)) is not None and suspect.refused:
            raise ended_engine("the engine did not survive this request before")
        ticket = Ticket(prompt, params, place, hear, asked, label, arm)
        self._waiting.put(place.client, ticket)
        if not place.waiting:
            self._queued[place.client] += 1
        place.waiting += 1
        self._serve()
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Take back one that waits."""
        if self._waiting.remove(ticket.client, ticket):
            self._called(ticket)
            self._end(ticket, "end", None)

    async def ask(self, method: str, *args: Any, client: str = "") -> Any:
        """What a method of the engine returns; clients take turns.

        Raises:
            SpecllamaError: what it raised. Refusal: there is no engine yet.
        """
        if not self.loaded:
            raise loading()
        if not self.host.ready:
            await asyncio.to_thread(self.host.start)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def hear(said: tuple[str, Any]) -> None:
            kind, payload = said
            if answer.done():
                return
            if kind == "result":
                answer.set_result(payload)
            else:
                answer.set_exception(payload)

        if self.cut:
            raise shutting_down()
        self.host.ask(method, *args, tell=lambda said: self._soon(hear, said), whose=client)
        self._asked.add(answer)
        try:
            return await answer
        finally:
            self._asked.discard(answer)

    async def figures(self) -> EngineFigures | None:
        """The engine's own; None where there is none that answers soon."""
        if not self.ready:
            return None
        try:
            found: EngineFigures = await asyncio.wait_for(self.ask("figures"), FIGURES_S)
        except (SpecllamaError, TimeoutError):
            return None
        return found

    def cut_off(self) -> None:
        """Nothing is waited for any more, and all who wait hear so."""
        self.cut = True
        for ticket in [*self.running, *self._waiting]:
            if not ticket.left:
                ticket.hear(("error", shutting_down()))
                ticket.cancel()
        for answer in self._asked:
            if not answer.done():
                answer.set_exception(shutting_down())

    # -- inside --

    def _soon(self, call: Callable[..., object], *args: Any) -> None:
        """From any thread: call it in the loop."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is over, and so is whoever listened
            self._loop.call_soon_threadsafe(call, *args)

    def _serve(self) -> None:
        """Send what the engine can take; clients take turns."""
        while self._waiting and self.free and not self._starting:
            if not self.host.ready:
                self._starting = asyncio.get_running_loop().create_task(self._restart())
                return
            if not self._may_join(self._waiting.first):
                return  # nor may any other that came later: its turn has to come
            ticket = self._waiting.pop()
            self._called(ticket)
            self._send(ticket)

    def _may_join(self, ticket: Ticket) -> bool:
        """Whether a request may join the running ones: a suspect runs only with other suspects."""
        others = [other.asked for other in self.running if other.asked != ticket.asked]
        asked = [ticket.asked, *others] if others else []
        return all(self._suspected(one) is None for one in asked)

    def _suspected(self, asked: str) -> Suspect | None:
        suspect = self._suspects.get(asked)
        return suspect if suspect is not None and monotonic() < suspect.until_s else None

    def _called(self, ticket: Ticket) -> None:
        """It does not wait any more."""
        place = ticket.place
        place.waiting -= 1
        if not place.waiting:
            self._queued[place.client] -= 1
            if not self._queued[place.client]:
                del self._queued[place.client]

    def _send(self, ticket: Ticket) -> None:
        self.running[ticket] = None
        ticket.sent_s = perf_counter()
        ticket.life = self._deaths
        for watcher in self.watchers:
            watcher.sent(ticket)

        def tell(said: tuple[str, Any]) -> None:
            self._soon(self._heard, ticket, *said)

        try:
            # prompts are cached for each API key apart: how much was cached tells no one else
            scope = ticket.client if ticket.client.startswith("key ") else ""
            params = ticket.params.replace(scope=scope)
            ticket.stop = self.host.send(ticket.prompt, params, tell, whose=ticket.client)
        except Exception as error:
            self._soon(self._heard, ticket, "error", error)

    def _heard(self, ticket: Ticket, kind: str, payload: Any) -> None:
        if ticket.over:
            return
        if kind == "events":
            for watcher in self.watchers:
                watcher.said(ticket, payload)
            if not ticket.left:
                ticket.hear((kind, payload))
            return
        if isinstance(payload, EngineDied):
            self._suspect(ticket, sure=isinstance(payload, EngineStuck) and payload.culprit)
        elif kind == "end" and not ticket.left:
            self._suspects.pop(ticket.asked, None)
        self._end(ticket, kind, payload)
        self._serve()

    def _end(self, ticket: Ticket, kind: str, payload: Any) -> None:
        ticket.over = True
        sent = self.running.pop(ticket, ticket) is None
        for watcher in self.watchers if sent else ():
            watcher.ended(ticket, payload)
        if not ticket.left:
            ticket.hear((kind, payload))

    def _suspect(self, ticket: Ticket, *, sure: bool) -> None:
        """Remember who was there when the engine died; ``sure``: it died of this one."""
        if not ticket.asked:
            return
        before = self._suspected(ticket.asked)
        # several replies to it may have been there, which is one death
        refused = before is not None and (before.refused or before.life != ticket.life)
        self._suspects.pop(ticket.asked, None)
        until_s = monotonic() + POISON_S
        self._suspects[ticket.asked] = Suspect(ticket.life, until_s, sure or refused)
        while len(self._suspects) > 256:
            del self._suspects[next(iter(self._suspects))]

    def _died(self) -> None:
        """The engine is gone: the next request starts another one."""
        self._deaths += 1
        soon = monotonic() - self._restarted_s < AGAIN_S
        if not (self.closing or self._starting or soon or self.host.ready):
            self._starting = asyncio.get_running_loop().create_task(self._restart())

    async def _restart(self) -> None:
        error: Exception | None = None
        try:
            self.restarts += 1
            self._restarted_s = monotonic()
            await asyncio.to_thread(self.host.start)
        except Exception as refused:  # also of the system: no process, no file
            if not isinstance(refused, SpecllamaError):
                logger.exception("the engine could not be started again")
            error = refused
        finally:
            self._starting = None
        if error is not None:  # nobody is kept waiting for what does not come
            while self._waiting:
                ticket = self._waiting.pop()
                self._called(ticket)
                self._end(ticket, "error", error)
        self._serve()

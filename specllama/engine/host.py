"""The engine in a child process, with the interface of the engine itself.

llama.cpp ends its process on some bad calls, and the kernel ends it when memory runs out. Here that
costs one reply: the child dies, the parent turns its exit status and last words into
``EngineDied``, and the next request starts a fresh child. Requests carry the whole conversation,
so nothing has to be rebuilt. The parent never imports llama_cpp.

    parent                                   child
    generate() ── ("generate", id, …) ─────► command thread ─► request thread: prepare
                                                    main thread: begin, step, step, …
               ◄─ ("events", id, [Event, …]) ◄──────────────┘ or, soon after others, event thread
    ask()      ── ("call", id, …) ─────────► command thread ─► call thread
    cancel     ── ("cancel", id) ──────────► command thread sets the request's Cancel

A thread of the parent, or its event loop, always drains the pipe, so a slow screen never slows the
decoder. The child ends itself when the pipe closes: a dead parent leaves nothing behind.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specllama.cancel import Cancel
from specllama.engine.process import Child, OnDeath, OnMessage
from specllama.engine.serving import EngineFactory as EngineFactory
from specllama.engine.serving import OnEvent
from specllama.errors import EngineDied, EngineError, SpecllamaError
from specllama.events import Event, Notice
from specllama.interface import Closes, EngineInfo, EngineLike, Message, Prompt, Stepped
from specllama.settings.params import EngineOptions, GenerateParams

if TYPE_CHECKING:
    import asyncio


@dataclass(frozen=True, slots=True)
class LoadEngine:
    """The real engine: a target, perhaps a draft model, and how to load them.

    Attributes:
        beside: bytes of memory that it leaves to other engines, see ``memory.leave``.
    """

    target: str
    draft: str | None = None
    options: EngineOptions = field(default_factory=EngineOptions)
    beside: int = 0

    def __call__(self, progress: OnEvent, /) -> Stepped:
        from specllama.engine.opening import OpeningPair
        from specllama.models import memory

        memory.leave(self.beside)
        with OpeningPair(self.target, self.draft, self.options, on_progress=progress) as opening:
            from specllama.engine.engine import Engine

            return Engine.of(opening)


class EngineHost(Closes):
    """One engine in one child process at a time.

    ``start()`` loads and blocks; ``generate()`` starts the child itself when there is none, so a
    conversation survives the death of its engine. ``on_event`` receives LoadProgress from the
    reader thread. A child that ends no pass for long is ended, see ``pulse``. ``on_death`` is
    called by another thread when a child that was ready has ended by itself. ``loop`` takes what a
    child says, if it is set before the start; else a thread does. What is measured at rest comes
    as Measuring, and may change ``info``.
    """

    def __init__(
        self, factory: EngineFactory, *, on_event: OnEvent | None = None, close_grace_s: float = 3.0
    ) -> None:
        self.on_death: OnDeath = lambda death: None
        self.loop: asyncio.SelectorEventLoop | None = None
        self.factory = factory
        self.on_event = on_event
        self.close_grace_s = close_grace_s
        self._guard = threading.Lock()
        self._child: Child | None = None
        self._closed = False
        self._starts = 0
        self._last_info: EngineInfo | None = None

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded pair, or the previous one until its successor is loaded."""
        child = self._child
        if child is not None and child.info is not None:
            self._last_info = child.info
        if self._last_info is None:
            raise EngineError("no model is loaded yet", "wait for the load to finish")
        return self._last_info

    @property
    def ready(self) -> bool:
        child = self._child
        return child is not None and child.ready

    @property
    def death(self) -> SpecllamaError | None:
        """The reason why there is no engine any more, until it is started again."""
        child = self._child
        return None if child is None else child.death

    @property
    def pid(self) -> int | None:
        child = self._child
        return child.process.pid if child is not None and child.death is None else None

    def start(self) -> EngineInfo:
        """Load, unless a healthy child is there already.

        Raises:
            SpecllamaError: what the load raised in the child, or EngineDied.
        """
        child = self.begin()
        try:
            self._last_info = child.wait_ready()
        except EngineDied:
            if not child.distrusted:
                raise
            return self.start()
        return self._last_info

    def begin(self) -> Child:
        """Start as ``start`` does, without waiting for the load."""
        if (child := self._child) is not None and child.stuck is not None:
            child.wait_gone()
        with self._guard:
            if self._closed:
                raise EngineError("the engine was closed")
            child = self._child
            if child is None or child.death is not None:
                child = Child(
                    self.factory,
                    lambda event: self.on_event(event) if self.on_event else None,
                    on_death=lambda death: self.on_death(death),
                    loop=self.loop,
                )
                self._child = child
                self._starts += 1
        return child

    def switch(self, factory: EngineFactory) -> EngineInfo:
        """Unload, then load something else; two targets at once seldom fit.

        If the new one cannot be loaded, the old recipe is restored, and the next request loads it.
        """
        before = self.factory
        self.unload()
        self.factory = factory
        try:
            return self.start()
        except SpecllamaError:
            self.unload()
            self.factory = before
            raise

    def generate(
        self, prompt: Prompt, params: GenerateParams, *, cancel: Cancel | None = None
    ) -> Iterator[Event]:
        fresh = self._starts > 0 and not self.ready
        self.start()
        child = self._child
        assert child is not None
        if fresh:
            yield Notice("The engine was started again.", topic="engine")
        inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        request_id = child.ask(inbox.put, "generate", "", prompt, params)
        try:
            # through the inbox, so that the caller (perhaps a signal handler) need not wait
            with (cancel or Cancel()).calling(lambda: inbox.put(("cancel", None))):
                while True:
                    kind, payload = inbox.get()
                    if kind == "cancel":
                        child.cancel(request_id)
                    elif kind == "events":
                        yield from payload
                    elif kind == "end":
                        return
                    else:
                        raise payload
        finally:
            # The child serves requests in order, so there is no need to wait for an abandoned one.
            if child.forget(request_id):
                child.cancel(request_id)

    def send(
        self, prompt: Prompt, params: GenerateParams, on_message: OnMessage, *, whose: str = ""
    ) -> Callable[[], None]:
        """Begin a request of a healthy child; another thread calls ``on_message``.

        Returns what cancels it: its last event comes all the same.

        Raises:
            EngineError: there is no child, see ``start``.
        """
        child = self._healthy()
        request_id = child.ask(on_message, "generate", whose, prompt, params)
        return lambda: child.cancel(request_id)

    def read_ahead(
        self, conversation: Sequence[Message], params: GenerateParams, on_message: OnMessage
    ) -> None:
        """Read a conversation whose last message is still being typed, until another request comes;
        ``on_message`` receives the progress, from another thread."""
        if self.ready:
            self.send(conversation, params.replace(ahead=True), on_message)

    def ask(self, method: str, *args: Any, on_message: OnMessage, whose: str = "") -> None:
        """Call a method of the child's engine that answers and changes nothing."""
        child = self._healthy()
        child.ask(on_message, "call", whose, method, args)

    def skip(self) -> None:
        """Measure nothing more at rest, until the next load."""
        self._healthy().skip()

    def count_tokens(self, prompt: str | Sequence[Message]) -> int:
        self.start()
        inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.ask("count_tokens", prompt, on_message=inbox.put)
        kind, payload = inbox.get()
        if kind == "result":
            return int(payload)
        raise payload

    def _healthy(self) -> Child:
        child = self._child
        if child is None:
            raise EngineError("no engine is running")
        return child

    def close(self) -> None:
        """Ask, then terminate, then kill. Idempotent, callable from any thread, also mid-load."""
        self._closed = True
        self.unload()

    def unload(self) -> None:
        """Close until the next ``start``: nothing of the model stays in memory."""
        with self._guard:
            child, self._child = self._child, None
        if child is not None:
            child.stop(self.close_grace_s)


class InlineHost:
    """An engine in this process: a server's, or a stand-in. One that died is opened anew for the
    next request, as a child is started anew.
    """

    def __init__(self, factory: EngineFactory) -> None:
        self.factory = factory
        self.on_event: Callable[[Event], None] | None = None
        self.on_death: OnDeath = lambda death: None  # never called: the next request hears of it
        self.death: SpecllamaError | None = None
        self.engine: EngineLike | None = None

    @property
    def info(self) -> EngineInfo:
        return self._started().info

    def _started(self) -> EngineLike:
        if self.engine is None:
            made = self.factory(self.on_event or (lambda event: None))
            self.engine = self.engine or made  # another thread may have been quicker
        return self.engine

    @contextmanager
    def _alive(self) -> Iterator[EngineLike]:
        engine = self._started()
        try:
            yield engine
        except EngineDied:
            if self.engine is engine:
                self.engine = None
                engine.close()
            raise

    def start(self) -> EngineInfo:
        return self._started().info

    def read_ahead(
        self, conversation: Sequence[Message], params: GenerateParams, on_message: OnMessage
    ) -> None:
        """Do nothing: a server reads what it is sent, never ahead."""

    def switch(self, factory: EngineFactory) -> EngineInfo:
        before, old = self.factory, self.engine
        self.factory, self.engine = factory, None
        try:
            return self.start()
        except SpecllamaError:
            self.factory, self.engine = before, old
            raise

    def generate(
        self, prompt: Prompt, params: GenerateParams, *, cancel: Cancel | None = None
    ) -> Iterator[Event]:
        with self._alive() as engine:
            yield from engine.generate(prompt, params, cancel=cancel)

    def count_tokens(self, prompt: str | Sequence[Message]) -> int:
        with self._alive() as engine:
            return engine.count_tokens(prompt)

    def unload(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()

    def close(self) -> None:
        self.unload()


HostLike = EngineHost | InlineHost
"""An engine that can be started and replaced."""

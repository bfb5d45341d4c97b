"""The engine's process from inside: requests come over a pipe, and events go back."""

from __future__ import annotations

import faulthandler
import gc
import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Generic, Protocol, TypeVar, cast

from specllama.backend.cores import Others
from specllama.cancel import Cancel
from specllama.engine.pulse import THREADS, Part, Pulse
from specllama.errors import Cancelled, SpecllamaError, as_ours
from specllama.events import Event, Finished, Measuring, Started
from specllama.interface import EngineInfo, EngineLike, Stepped
from specllama.settings.params import GenerateParams

REST_S = 2.0  # without a request, before what is not known yet of the models is measured
CROWDED_S = 30.0  # before it is tried again, where other programs need the processors
LONGEST_S = 600.0  # of the first wait, which doubles each time that a request ended it
KEEP_S = 0.5  # without a request, before what the last ones left is written to disk
T = TypeVar("T")
OnEvent = Callable[[Event], None]

SWITCH_S = 0.0005
CLOSE_S = 2.0
GATHER_S = 0.012  # events of so long cross the pipe together: a fast model makes thousands a second


class EngineFactory(Protocol):
    """A maker of an engine, for a child process a ``Stepped`` one; it must pickle then. Its
    argument receives the load's progress."""

    def __call__(self, progress: OnEvent, /) -> EngineLike: ...


class Link:
    """The child's end of the pipe. If the parent is gone, the child ends at once.

    Threads leave here what they have to say, and go on. A thread of its own writes it; the one that
    makes passes writes its events itself, unless some were written a moment ago: to wake a thread
    takes a processor longer than to write, and the passes need all of them.

    Attributes:
        cancels: of the requests that were not answered yet.
        requests, constrained, calls: what waits for the thread that takes it.
        ready: requests that are prepared and wait for the engine.
        rest: ends what is measured at rest, for whatever is asked. skips: nothing is any more.
        closing: whether the parent wants no more; ``ready`` has a None then.
    """

    def __init__(self, conn: Connection, pulse: Pulse) -> None:
        self._conn = conn
        self._pulse = pulse
        self._lock = threading.Lock()
        self.cancels: dict[int, Cancel] = {}
        self._said: list[tuple[str, int, Any]] = []
        self._writing = threading.Lock()
        self._wrote_s = 0.0  # when events were written last
        self._something = threading.Event()
        self._urgent = threading.Event()
        self.requests, self.constrained, self.calls = Work(), Work(), Work()
        self.ready: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self.rest, self.broken = Cancel(), 0  # how often a request ended what is done at rest
        self.closing = self.skips = False

    def send(self, kind: str, request_id: int, payload: Any = None) -> None:
        with self._lock:
            self._said.append((kind, request_id, payload))
        self._urgent.set()
        self._something.set()

    def progress(self, event: Event) -> None:
        self.send("progress", 0, event)

    def event(self, request_id: int, event: Event) -> None:
        """Add an event to the next ``flush``."""
        with self._lock:
            self._said.append(("event", request_id, event))

    def flush(self) -> None:
        """Send the waiting messages: at once, or soon together with others that follow closely."""
        if time.monotonic() - self._wrote_s < GATHER_S or not self._writing.acquire(blocking=False):
            self._something.set()
            return
        try:
            self._send_all()
        finally:
            self._writing.release()

    def end(self, request_id: int, error: Exception | None = None) -> None:
        """Report the end of the request; ``error``: its cause, if it failed."""
        self.forget(request_id)
        if error is None:
            self.send("end", request_id)
        else:
            self.send("error", request_id, _told(error, "the engine failed"))

    def forget(self, request_id: int) -> None:
        self.cancels.pop(request_id, None)

    def write(self) -> None:
        """Write in a thread of its own, which also pickles, while the engine computes."""
        going_on = True
        while going_on:
            self._something.wait()
            self._urgent.wait(self._wrote_s + GATHER_S - time.monotonic())
            self._something.clear()
            self._urgent.clear()
            with self._writing:
                going_on = self._send_all()

    def _send_all(self) -> bool:
        """Write the waiting messages; return True if more may come."""
        with self._lock:
            said, self._said = self._said, []
        for kind, request_id, payload in _gathered(said):
            if kind == "over":
                return False
            if kind == "events":
                self._wrote_s = time.monotonic()
            try:
                self._conn.send((kind, request_id, payload))
            except OSError:
                os._exit(1)
        return True

    def close(self, writing: threading.Thread) -> None:
        """Write the waiting messages, and nothing more."""
        self.send("over", 0)
        writing.join(CLOSE_S)

    def listen(self) -> None:
        while True:
            try:
                verb, request_id, *args = self._conn.recv()
            except (EOFError, OSError):
                os._exit(0)
            self._pulse.hears(request_id if verb in ("generate", "call") else 0)
            self.skips |= verb == "skip"
            if verb not in ("call", "cancel", "ping"):
                self.rest.set()
            if verb == "cancel":
                if (cancel := self.cancels.get(request_id)) is not None:
                    cancel.set()
            elif verb == "close":
                for cancel in tuple(self.cancels.values()):
                    cancel.set()
                self.closing = True
                self.begins(None)
            elif verb not in ("skip", "ping"):
                self.cancels[request_id] = Cancel()  # one that is sent before its turn counts
                whose, *rest = args
                self._work(verb, rest).put(whose, (request_id, *rest))

    def begins(self, work: tuple[int, Any] | None) -> None:
        """Queue this work for the moment when the engine is free."""
        self.ready.put(work)
        self.rest.set()

    def _work(self, verb: str, rest: list[Any]) -> Work:
        """Return the queue for a piece of work: a grammar that compiles long delays no other
        request."""
        if verb == "call":
            return self.calls
        _, params = rest
        return self.constrained if params.constrained else self.requests


def _gathered(said: list[tuple[str, int, Any]]) -> Iterator[tuple[str, int, Any]]:
    """Merge the events of a request into one message, as far as they come before its end."""
    events: dict[int, list[Event]] = {}
    for kind, request_id, payload in said:
        if kind == "event":
            events.setdefault(request_id, []).append(payload)
            continue
        if request_id in events:
            yield "events", request_id, events.pop(request_id)
        yield kind, request_id, payload
    for request_id, some in events.items():
        yield "events", request_id, some


class Turns(Generic[T]):
    """A queue that is fair among clients: they take turns. Items of one stay in their order."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}  # the client whose turn it is comes first

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[T]:
        return (one for queue in self._waiting.values() for one in queue)

    def put(self, client: str, one: T) -> None:
        self._waiting.setdefault(client, deque()).append(one)

    def pop(self) -> T:
        """Remove and return the first; its client then comes after the others."""
        client, queue = next(iter(self._waiting.items()))
        del self._waiting[client]
        one = queue.popleft()
        if queue:
            self._waiting[client] = queue
        return one

    def remove(self, client: str, one: T) -> bool:
        """Remove an item that its client no longer wants; return True if it waited."""
        queue = self._waiting.get(client)
        if queue is None or one not in queue:
            return False
        queue.remove(one)
        if not queue:
            del self._waiting[client]
        return True


class Work(Turns[Any]):
    """The queue of work for one thread, which waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self._some = threading.Condition()

    def put(self, client: str, one: Any) -> None:
        with self._some:
            super().put(client, one)
            self._some.notify()

    def get(self) -> Any:
        """Return the next piece of work, once there is one."""
        with self._some:
            self._some.wait_for(lambda: self)
            return self.pop()


def serve(conn: Connection, factory: EngineFactory, log: int, pulse: Pulse) -> None:
    _redirect_output(log)
    # Ctrl-C in a shared terminal reaches the whole process group; the parent decides.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # an abort must not start a debugger
    faulthandler.enable()
    link = Link(conn, pulse)
    in_thread("commands", link.listen)
    writing = in_thread("events", link.write)
    try:
        engine = cast(Stepped, factory(link.progress))
        link.send("ready", 0, engine.info)
    except BaseException as error:
        link.send("failed", 0, _told(error, "the engine could not start"))
        link.close(writing)
        return
    gc.freeze()  # what was loaded stays: a search for garbage would look through it between passes
    # The thread that makes passes gets the interpreter back soon from those beside it.
    sys.setswitchinterval(SWITCH_S)
    for part, do in zip(THREADS, (_prepare, _prepare, _answer), strict=True):
        in_thread(part, partial(_work, link, pulse, part, partial(do, engine, link)))
    engine.watched(pulse.beat)
    _Pump(engine, link, pulse).run()
    if not any(pulse.working(part) for part in THREADS):  # they may use what it frees
        engine.close()
    link.close(writing)


def in_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """Begin to run this in a thread that ends with the process."""
    thread = threading.Thread(target=run, name=f"specllama-{name}", daemon=True)
    thread.start()
    return thread


def _work(link: Link, pulse: Pulse, part: Part, do: Callable[..., None]) -> None:
    """Do one piece of work after the other in a thread of its own, while passes run."""
    while True:
        request_id, *work = getattr(link, part).get()
        pulse.works(part, request_id)
        try:
            do(request_id, *work)
        except Exception as error:
            link.end(request_id, error)
        pulse.rests(part)


def _prepare(
    engine: Stepped, link: Link, request_id: int, prompt: Any, params: GenerateParams
) -> None:
    """Prepare a request."""
    try:
        ready = engine.prepare(prompt, params, cancel=link.cancels[request_id])
        link.begins((request_id, ready))
    except Cancelled:
        for event in _unbegun(engine.info, params):
            link.event(request_id, event)
        link.end(request_id)


def _answer(engine: Stepped, link: Link, request_id: int, method: str, args: Any) -> None:
    """Run a call that changes nothing."""
    link.send("result", request_id, getattr(engine, method)(*args))
    link.forget(request_id)


class _Pump:
    """The loop that serves: prepared requests begin as soon as the engine is free.

    Several conversations share no pass before it is known which rows those passes compute alike.
    That is measured at rest. Where there is none, it is measured between the passes of a crowd, for
    as long as these take.
    """

    def __init__(self, engine: Stepped, link: Link, pulse: Pulse) -> None:
        self._engine, self._link, self._pulse = engine, link, pulse
        self._running: dict[int, int] = {}  # the engine's ids, and those of the requests
        self._crowd_s = 0.0  # in which several conversations went on; inf: measured, or in vain

    def run(self) -> None:
        """Serve until the parent sends close."""
        while self._begin(wait=True):
            begin, crowd = time.monotonic(), len(self._running) > 1
            self._step()
            if crowd and not self._engine.info.exact_rows:
                self._crowd_s += time.monotonic() - begin
            if REST_S < self._crowd_s < math.inf:
                self._crowd_s = math.inf
                self._measure()

    def _begin(self, *, wait: bool) -> bool:
        """Begin what is ready; return False if all is over. ``wait`` for it where nothing runs."""
        link, engine = self._link, self._engine
        while engine.free and (not link.ready.empty() or (wait and not self._running)):
            self._pulse.rests("passes")
            work = _next(engine, link)
            self._pulse.works("passes")
            if work is None:
                break
            request_id, ready = work
            try:
                id = engine.begin(ready, cancel=link.cancels[request_id])
            except Exception as error:
                link.end(request_id, error)
            else:
                self._running[id] = request_id
        return not link.closing

    def _step(self) -> None:
        """Run passes until there are events, and send these."""
        engine, link, running = self._engine, self._link, self._running
        self._pulse.works("passes")
        self._pulse.expect(engine.patience_s)
        steps = engine.step()
        if not steps:  # they ended without a last word
            for request_id in running.values():
                link.end(request_id)
            running.clear()
        for id, said in steps:
            request_id = running[id]
            if isinstance(said, Exception):
                link.end(running.pop(id), said)
                continue
            link.event(request_id, said)
            if said.ends:
                link.end(running.pop(id))
        link.flush()

    def _measure(self) -> None:
        """Measure between passes; one conversation alone has all of them."""
        since = time.monotonic()

        def between(event: Event) -> None:
            nonlocal since
            until = 2 * time.monotonic() - since
            while self._running or not self._link.ready.empty():
                if not self._begin(wait=False):
                    self._link.begins(None)  # for ``run``, which would wait for it
                    raise Cancelled("the engine closes")
                if len(self._running) > 1 and time.monotonic() > until:
                    break
                if self._running:
                    self._step()
            since = time.monotonic()

        if self._engine.measure(between, times=False):
            self._link.send("ready", 0, self._engine.info)


def _next(engine: Stepped, link: Link) -> tuple[int, Any] | None:
    """Return the next prepared request; meanwhile the engine saves idle texts and measures."""
    try:
        return link.ready.get(timeout=KEEP_S)
    except queue.Empty:
        engine.keep()
    wait_s = min(REST_S * 2**link.broken, LONGEST_S)
    while engine.unmeasured and not link.skips:
        others = Others()
        with suppress(queue.Empty):
            return link.ready.get(timeout=wait_s)
        wait_s = REST_S
        if others.busy():
            wait_s = CROWDED_S
            continue
        link.rest = Cancel()
        if link.ready.empty() and not link.skips:
            if engine.measure(link.progress, cancel=link.rest):
                link.send("ready", 0, engine.info)
            elif link.rest.is_set():
                link.broken += 1
            link.progress(Measuring(over=True))
    return link.ready.get()


def _unbegun(info: EngineInfo, params: GenerateParams) -> tuple[Event, Event]:
    """Return the events of a request that was cancelled before it began."""
    n_ctx, exactness, verify = info.target.n_ctx, info.exactness, params.verify
    seed = params.seed or 0
    return Started(0, 0, n_ctx, seed, "none", verify, 0, exactness), Finished(
        "cancelled", seed=seed, n_ctx=n_ctx, verify=verify, exactness=exactness
    )


def _told(error: BaseException, said: str) -> SpecllamaError:
    """Return any error as one of ours; the log keeps where another one happened."""
    if not isinstance(error, SpecllamaError):
        traceback.print_exception(error)
    return as_ours(error, said)


def _redirect_output(log: int) -> None:
    """Redirect all output of the child to its log, an open descriptor: the terminal belongs to the
    parent."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = os.fdopen(number, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1)
        setattr(sys, name, raw)

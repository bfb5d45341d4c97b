"""The engine's process from inside: what it is asked over a pipe, and what goes back."""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

from specllama.cancel import Cancel
from specllama.errors import EngineError, SpecllamaError
from specllama.events import Event, Finished
from specllama.interface import Prompt, Stepped
from specllama.params import GenerateParams

OnEvent = Callable[[Event], None]

GATHER_S = 0.012  # events of so long cross the pipe together: a fast model makes thousands a second


class EngineFactory(Protocol):
    """Makes the engine inside the child; must pickle. Its argument takes load progress."""

    def __call__(self, progress: OnEvent, /) -> Stepped: ...


class Link:
    """The child's end of the pipe. If the parent is gone, the child ends at once."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._lock = threading.Lock()
        self._cancels: dict[int, Cancel] = {}  # of the requests that were not answered yet
        self._gathered: dict[int, list[Event]] = {}  # by request
        self._sending_s: dict[int, float] = {}
        self._something = threading.Event()
        self.work: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()

    def send(self, kind: str, request_id: int, payload: Any = None) -> None:
        with self._lock:
            self._write(kind, request_id, payload)

    def _write(self, kind: str, request_id: int, payload: Any) -> None:
        try:
            self._conn.send((kind, request_id, payload))
        except OSError:
            os._exit(1)

    def progress(self, event: Event) -> None:
        self.send("progress", 0, event)

    def event(self, request_id: int, event: Event) -> None:
        """Send soon. The gathering thread pickles while the engine computes."""
        with self._lock:
            self._gathered.setdefault(request_id, []).append(event)
        self._something.set()

    def flush(self) -> None:
        with self._lock:
            gathered, self._gathered = self._gathered, {}
            for request_id, events in gathered.items():
                begin = time.thread_time()
                self._write("events", request_id, events)
                spent_s = time.thread_time() - begin
                self._sending_s[request_id] = self._sending_s.get(request_id, 0.0) + spent_s

    def billed(self, request_id: int, finished: Finished) -> Finished:
        """With what sending the events before it took of a processor."""
        self.flush()
        with self._lock:
            spent_s = self._sending_s.pop(request_id, 0.0)
        timings = dataclasses.replace(finished.timings, pipe_ms=spent_s * 1e3)
        return dataclasses.replace(finished, timings=timings)

    def end(self, request_id: int, error: Exception | None = None) -> None:
        """The request is over; ``error``: what ended it."""
        self.flush()
        if error is None:
            self.send("end", request_id)
        elif isinstance(error, SpecllamaError):
            self.send("error", request_id, error)
        else:
            traceback.print_exception(error)
            self.send("error", request_id, EngineError(f"the engine failed: {_name(error)}"))
        self.forget(request_id)

    def forget(self, request_id: int) -> None:
        self._sending_s.pop(request_id, None)
        self._cancels.pop(request_id, None)

    def gather(self) -> None:
        while True:
            self._something.wait()
            self._something.clear()
            # The first event goes at once; those that follow closely go together.
            self.flush()
            time.sleep(GATHER_S)

    def cancel_of(self, request_id: int) -> Cancel:
        return self._cancels[request_id]

    def listen(self) -> None:
        while True:
            try:
                verb, request_id, *args = self._conn.recv()
            except (EOFError, OSError):
                os._exit(0)
            if verb == "cancel":
                if (cancel := self._cancels.get(request_id)) is not None:
                    cancel.set()
            elif verb == "close":
                for cancel in tuple(self._cancels.values()):
                    cancel.set()
                self.work.put(None)
            else:
                self._cancels[request_id] = Cancel()  # one that is sent before its turn counts
                self.work.put((verb, request_id, *args))


def serve(conn: Connection, factory: EngineFactory, log: str) -> None:
    _redirect_output(log)
    # Ctrl-C in a shared terminal reaches the whole process group; the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # an abort must not start a debugger
    faulthandler.enable()
    link = Link(conn)
    threading.Thread(target=link.listen, name="specllama-commands", daemon=True).start()
    threading.Thread(target=link.gather, name="specllama-events", daemon=True).start()
    try:
        engine = factory(link.progress)
        link.send("ready", 0, engine.info)
    except SpecllamaError as error:
        link.send("failed", 0, error)
        return
    except BaseException as error:
        traceback.print_exc()
        link.send("failed", 0, EngineError(f"the engine could not start: {_name(error)}"))
        return
    _pump(engine, link)
    engine.close()


def _pump(engine: Stepped, link: Link) -> None:
    """Serve until the parent says close: requests in free slots, the others wait for their turn."""
    running: dict[int, int] = {}  # the engine's ids, and those of the requests
    waiting: deque[tuple[int, Prompt, GenerateParams]] = deque()
    while True:
        while not link.work.empty() or not (running or waiting):
            work = link.work.get()
            if work is None:
                return
            verb, request_id, *args = work
            if verb == "call":
                _call(engine, link, request_id, *args)
            else:
                waiting.append((request_id, *args))
        while waiting and engine.free:
            request_id, prompt, params = waiting.popleft()
            try:
                id = engine.submit(prompt, params, cancel=link.cancel_of(request_id))
            except Exception as error:
                link.end(request_id, error)
            else:
                running[id] = request_id
        steps = engine.step()
        if not steps:  # they ended without a last word
            for request_id in running.values():
                link.end(request_id)
            running.clear()
        for id, said in steps:
            request_id = running[id]
            if isinstance(said, Exception):
                link.end(running.pop(id), said)
            elif isinstance(said, Finished):
                link.event(request_id, link.billed(request_id, said))
                link.end(running.pop(id))
            else:
                link.event(request_id, said)


def _call(engine: Stepped, link: Link, request_id: int, method: str, args: tuple[Any, ...]) -> None:
    try:
        link.send("result", request_id, getattr(engine, method)(*args))
        link.forget(request_id)
    except Exception as error:
        link.end(request_id, error)


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _redirect_output(log: str) -> None:
    """Everything the child prints goes to its log: the terminal belongs to the parent."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = os.fdopen(number, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1)
        setattr(sys, name, raw)

"""The engine in a child process, behind the same interface as the engine itself.

llama.cpp ends its process on some bad calls, and the kernel ends it when memory runs out. Here that
costs one reply: the child dies, the parent turns its exit status and last words into
``EngineDied``, and the next request starts a fresh child. Requests carry the whole conversation,
so nothing has to be rebuilt. The parent never imports llama_cpp.

    parent                                   child
    generate() ── ("generate", id, …) ─────► command thread ─► main thread: submit, step, step, …
               ◄─ ("events", id, [Event, …]) ────────────────────────┘
    cancel     ── ("cancel", id) ──────────► command thread sets the request's Cancel

The parent's reader thread always drains the pipe, so a slow screen never slows the decoder. The
child ends itself when the pipe closes: a dead parent leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from specllama.cancel import Cancel
from specllama.errors import EngineDied, EngineError, SpecllamaError
from specllama.events import Event, Finished, Notice
from specllama.interface import EngineInfo, EngineLike, Message, Prompt, Stepped
from specllama.params import EngineOptions, GenerateParams

OnEvent = Callable[[Event], None]

GATHER_S = 0.012  # events of so long cross the pipe together: a fast model makes thousands a second
REAP_S = 5.0
LAST_WORDS_BYTES = 8192


class EngineFactory(Protocol):
    """Makes the engine inside the child; must pickle. Its argument takes load progress."""

    def __call__(self, progress: OnEvent, /) -> Stepped: ...


class HostLike(EngineLike, Protocol):
    """An engine that can be started and replaced: EngineHost, or a stand-in."""

    factory: EngineFactory
    on_event: OnEvent | None

    def start(self) -> EngineInfo: ...

    def switch(self, factory: EngineFactory) -> EngineInfo: ...


@dataclass(frozen=True, slots=True)
class LoadEngine:
    """The real engine: a target, perhaps a draft model, and how to load them."""

    target: str
    draft: str | None = None
    options: EngineOptions = field(default_factory=EngineOptions)

    def __call__(self, progress: OnEvent, /) -> Stepped:
        from specllama.engine.engine import Engine

        return Engine.load(self.target, self.draft, self.options, on_progress=progress)


class EngineHost:
    """One engine in one child process at a time.

    ``start()`` loads and blocks; ``generate()`` starts the child itself when there is none, so a
    conversation survives the death of its engine. ``on_event`` receives LoadProgress from the
    reader thread.
    """

    def __init__(
        self,
        factory: EngineFactory,
        *,
        on_event: OnEvent | None = None,
        close_grace_s: float = 3.0,
    ) -> None:
        self.factory = factory
        self.on_event = on_event
        self.close_grace_s = close_grace_s
        self._guard = threading.Lock()
        self._child: _Child | None = None
        self._closed = False
        self._starts = 0
        self._last_info: EngineInfo | None = None

    def __enter__(self) -> EngineHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def info(self) -> EngineInfo:
        """Of the loaded pair, or of the previous one while its successor loads or has failed."""
        child = self._child
        if child is not None and child.info is not None:
            self._last_info = child.info
        if self._last_info is None:
            raise EngineError("no model is loaded yet", "wait for the load to finish")
        return self._last_info

    @property
    def ready(self) -> bool:
        child = self._child
        return child is not None and child.info is not None and child.death is None

    @property
    def pid(self) -> int | None:
        child = self._child
        return child.process.pid if child is not None and child.death is None else None

    def start(self) -> EngineInfo:
        """Load, unless a healthy child is there already.

        Raises:
            SpecllamaError: what the load raised in the child, or EngineDied.
        """
        with self._guard:
            if self._closed:
                raise EngineError("the engine was closed")
            child = self._child
            if child is None or child.death is not None:
                child = _Child(self.factory, self.on_event)
                self._child = child
                self._starts += 1
        self._last_info = child.wait_ready()
        return self._last_info

    def switch(self, factory: EngineFactory) -> EngineInfo:
        """Unload, then load something else; two targets at once seldom fit.

        If the new one cannot be loaded, the old recipe is restored, and the next request loads it.
        """
        before = self.factory
        self._drop()
        self.factory = factory
        try:
            return self.start()
        except SpecllamaError:
            self._drop()
            self.factory = before
            raise

    def generate(
        self,
        prompt: Prompt,
        params: GenerateParams,
        *,
        cancel: Cancel | None = None,
    ) -> Iterator[Event]:
        fresh = self._starts > 0 and not self.ready
        self.start()
        child = self._child
        assert child is not None
        if fresh:
            yield Notice("The engine was started again.", topic="engine")
        request = child.ask("generate", prompt, params)
        finished = False
        try:
            # through the inbox, so that whoever sets it (perhaps a signal handler) need not wait
            with (cancel or Cancel()).calling(lambda: request.inbox.put(("cancel", None))):
                while True:
                    kind, payload = request.inbox.get()
                    if kind == "cancel":
                        child.cancel(request.id)
                    elif kind == "events":
                        yield from payload
                    elif kind == "end":
                        finished = True
                        return
                    else:
                        finished = True
                        raise payload
        finally:
            # The child serves requests in order, so there is no need to wait for an abandoned one.
            if not finished:
                child.cancel(request.id)
            child.forget(request.id)

    def count_tokens(self, prompt: str | Sequence[Message]) -> int:
        self.start()
        child = self._child
        assert child is not None
        request = child.ask("count", prompt)
        try:
            kind, payload = request.inbox.get()
        finally:
            child.forget(request.id)
        if kind == "result":
            return int(payload)
        raise payload

    def close(self) -> None:
        """Ask, then terminate, then kill. Idempotent, callable from any thread, also mid-load."""
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        with self._guard:
            child, self._child = self._child, None
        if child is not None:
            child.stop(self.close_grace_s)


@dataclass(slots=True)
class _Request:
    id: int
    inbox: queue.SimpleQueue[tuple[str, Any]]


class _Child:
    """One process from spawn to exit, seen from the parent."""

    def __init__(self, factory: EngineFactory, on_event: OnEvent | None) -> None:
        self.info: EngineInfo | None = None
        self.death: SpecllamaError | None = None
        self._on_event = on_event
        self._ids = itertools.count(1)
        self._inboxes: dict[int, queue.SimpleQueue[tuple[str, Any]]] = {}
        self._ready = threading.Event()
        self._send_lock = threading.Lock()
        self._reap_lock = threading.Lock()
        self._stopping = False
        fd, log = tempfile.mkstemp(prefix="specllama-engine-", suffix=".log")
        os.close(fd)
        self._log = Path(log)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=True)
        self._conn: Connection = ours
        self.process = context.Process(
            target=_serve, args=(theirs, factory, log), name="specllama-engine", daemon=True
        )
        _ensure_resource_tracker()
        self.process.start()
        theirs.close()
        self._reader = threading.Thread(
            target=self._read, name="specllama-engine-reader", daemon=True
        )
        self._reader.start()

    def wait_ready(self) -> EngineInfo:
        self._ready.wait()
        if self.info is None:
            raise self.death or EngineError("the engine was closed while loading")
        return self.info

    def ask(self, verb: str, *args: Any) -> _Request:
        request = _Request(next(self._ids), queue.SimpleQueue())
        self._inboxes[request.id] = request.inbox
        if not self._send((verb, request.id, *args)) or self.death is not None:
            request.inbox.put(("error", self.death or EngineDied("the engine process ended")))
        return request

    def cancel(self, request_id: int) -> None:
        self._send(("cancel", request_id))

    def forget(self, request_id: int) -> None:
        self._inboxes.pop(request_id, None)

    def stop(self, grace_s: float) -> None:
        self._stopping = True
        self._send(("close", 0))
        # A child that is still loading has nothing to save.
        if self.info is None or not self._reap(grace_s):
            self.process.terminate()
            if not self._reap(grace_s):
                self.process.kill()
                self._reap(REAP_S)
        self._reader.join(REAP_S)
        with contextlib.suppress(OSError):
            self._log.unlink()

    def _send(self, message: tuple[Any, ...]) -> bool:
        try:
            with self._send_lock:
                self._conn.send(message)
        except (OSError, ValueError):
            # Let the reader see the end of the pipe and report the reason.
            self._reader.join(REAP_S)
            return False
        return True

    def _reap(self, timeout_s: float) -> bool:
        with self._reap_lock:  # two waitpid calls at once would lose the exit status
            self.process.join(timeout_s)
            return self.process.exitcode is not None

    def _read(self) -> None:
        refused: SpecllamaError | None = None
        try:
            while True:
                kind, request_id, payload = self._conn.recv()
                if kind == "ready":
                    self.info = payload
                    self._ready.set()
                elif kind == "failed":
                    refused = payload
                elif kind == "progress":
                    if self._on_event is not None:
                        self._on_event(payload)
                else:
                    inbox = self._inboxes.get(request_id)
                    if inbox is not None:
                        inbox.put((kind, payload))
        except (EOFError, OSError):
            pass
        finally:
            self._bury(refused)

    def _bury(self, refused: SpecllamaError | None) -> None:
        if not self._reap(REAP_S) and not self._stopping:
            self.process.kill()
            self._reap(REAP_S)
        if refused is not None:
            self.death = refused
        elif self._stopping:
            self.death = EngineError("the engine was closed")
        else:
            self.death = _obituary(self.process.exitcode, self._log, loading=self.info is None)
        self._ready.set()
        for inbox in list(self._inboxes.values()):
            inbox.put(("error", self.death))
        with contextlib.suppress(OSError):
            self._conn.close()
        with contextlib.suppress(OSError):
            self._log.unlink()


_CAUSES = {
    "SIGKILL": "out of memory?",
    "SIGABRT": "llama.cpp aborted",
    "SIGSEGV": "a crash in native code",
    "SIGBUS": "did the file change, or the disk fail, while it was read?",
    "SIGILL": "built for another processor?",
}


def _obituary(exitcode: int | None, log: Path, *, loading: bool) -> EngineDied:
    when = "while loading the model" if loading else "while it was working"
    if exitcode is not None and exitcode < 0:
        try:
            name = signal.Signals(-exitcode).name
        except ValueError:
            name = f"signal {-exitcode}"
        cause = f"{name}: {_CAUSES[name]}" if name in _CAUSES else name
    else:
        cause = f"exit status {exitcode}"
    words = last_words(log)
    said = f' llama.cpp said: "{words}"' if words else ""
    hint = (
        "choose a smaller model or a shorter context, or check the file with: specllama doctor"
        if loading
        else "the conversation is kept; your next message starts a fresh engine"
    )
    return EngineDied(f"The engine process ended {when} ({cause}).{said}", hint)


def last_words(log: Path) -> str:
    """The line of the child's output that most likely says why it died, without controls."""
    try:
        with log.open("rb") as handle:
            handle.seek(0, os.SEEK_END)
            handle.seek(max(0, handle.tell() - LAST_WORDS_BYTES))
            raw = handle.read().decode("utf-8", "replace")
    except OSError:
        return ""
    # What faulthandler adds is for developers; the reason comes before it.
    text = raw.split("Fatal Python error", 1)[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = ("assert", "error", "failed", "abort", "what():", "out of memory", "exception")
    for line in reversed(lines):
        if any(word in line.lower() for word in telling):
            return _printable(line)
    return _printable(lines[-1]) if lines else ""


def _printable(line: str) -> str:
    cleaned = "".join(ch if ch.isprintable() else "·" for ch in line)
    return cleaned if len(cleaned) <= 300 else cleaned[:299] + "…"


def _ensure_resource_tracker() -> None:
    """Start multiprocessing's helper while stderr is a real file.

    A running Textual app replaces sys.stderr by an object whose fileno() is -1, and the helper
    passes that number on to exec, which refuses it.
    """
    try:
        broken = sys.stderr is None or sys.stderr.fileno() < 0
    except (OSError, ValueError):
        broken = False  # multiprocessing itself skips a stderr without a descriptor
    if not broken:
        resource_tracker.ensure_running()
        return
    captured, sys.stderr = sys.stderr, sys.__stderr__
    try:
        resource_tracker.ensure_running()
    finally:
        sys.stderr = captured


# ---------------------------------------------------------------------------- inside the child


class _Link:
    """The child's end of the pipe. If the parent is gone, the child ends at once."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._lock = threading.Lock()
        self._cancels: dict[int, Cancel] = {}
        self._cancels_lock = threading.Lock()
        self._gathered: dict[int, list[Event]] = {}  # by request
        self._sending_s: dict[int, float] = {}
        self._something = threading.Event()
        self.work: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()

    def send(self, kind: str, request_id: int, payload: Any = None) -> None:
        try:
            with self._lock:
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
                try:
                    self._conn.send(("events", request_id, events))
                except OSError:
                    os._exit(1)
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
        with self._lock:
            self._sending_s.pop(request_id, None)
        with self._cancels_lock:
            self._cancels.pop(request_id, None)

    def gather(self) -> None:
        while True:
            self._something.wait()
            self._something.clear()
            # The first event goes at once; those that follow closely go together.
            self.flush()
            time.sleep(GATHER_S)

    def cancel_of(self, request_id: int) -> Cancel:
        with self._cancels_lock:
            return self._cancels.setdefault(request_id, Cancel())

    def listen(self) -> None:
        while True:
            try:
                verb, request_id, *args = self._conn.recv()
            except (EOFError, OSError):
                os._exit(0)
            if verb == "cancel":
                with self._cancels_lock:
                    known = self._cancels.get(request_id)
                if known is not None:
                    known.set()
            elif verb == "close":
                with self._cancels_lock:
                    for cancel in self._cancels.values():
                        cancel.set()
                self.work.put(None)
            else:
                self.cancel_of(request_id)  # so that a cancel sent before its turn counts
                self.work.put((verb, request_id, *args))


def _serve(conn: Connection, factory: EngineFactory, log: str) -> None:
    _redirect_output(log)
    # Ctrl-C in a shared terminal reaches the whole process group; the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # an abort must not start a debugger
    import faulthandler

    faulthandler.enable()
    link = _Link(conn)
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


def _pump(engine: Stepped, link: _Link) -> None:
    """Serve until the parent says close: requests in free slots, the others wait for their turn."""
    running: dict[int, int] = {}  # the engine's ids, and those of the requests
    waiting: deque[tuple[int, Prompt, GenerateParams]] = deque()
    while True:
        while not link.work.empty() or not (running or waiting):
            work = link.work.get()
            if work is None:
                return
            verb, request_id, *args = work
            if verb == "count":
                _count(engine, link, request_id, args[0])
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


def _count(engine: Stepped, link: _Link, request_id: int, prompt: Prompt) -> None:
    try:
        link.send("result", request_id, engine.count_tokens(prompt))  # type: ignore[arg-type]
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

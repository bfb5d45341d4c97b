"""One engine in a process of its own, from spawn to exit, seen from the parent."""

from __future__ import annotations

import contextlib
import copy
import itertools
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing import reduction, resource_tracker
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import IO, TYPE_CHECKING, Any

from specllama.engine.pulse import Part, Pulse, Watchdog
from specllama.engine.serving import EngineFactory, OnEvent, in_thread, serve
from specllama.errors import EngineDied, EngineError, EngineStuck, SpecllamaError
from specllama.events import Notice
from specllama.interface import EngineInfo
from specllama.text import sanitize_line

if TYPE_CHECKING:
    import asyncio

REAP_S = 5.0
_PING = 16  # looks from one question to a child that works, or loads, to the next
STILL_S = 1.0  # one that is to end and does not get on for so long is not waited for
LAST_WORDS_BYTES = 8192


OnDeath = Callable[[SpecllamaError], object]
OnMessage = Callable[[tuple[str, Any]], object]
"""Takes (kind, payload): ("events", list) any number of times, then "end", "result" or "error"."""


class Child:
    """One process from spawn to exit, seen from the parent.

    What it says is taken by a thread, and from when it is ready by an event loop where there is
    ``loop``: a processor that computes is interrupted less often so.
    """

    def __init__(
        self,
        factory: EngineFactory,
        on_event: OnEvent | None,
        *,
        on_death: OnDeath = lambda death: None,
        loop: asyncio.SelectorEventLoop | None = None,
    ) -> None:
        self.info: EngineInfo | None = None
        self.death: SpecllamaError | None = None
        self.stuck: EngineStuck | None = None  # it is being ended for that
        self.distrusted = False  # it died of what its successor does without
        self._culprit = 0  # the request that it was stuck in, where that is known
        self._on_event = on_event
        self._on_death = on_death
        self._ids = itertools.count(1)
        self._listeners: dict[int, tuple[str, OnMessage]] = {}  # with what was asked
        self._ready = threading.Event()
        self._gone = threading.Event()
        self._asked = threading.Event()  # something was; the watchdog may have slept until then
        self._outbox: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._reap_lock = threading.Lock()
        self._stopping = False
        self._loop = loop
        self._taking = threading.Lock()
        self._refused: SpecllamaError | None = None  # why it could not load
        # its output; without a name, nothing of it is left, however either process ends
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=True)
        self._conn: Connection = ours
        self._pulse = Pulse()
        self.process = context.Process(
            target=serve,
            args=(theirs, factory, _Inherited(self._log.fileno()), self._pulse),
            name="specllama-engine",
            daemon=True,
        )
        try:
            with _safe_path():
                _ensure_resource_tracker()
                self.process.start()
        except BaseException:
            ours.close()
            self._log.close()
            raise
        finally:
            theirs.close()
        self._writer = in_thread("engine-writer", self._write)
        self._reader = in_thread("engine-reader", self._read)
        in_thread("engine-watch", self._watch)

    @property
    def ready(self) -> bool:
        return self.info is not None and self.death is None and self.stuck is None

    def wait_gone(self) -> None:
        self._gone.wait()

    def wait_ready(self) -> EngineInfo:
        self._ready.wait()
        if self.info is None:
            raise self.death or EngineError("the engine was closed while loading")
        return self.info

    def ask(self, on_message: OnMessage, verb: str, whose: str, *args: Any) -> int:
        """Send a request of a client, without waiting for it to be taken.

        ``on_message`` is called with each answer to it, mostly by the reader thread.
        """
        request_id = next(self._ids)
        self._listeners[request_id] = verb, on_message
        self._asked.set()
        self._outbox.put((verb, request_id, whose, *args))
        if self.death is not None:
            self._answer(request_id, "error", self._death_of(request_id))
        return request_id

    def _death_of(self, request_id: int) -> SpecllamaError | None:
        """Return the child's death as it is told to one request."""
        error = copy.copy(self.death)
        if isinstance(error, EngineStuck):
            error.culprit = request_id == self._culprit
        if isinstance(error, EngineDied):
            error.heard = request_id <= self._pulse.heard
        return error

    def _answer(self, request_id: int, kind: str, payload: Any) -> None:
        """Send a message to the request's listener; any but events is the last one."""
        take = self._listeners.get if kind == "events" else self._listeners.pop
        if (found := take(request_id, None)) is not None:
            found[1]((kind, payload))

    def cancel(self, request_id: int) -> None:
        self._outbox.put(("cancel", request_id))

    def skip(self) -> None:
        """Measure nothing more at rest."""
        self._outbox.put(("skip", 0))

    def forget(self, request_id: int) -> bool:
        """Drop the listener of a request; return True if the request was still running."""
        return self._listeners.pop(request_id, None) is not None

    def stop(self, grace_s: float) -> None:
        self._stopping = True
        self._outbox.put(("close", 0))
        # A child that is still loading has nothing to save, and one that is stuck never will.
        if self.info is None or not self._ends(grace_s):
            self.process.terminate()
            if not self._reap(grace_s):
                self.process.kill()
                self._reap(REAP_S)
        self._reader.join(REAP_S)

    def _ends(self, grace_s: float) -> bool:
        """True if it ends by itself, as long as it makes progress."""
        watchdog = Watchdog(self._pulse, monotonic, STILL_S)
        until = monotonic() + grace_s
        while not (ended := self._reap(watchdog.every_s)) and monotonic() < until:
            if watchdog.stuck(begun=False) is not None:
                break
        return ended

    def _write(self) -> None:
        """Write messages in a thread of its own: a child that does not read blocks no other.

        The connection is closed only after it: a send reads the handle again between its parts.
        """
        while (message := self._outbox.get()) is not None:
            self._pulse.sent += 1
            try:
                self._conn.send(message)
            except (OSError, ValueError):  # the reader sees the end of the pipe, and says why
                return

    def _watch(self) -> None:
        """Watch in a thread of its own, and end a child that makes no progress."""
        watchdog = Watchdog(self._pulse, monotonic)
        for look in itertools.count():
            if self._gone.wait(watchdog.every_s):
                return
            if self.info is not None and not (self._listeners or self._stopping):
                self._asked.wait()  # at rest there is nothing to look for
                self._asked.clear()
                continue
            if not look % _PING and self._pulse.working("commands") is None:
                self._outbox.put(("ping", 0))  # who does not hear it was stopped
            found = watchdog.stuck(begun=self.info is not None)
            if self._stopping or found is None:
                continue
            part, request_id, still_s = found
            ids = [id for id, (verb, _) in list(self._listeners.items()) if verb == "generate"]
            # with one request there is no doubt whose work it was
            self._culprit = request_id or (ids[0] if len(ids) == 1 and part != "commands" else 0)
            said = f"{_STUCK[part]} for {still_s:.0f} s, so the engine process was ended"
            self.stuck = EngineStuck(said, _NEXT)
            self.process.kill()
            return

    def _reap(self, timeout_s: float) -> bool:
        with self._reap_lock:  # two waitpid calls at once would lose the exit status
            self.process.join(timeout_s)
            return self.process.exitcode is not None

    def _read(self) -> None:
        """Read the child's messages in a thread of its own."""
        try:
            while self.info is None or self._loop is None:
                self._take()
            with contextlib.suppress(RuntimeError):  # the loop is over
                add = self._loop.add_reader
                self._loop.call_soon_threadsafe(add, self._conn, self._take_in_loop)
            wait([self.process.sentinel])
            while True:
                self._take()
        except (EOFError, OSError):
            pass
        finally:
            self._bury()

    def _take(self) -> None:
        """Take its next message.

        Raises:
            EOFError, OSError: it says no more.
        """
        with self._taking:
            kind, request_id, payload = self._conn.recv()
            if kind == "ready":
                self.info = payload
                self._ready.set()
            elif kind == "failed":
                self._refused = payload
            elif kind == "progress":
                if self._on_event is not None:
                    self._on_event(payload)
            else:
                self._answer(request_id, kind, payload)

    def _take_in_loop(self) -> None:
        try:
            self._take()
        except (EOFError, OSError):
            assert self._loop is not None
            self._loop.remove_reader(self._conn)

    def _let_go(self) -> None:
        """Close the connection, which a loop must not find closed."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is over
                self._loop.call_soon_threadsafe(self._close_in_loop)
                return
        self._conn.close()

    def _close_in_loop(self) -> None:
        assert self._loop is not None
        self._loop.remove_reader(self._conn)
        self._conn.close()

    def _bury(self) -> None:
        if not self._reap(REAP_S) and not self._stopping:
            self.process.kill()
            self._reap(REAP_S)
        if self._refused is not None:
            self.death = self._refused
        elif self._stopping:
            self.death = EngineError("the engine was closed")
        elif self.stuck is not None:
            self.death = self.stuck
        else:
            when = "while it was working" if self._listeners else "while nothing was asked of it"
            if self.info is None:
                when = "while loading the model"
            if self.process.exitcode == -signal.SIGILL:
                from specllama.backend import trial  # only here: a screen is drawn without it

                self.distrusted = trial.distrust("SIGILL")
                if self.distrusted and self._on_event is not None:
                    self._on_event(Notice(trial.LATER, "warning", "trial"))
            self.death = _obituary(
                self.process.exitcode, self._log, when, loading=self.info is None
            )
        self._ready.set()
        self._outbox.put(None)
        for request_id in list(self._listeners):
            self._answer(request_id, "error", self._death_of(request_id))
        self._gone.set()
        self._asked.set()
        if not self._stopping and self.info is not None:
            self._on_death(self.death)
        self._writer.join()  # the child has gone, so no send waits for it
        self._let_go()
        self._log.close()


_NEXT = "the conversation is kept; your next message starts a fresh engine"
_STUCK: dict[Part, str] = {
    "passes": "no pass of the model ended",
    "requests": "a prompt was not read to its end",
    "constrained": "a grammar or a JSON schema was not read to its end",
    "calls": "a text was not read to its end",
    "commands": "the engine did not answer",
}
_CAUSES = {
    "SIGKILL": "out of memory?",
    "SIGABRT": "llama.cpp aborted",
    "SIGSEGV": "a crash in native code",
    "SIGBUS": "did the file change, or the disk fail, while it was read?",
    "SIGILL": "this build of llama.cpp uses an instruction that fails on this processor",
}


class _Inherited:
    """A descriptor that a child gets as a number, open, when it is started."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (reduction.DupFd(self._fd),)


def _detached(fd: Any) -> int:
    number: int = fd.detach()
    return number


def _obituary(exitcode: int | None, log: IO[bytes], when: str, *, loading: bool) -> EngineDied:
    if exitcode is not None and 128 < exitcode < 256:  # a shell's way to say a signal
        exitcode = 128 - exitcode
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
    hint = _NEXT
    if cause.startswith("SIGILL"):
        hint = (
            "the next engine does without what was built for it; specllama doctor tells how to "
            "build llama.cpp again"
        )
    elif loading:
        hint = "choose a smaller model or a shorter context, or check it with: specllama doctor"
    return EngineDied(f"The engine process ended {when} ({cause}).{said}", hint)


def last_words(log: IO[bytes]) -> str:
    """Return the output line that most likely explains the child's death, without controls."""
    log.seek(max(0, log.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
    raw = log.read().decode("utf-8", "replace")
    # What faulthandler adds is for developers; the reason comes before it.
    text = raw.split("Fatal Python error", 1)[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = ("assert", "error", "failed", "abort", "what():", "out of memory", "exception")
    told = [line for line in lines if any(word in line.lower() for word in telling)] or lines
    return sanitize_line(told[-1])[:300] if told else ""


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Keep the user's folder from replacing modules of Python in processes started here."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PYTHONSAFEPATH", None)
        else:
            os.environ["PYTHONSAFEPATH"] = before


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

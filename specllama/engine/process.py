"""One engine in a process of its own, from spawn to exit, seen from the parent."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from specllama.engine.serving import EngineFactory, OnEvent, serve
from specllama.errors import EngineDied, EngineError, SpecllamaError
from specllama.interface import EngineInfo

REAP_S = 5.0
LAST_WORDS_BYTES = 8192


Tell = Callable[[tuple[str, Any]], object]
"""Takes (kind, payload): ("events", list) any number of times, then "end", "result" or "error"."""


class Child:
    """One process from spawn to exit, seen from the parent."""

    def __init__(self, factory: EngineFactory, on_event: OnEvent | None) -> None:
        self.info: EngineInfo | None = None
        self.death: SpecllamaError | None = None
        self._on_event = on_event
        self._ids = itertools.count(1)
        self._tells: dict[int, Tell] = {}
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
            target=serve, args=(theirs, factory, log), name="specllama-engine", daemon=True
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

    def ask(self, tell: Tell, verb: str, *args: Any) -> int:
        """Send a request; ``tell`` is called with what comes of it, mostly by the reader thread."""
        request_id = next(self._ids)
        self._tells[request_id] = tell
        if not self._send((verb, request_id, *args)) or self.death is not None:
            self._answer(request_id, "error", self.death or EngineDied("the engine process ended"))
        return request_id

    def _answer(self, request_id: int, kind: str, payload: Any) -> None:
        """Tell of it; all but events is the last word."""
        take = self._tells.get if kind == "events" else self._tells.pop
        if (tell := take(request_id, None)) is not None:
            tell((kind, payload))

    def cancel(self, request_id: int) -> None:
        self._send(("cancel", request_id))

    def forget(self, request_id: int) -> bool:
        """Tell nothing more of it; whether it was still going on."""
        return self._tells.pop(request_id, None) is not None

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
                    self._answer(request_id, kind, payload)
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
        for request_id in list(self._tells):
            self._answer(request_id, "error", self.death)
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
    if exitcode is not None and exitcode > 128:  # a shell's way to say a signal
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

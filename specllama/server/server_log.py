"""The log of a server: requests, state of its models, errors."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from typing import Any

from specllama.errors import UsageError
from specllama.replies.segments import NO_TEMPLATE
from specllama.server.served import ServedModel
from specllama.settings.config_file import Settings

_MOST = 1000  # lines that were not written yet; further ones are dropped, and counted
_EACH_S = 5.0  # between two lines of one load
_FILES, _FILE_BYTES = 5, 10 << 20  # as ``log-file`` says
# what Python's and uvicorn's own lines go to: without a handler they would come without a time
_LOGGERS = ("specllama.server", "uvicorn.error", "asyncio")
_FORMAT = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")


class ServerLog:
    """A log written by its own thread, so that a stalled terminal or disk delays nothing.

    Args:
        file: written instead of stderr; older lines go to numbered files, the oldest are deleted.
        quiet: only problems are logged.

    Attributes:
        requests: True if each request is logged.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, file: Path | None = None, *, requests: bool = True, quiet: bool = False):
        self.requests = requests
        self._handler = handler = _Stderr() if file is None else _LogFile(file)
        handler.setFormatter(_FORMAT)
        lines: queue.Queue[Any] = queue.Queue(_MOST)
        self._entry = _Entry(lines)
        self._writer = QueueListener(lines, handler)
        self._ends = file is not None  # a terminal may stall for good
        self._states: dict[str, str] = {}
        self._begun: dict[str, tuple[float, float]] = {}  # when a load began, and was told last
        self._loggers = [logging.getLogger(name) for name in _LOGGERS]
        self._loggers[0].setLevel(logging.WARNING if quiet else logging.INFO)
        for logger in self._loggers:
            logger.propagate = False
            logger.addHandler(self._entry)
        self._writer.start()

    @classmethod
    @contextmanager
    def of(cls, settings: Settings, *, quiet: bool) -> Iterator[ServerLog]:
        """Open a log as settings require, and close it when the block ends."""
        file = settings["log-file"]
        path = None if file is None else Path(os.path.expanduser(file))
        log = cls(path, requests=settings["access-log"], quiet=quiet)
        try:
            yield log
        finally:
            log.close()

    def say(self, line: str) -> None:
        """Take a line, without waiting."""
        self._loggers[0].info("%s", line)

    def hang_up(self) -> None:
        """Take a line that opens the file anew, if it was renamed."""
        file = "its file was opened again" if self._ends else "it goes to stderr as before"
        self.say(f"SIGHUP, for the log: {file}")

    def request(self, line: str) -> None:
        """Take the line of a request."""
        if self.requests:
            self.say(line)

    def model(self, model: ServedModel) -> None:
        """Log a change of a model's state."""
        before, self._states[model.name] = self._states.get(model.name), model.state
        if model.state != before:
            why = f": {model.failed}" if model.failed and model.state == "unloaded" else ""
            self.say(f"{model.name} is {model.state}{why}")
            info = model.known_info if model.state == "loaded" else None
            if info is not None and not info.has_chat_template:
                self.say(f"{model.name}: {NO_TEMPLATE}")
            self._begun[model.name] = (time.monotonic(),) * 2
        elif model.state == "loading" and 0 < model.progress < 1:
            (begun, told), now = self._begun[model.name], time.monotonic()
            if now - told >= _EACH_S:
                left = (now - begun) * (1 / model.progress - 1)
                self.say(f"{model.name} is {model.progress:.0%} loaded, about {left:.0f} s left")
                self._begun[model.name] = begun, now

    def close(self) -> None:
        """Write the lines that were taken."""
        for logger in self._loggers:
            logger.removeHandler(self._entry)
            logger.propagate = True
        if self._ends:
            with contextlib.suppress(queue.Full):
                self._writer.stop()
            with contextlib.suppress(OSError):  # a full disk was told
                self._handler.close()


class _Entry(QueueHandler):
    """The queue of lines; it drops those that arrive faster than they are written."""

    queue: queue.Queue[Any]
    _dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._dropped:
            said = f"({self._dropped} lines were dropped: they came faster than they were read)"
            record.msg = f"{said}\n{record.msg}"
        try:
            self.queue.put_nowait(record)
            self._dropped = 0
        except queue.Full:
            self._dropped += 1


class _Stderr(logging.StreamHandler[Any]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore the error: the reader of stderr is gone."""


class _LogFile(RotatingFileHandler):
    """A log file for its owner alone, and a few of its predecessors. It is opened anew where a
    program renamed or deleted it."""

    def __init__(self, file: Path) -> None:
        self._failed = False
        try:
            file.parent.mkdir(0o700, parents=True, exist_ok=True)
            if file.exists() and not file.is_file():
                raise UsageError(f"{file} is no file that a log could be kept in")
            super().__init__(
                file, maxBytes=_FILE_BYTES, backupCount=_FILES - 1, encoding="utf-8",
                errors="replace",
            )  # fmt: skip
        except OSError as error:
            raise UsageError(
                f"cannot write the log {file}: {error.strerror or error}",
                "give another --log-file, or none: then it goes to stderr",
            ) from None

    def _open(self) -> TextIOWrapper:
        def private(path: str, flags: int) -> int:
            return os.open(path, flags, 0o600)

        return open(self.baseFilename, "a", encoding="utf-8", errors="replace", opener=private)

    def emit(self, record: logging.LogRecord) -> None:
        there = False
        with contextlib.suppress(OSError):
            if self.stream is not None:
                written = os.fstat(self.stream.fileno())
                there = os.path.samestat(os.stat(self.baseFilename), written)
        if not there:
            self.close()  # it is opened for the line
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Warn once if the disk is full; the server goes on."""
        if not self._failed:
            self._failed = True
            said = f"warning: the log cannot be written: {sys.exc_info()[1]}"
            with contextlib.suppress(OSError, ValueError):
                print(f"{said}\n", end="", file=sys.stderr, flush=True)  # one write

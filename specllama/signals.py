"""Ctrl-C, SIGTERM and a closed terminal in the command line, at any moment of the process.

Python runs signal handlers between two bytecodes of the main thread. While llama.cpp computes, that
is late, and an exception raised inside a callback from C is printed and lost. So there are two
halves. A thread learns of a signal at once and stops what is running: a request, a load, a pass.
The handler in the main thread raises, unless a block has taken over signals (``stop_on_signals``).

Exit codes are 128 + the signal's number: 130, 143 and 129. Light to import.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any

from specllama.cancel import Cancel
from specllama.errors import Cancelled

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOAD_S = 0.3  # the process ends if a load has not stopped by then
_CATCH_UP_S = 0.1  # within which thread and handler both learn of one signal
_AGAIN_S = 0.02  # after which a lost exception is raised once more


class Interrupted(BaseException):
    """The end of the work by a signal; the output so far was kept. ``code`` is the exit code."""

    def __init__(self, code: int = 130) -> None:
        super().__init__(code)
        self.code = code


class _Scope:
    """A block that has taken signals over."""

    def __init__(
        self, cancel: threading.Event, patience_s: float | None, hangup: Callable[[], object] | None
    ) -> None:
        self.received: list[int] = []
        self._cancel = cancel
        self._hangup = hangup
        self._terminal = has_terminal()
        self._patience_s = patience_s
        self._ended = threading.Event()
        self._heard = {"thread": 0, "handler": 0}  # each is called on every signal

    def heard(self, number: int, by: str) -> None:
        gone = self._terminal and not has_terminal()
        if number == signal.SIGHUP and self._hangup is not None and not gone:
            if by == "thread":
                self._hangup()
            return
        self._heard[by] += 1
        if self._heard[by] > 1:
            _leave(number)
        if not self.received:
            self.received.append(128 + number)
        self._cancel.set()
        waits = by == "thread" and self._patience_s is not None
        if waits and not self._ended.wait(self._patience_s):
            _leave(number)

    def end(self) -> None:
        """End the block, so that the next one sees none of this one's signals."""
        self._ended.set()
        until = time.monotonic() + _CATCH_UP_S
        while self._heard["thread"] < self._heard["handler"] and time.monotonic() < until:
            time.sleep(0.001)


_scope: _Scope | None = None
_stops: list[Callable[[], object]] = []
_mouth: int | None = None  # where the C handler writes; it is open for good


def end_at_once() -> None:
    """Let every signal end the process at once from here on: there is nothing to lose.

    For imports, which turn an exception into a traceback or swallow it, and for the exit.
    """
    if threading.current_thread() is threading.main_thread():
        for number in _ending():
            signal.signal(number, _on_leave)


def install() -> None:
    """Let Ctrl-C and SIGTERM raise in the main thread, after they stop a running pass."""
    if threading.current_thread() is not threading.main_thread():
        return
    _listen()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _on_raise)


def stops(stop: Callable[[], object]) -> None:
    """Call ``stop`` at once when a signal comes, so that the main thread gets to raise."""
    _stops.append(stop)


@contextmanager
def stop_on_signals(
    cancel: threading.Event,
    patience_s: float | None = None,
    hangup: Callable[[], object] | None = None,
) -> Iterator[list[int]]:
    """Set ``cancel`` at the first of these signals, end the process at once at the second.

    Yields a list that receives the exit code of the signal, empty while there was none. With
    ``patience_s`` the process ends if the block has not by then. ``hangup`` is called at a SIGHUP
    instead, unless the terminal went. Outside the main thread signals are left as they are.
    """
    global _scope
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    _listen()
    before, scope = _scope, _Scope(cancel, patience_s, hangup)
    former = {number: signal.signal(number, _on_scope) for number in _ending()}
    _scope = scope
    try:
        yield scope.received
    finally:
        scope.end()
        _scope = before
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def stopping(patience_s: float | None = None) -> Iterator[Cancel]:
    """Run work that a cancel ends early and that is worth nothing then.

    Raises:
        Interrupted: a signal came.
    """
    cancel = Cancel()
    with stop_on_signals(cancel, patience_s) as received:
        try:
            yield cancel
        except Cancelled:
            if not received:
                raise
    if received:
        raise Interrupted(received[0])


def stop_loading() -> AbstractContextManager[Cancel]:
    """Run the loading of a model, which has nothing to save; the cancel is for the loader."""
    return stopping(_LOAD_S)


def _ending() -> list[signal.Signals]:
    """List the signals that end the work: not those that the process ignores (nohup)."""
    return [one for one in _NUMBERS if signal.getsignal(one) is not signal.SIG_IGN]


def has_terminal() -> bool:
    """True if the terminal that the process was started on is there."""
    with suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDONLY))
        return True
    return False


def _listen() -> None:
    """Watch for signals while the main thread is busy in C, and for those that it lost."""
    global _mouth
    if _mouth is None:
        sys.unraisablehook = _say_again(sys.unraisablehook)
        ear, mouth = socket.socketpair()
        mouth.setblocking(False)
        _mouth = mouth.detach()
        threading.Thread(target=_hear, args=(ear,), name="specllama-signals", daemon=True).start()
    signal.set_wakeup_fd(_mouth, warn_on_full_buffer=False)


def _hear(ear: socket.socket) -> None:
    while True:
        for number in ear.recv(16):
            if number not in _NUMBERS:
                continue
            if (scope := _scope) is not None:
                scope.heard(number, "thread")
            else:
                for stop in tuple(_stops):
                    stop()


def _on_scope(number: int, frame: FrameType | None) -> None:
    if _scope is not None:
        _scope.heard(number, "handler")


def _on_raise(number: int, frame: FrameType | None) -> None:
    raise Interrupted(128 + number)


def _on_leave(number: int, frame: FrameType | None) -> None:
    _leave(number)


def _leave(number: int) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stderr.isatty():
            os.write(2, b"\r\x1b[K\x1b[?25h")  # a progress line, and the cursor it may have hidden
    os._exit(128 + number)


def _say_again(before: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a hook that raises a signal's exception again if no code could catch it."""

    def hook(lost: Any, /) -> None:
        error: type[BaseException] = lost.exc_type
        if issubclass(error, KeyboardInterrupt):
            number = signal.SIGINT
        elif issubclass(error, Interrupted):
            number = signal.SIGTERM
        else:
            before(lost)
            return
        # a Timer's start() waits for its thread: on a busy machine the signal would come within it
        _thread.start_new_thread(again, (number,))

    def again(number: signal.Signals) -> None:
        time.sleep(_AGAIN_S)
        _thread.interrupt_main(number)

    return hook

"""Cancels: of a request, and of the pass that llama.cpp runs for it.

``Cancel`` is what a front end sets. ``StopFlag`` is what the contexts of one engine read: from
Python before a pass, from C within it. An engine ties the two together for the length of a request:
a cancel between two passes stops the next one, and a cancel after the end of its request stops
nothing.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SET, _CLEAR = b"\x01\x00", b"\x00\x00"


class Cancel(threading.Event):
    """An event that ends one request at once: ``set`` also calls the registered callbacks.

    ``set`` may be called from any thread and from a signal handler.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Callable[[], object]] = []

    def set(self) -> None:
        super().set()
        for call in tuple(self._calls):
            call()

    @contextmanager
    def calling(self, call: Callable[[], object]) -> Iterator[None]:
        """Run the block; ``set`` calls ``call`` meanwhile, which must be quick and may be called
        twice.

        It is called at the start of the block if the event is set already.
        """
        self._calls.append(call)
        try:
            if self.is_set():
                call()
            yield
        finally:
            self._calls.remove(call)


class StopFlag:
    """A flag that stops the passes of an engine; C reads it at ``address``."""

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)  # a C string: empty, or of one character
        self._guard = threading.RLock()  # a signal handler may interrupt here
        self._cancel: Cancel | None = None
        self.on_pass: Callable[[], object] = lambda: None
        """Called whenever a pass is about to begin, and so asks whether it should."""

    @property
    def address(self) -> int:
        """The address of a C string that is not empty while the flag is set."""
        return ctypes.addressof(self._text)

    def is_set(self) -> bool:
        self.on_pass()
        return self._text.raw != _CLEAR

    def set(self) -> None:
        """Stop the running pass, and every further one until ``clear``."""
        self._text.raw = _SET

    def clear(self) -> None:
        self._text.raw = _CLEAR

    @contextmanager
    def obeying(self, cancel: Cancel) -> Iterator[None]:
        """Run the block with a flag that follows ``cancel``; clear the flag after it."""

        def stop() -> None:
            with self._guard:  # a late cancel must not hit the next request
                if self._cancel is cancel:
                    self.set()

        with self._guard:
            self.clear()
            self._cancel = cancel
        try:
            with cancel.calling(stop):
                yield
        finally:
            with self._guard:
                self._cancel = None
                self.clear()

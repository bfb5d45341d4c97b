"""The cancel of a request, from a key, a signal or a client down to the pass of llama.cpp.

A front end sets the cancel of its request. Each engine has a cancel of its own, which its contexts
read: from Python before a pass, from C within it. It follows that of the request that runs alone: a
cancel between two passes stops the next one, and one after the end of its request stops nothing.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specllama.errors import Cancelled

_SET, _CLEAR = b"\x01\x00", b"\x00\x00"


class Cancel(threading.Event):
    """An event that ends one request at once: ``set`` also calls the registered callbacks.

    ``set`` may be called from any thread and from a signal handler. ``on_pass`` is called whenever
    a pass asks if it may begin.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_pass: Callable[[], object] = lambda: None
        self._calls: list[Callable[[], object]] = []
        self._text = ctypes.create_string_buffer(2)  # a C string: empty, or of one character
        self._guard = threading.RLock()  # a signal handler may interrupt here
        self._followed: Cancel | None = None

    @property
    def address(self) -> int:
        """The address of a C string that is not empty once this is set."""
        return ctypes.addressof(self._text)

    def is_set(self) -> bool:
        return self._text.raw != _CLEAR

    def set(self) -> None:
        self._text.raw = _SET
        super().set()
        for call in tuple(self._calls):
            call()

    def clear(self) -> None:
        self._text.raw = _CLEAR
        super().clear()

    def check(self) -> None:
        """Raise Cancelled if this is set: not every device stops within a pass."""
        self.on_pass()
        if self.is_set():
            raise Cancelled("the request was cancelled")

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

    def follow(self, other: Cancel | None) -> None:
        """Follow ``other`` from now on: this is set when it is. None: begin unset, alone."""
        with self._guard:
            before, self._followed = self._followed, other
            self._text.raw = _CLEAR
        if before is not None:
            before._calls.remove(self._heed)
        if other is not None:
            other._calls.append(self._heed)
            self._heed()

    def _heed(self) -> None:
        with self._guard:  # a late cancel must not hit the next request
            if self._followed is not None and self._followed.is_set():
                self._text.raw = _SET

    @contextmanager
    def following(self, other: Cancel) -> Iterator[None]:
        """Run the block, and ``follow`` the other cancel meanwhile."""
        self.follow(other)
        try:
            yield
        finally:
            self.follow(None)

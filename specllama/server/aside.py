"""Work on large bodies, in a thread of its own so that the event loop goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

P = ParamSpec("P")
T = TypeVar("T")
_Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class Aside:
    """A thread that ends with the process; each client has at most one call there, so clients
    take turns."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._thread: Thread | None = None

    async def run(self, client: str, call: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """Run a call in the thread; return its result or raise its error."""
        lock = self._locks.setdefault(client, asyncio.Lock())
        async with lock:
            if self._thread is None:
                self._thread = Thread(target=self._work, name="specllama-bodies", daemon=True)
                self._thread.start()
            loop = asyncio.get_running_loop()
            answer: asyncio.Future[T] = loop.create_future()
            self._jobs.put((loop, answer, partial(call, *args, **more)))
            return await answer

    def _work(self) -> None:
        while True:
            loop, answer, call = self._jobs.get()
            if answer.cancelled():  # its client has left
                continue
            result: Any = None
            error: Exception | None = None
            try:
                result = call()
            except Exception as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is over, and so is the request
                loop.call_soon_threadsafe(_tell, answer, result, error)


def _tell(answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)

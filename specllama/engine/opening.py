"""A thread that opens the files of a pair while the other parts of an engine are imported."""

from __future__ import annotations

import gc
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from specllama.cancel import Cancel
from specllama.events import Event, LoadProgress, Notice
from specllama.models import library
from specllama.models.refs import resolve_pair
from specllama.settings.params import EngineOptions

if TYPE_CHECKING:
    from specllama.backend.base import OpenedPair

# by what a target's file name ends with: who opens it, like ``open_gguf``; GGUF may have any name
BACKENDS: dict[str, str] = {}
_SWITCH_S = 0.0005  # llama.cpp asks after every tensor whether to go on, and waits for its answer


class OpeningPair:
    """A pair that is opened while the block runs; see ``Engine.load``.

    The block begins when weights are being read, or all is over: checking the files does not
    compete with imports. Within it nobody looks for garbage: imports make none, and long searches.

    Attributes:
        stop: set, it ends the opening, and later the passes of every context.
        begun: when it began, of ``perf_counter``.
    """

    def __init__(
        self,
        target: str | Path,
        draft: str | Path | None = None,
        options: EngineOptions | None = None,
        *,
        on_progress: Callable[[Event], None] | None = None,
        cancel: Cancel | None = None,
    ) -> None:
        self.options = options or EngineOptions()
        self.on_progress = on_progress
        self.stop = Cancel()
        self.begun = perf_counter()
        self._names = str(target), None if draft is None else str(draft)
        self._cancel = cancel or Cancel()
        self._said: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._opened: OpenedPair | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._open, name="specllama-open", daemon=True)
        self._leaving = ExitStack()

    def __enter__(self) -> OpeningPair:
        with self._leaving as leaving:
            leaving.enter_context(self.stop.following(self._cancel))
            leaving.callback(sys.setswitchinterval, sys.getswitchinterval())
            sys.setswitchinterval(_SWITCH_S)
            if gc.isenabled():
                leaving.callback(gc.enable)
                gc.disable()
            self._thread.start()
            leaving.callback(self._give_up)
            self._hear(LoadProgress)
            self._leaving = leaving.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._leaving.close()

    def pair(self) -> OpenedPair:
        """Return the opened pair, once it is ready; the caller closes it.

        Raises what ``Engine.load`` raises.
        """
        self._hear()
        self._thread.join()
        if self._error is not None:
            raise self._error
        opened, self._opened = self._opened, None
        assert opened is not None
        return opened

    def _open(self) -> None:
        try:
            target, draft = resolve_pair(*self._names)
            module, _, name = BACKENDS.get(target.suffix, f"{__name__}:open_gguf").partition(":")
            open_pair = getattr(import_module(module), name)
            self._opened = open_pair(target, draft, self.options, self._said.put, self.stop)
            library.remember(target, draft)
        except BaseException as error:
            self._error = error
        self._said.put(None)

    def _hear(self, until: type[Event] | None = None) -> None:
        """Pass events on to the caller, until there is one of the kind ``until`` or no more."""
        while (event := self._said.get()) is not None:
            if self.on_progress is not None:
                self.on_progress(event)
            if until is not None and isinstance(event, until):
                return
        self._said.put(None)

    def _give_up(self) -> None:
        """Free the pair if the caller did not take it."""
        if self._thread.is_alive():
            self.stop.set()
            self._thread.join()
        if self._opened is not None:
            self._opened.close()


def open_gguf(
    target: Path,
    draft: Path | None,
    options: EngineOptions,
    on_progress: Callable[[Event], None],
    stop: Cancel,
) -> OpenedPair:
    """Open the files of a pair and make them ready: the next pass is timed. Headers come first,
    because importing llama.cpp takes a while.

    Raises:
        SpecllamaError: what is wrong with them; nothing is left open.
        Cancelled: ``stop`` was set. Later, passes that see it raise it, too.
    """
    from specllama.backend import trial
    from specllama.engine.gguf_pair import read_pair

    pair = read_pair(target, draft, options)
    wrong = [*pair.not_followed(), *filter(None, (options.coarse_cache,))]
    for topic, told in (("trial", trial.untold()), ("settings", wrong)):
        for said in told:
            on_progress(Notice(said, "warning", topic))
    from specllama.engine.gguf_models import open_models

    return open_models(pair, on_progress, stop)

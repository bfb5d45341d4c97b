"""Loading of the pair that the settings name, with its progress."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from specllama import signals
from specllama.cli import diagnostics
from specllama.cli.progress import Redrawn
from specllama.events import Event, Measuring
from specllama.settings.config_file import Settings
from specllama.settings.params import EngineOptions
from specllama.text import sanitize_line
from specllama.told import news

if TYPE_CHECKING:
    from specllama.engine.engine import Engine
    from specllama.remote.address import Address
    from specllama.remote.foreign import ForeignEngine

DEFAULT_MODEL = "tiny"


def open_engine(
    settings: Settings, *, quiet: bool, parallel: int = 1, measured: bool = False
) -> Engine:
    """Open the engine for ``--model`` and ``--draft-model``, else for the pair of ``pair_of``.

    Args:
        parallel: conversations that it takes at once.
        measured: find out now which passes are exact, where that is not known yet.

    Raises:
        SpecllamaError: as ``Engine.load``.
    """
    pair = pair_of(settings, quiet=quiet)
    options = dataclasses.replace(settings.engine_options(), parallel=parallel)
    return open_files(*pair, options, quiet=quiet, measured=measured)


def open_files(
    target: str | Path,
    draft: str | Path | None,
    options: EngineOptions,
    *,
    quiet: bool,
    measured: bool = False,
) -> Engine:
    """Open the engine for a pair, and show the progress; otherwise as ``open_engine``."""
    progress = LoadingLine(quiet=quiet)
    try:
        engine = load(target, draft, options, on_progress=progress)
        if measured:
            engine.measure(progress, times=False)
        return engine
    finally:
        progress.clear()


def pair_of(settings: Settings, *, quiet: bool) -> tuple[str, str | None]:
    """Return the target and the draft model to load, as the settings name them.

    If they name no target, it is the one that was loaded last, with its draft model; else a model
    that is here, and the bundled pair if none is. A note tells which.
    """
    target, draft = settings["model"], settings["draft-model"]
    if target is not None:
        return str(target), draft
    found, its, why = usual_pair() or (None, None, "")
    if not quiet:
        from specllama.models.library import from_home

        shown = "the bundled tiny pair" if found is None else f"{from_home(found)}, {why}"
        diagnostics.note(f"no model given: using {sanitize_line(shown)} (choose one with -m)")
    return found or DEFAULT_MODEL, draft or its


def usual_pair() -> tuple[str, str | None, str] | None:
    """Return the real pair to use if none is named, and why; None if no real model is here."""
    from specllama.models import refs

    if (used := refs.used_last()) is not None:
        return *used, "the model used last"
    from specllama.models.judgement import first_here

    found = first_here()
    return None if found is None else (found, None, "a model that is here")


def opened(
    settings: Settings, server: Address | None, *, quiet: bool
) -> AbstractContextManager[Engine | ForeignEngine]:
    """Open the engine of a server if one is given, else that of ``open_engine``."""
    if server is not None:
        from specllama.remote.remote_engine import open_remote

        return open_remote(server)
    return open_engine(settings, quiet=quiet)


def load(
    target: str | Path,
    draft: str | Path | None,
    options: EngineOptions,
    *,
    on_progress: Callable[[Event], None] | None = None,
) -> Engine:
    """Run ``Engine.load`` for a command: a signal ends it at once, and later a running pass.

    Raises:
        Interrupted: a signal came while it loaded.
    """
    from specllama.engine.opening import OpeningPair

    with (
        signals.stop_loading() as cancel,
        OpeningPair(target, draft, options, on_progress=on_progress, cancel=cancel) as opening,
    ):
        from specllama.engine.engine import Engine
        from specllama.paths import package_versions

        package_versions()  # while weights are read: the log of a reply begins with them
        engine = Engine.of(opening)
    gc.freeze()  # what was loaded stays: a search for garbage need not look through it
    signals.stops(engine.abort)
    return engine


class LoadingLine(Redrawn):
    """One line on a terminal, removed when loading is done; long steps are shown everywhere."""

    def __init__(self, *, quiet: bool = False, hidden: bool = False) -> None:
        super().__init__(hidden=hidden or quiet)
        self._quiet, self._told = quiet, ""

    def __call__(self, event: Event) -> None:
        new = news(event)
        for notice in () if self._quiet else new.notices:
            self.clear()
            diagnostics.note(notice.message)
        if new.measuring is not None and not self._quiet:
            self._measuring(new.measuring)
        if new.load is not None:
            name = sanitize_line(new.load.path.replace("\\", "/").rsplit("/", 1)[-1])
            self.show(f"loading {name} {new.load.fraction:4.0%}"[:79])

    def _measuring(self, now: Measuring) -> None:
        """Show a bar on a terminal; elsewhere one line, once it is known how long it takes."""
        if now.over:
            self.clear()
        elif self._shown:
            done = int(10 * now.share)
            self.show(f"{now.words}: {now.what} {'━' * done}{'╌' * (10 - done)}"[:79])
        elif now.left_s is not None and self._told != now.what:
            self._told = now.what
            diagnostics.note(f"{now.words}: {now.what}, once")

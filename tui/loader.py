"""The app's engine: the wanted pair, its loading, and recovery from a failed load.

The loader knows no screen. A load runs in its own thread and posts its outcome as a message; the
app gives the message back to ``apply`` before it draws anything, so the loader's state changes on
the app's thread only. A load that fails, or takes its process down, can be tried again; a switch
that fails goes back to the previous pair.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from textual.message import Message

from specllama.backend.cores import usable_cores
from specllama.backend.this_machine import this_machine
from specllama.engine.host import EngineFactory, EngineHost, HostLike
from specllama.errors import ModelUnavailable, SpecllamaError, as_ours
from specllama.events import Event, Loading, Notice
from specllama.interface import EngineInfo, EngineLike
from specllama.models.judgement import Machine
from specllama.models.refs import is_bundled, lasting
from specllama.told import news
from specllama.tui.messages import EngineFailed, EngineGone, EngineLoading, EngineReady

Pair = tuple[str, str | None]
"""Target and draft model."""


def lasting_pair(target: str, draft: str | None) -> Pair:
    """Return the pair as it is remembered: it may be opened from another folder next time."""
    return lasting(target), None if draft is None else lasting(draft)


def loading_words(progress: Loading | Notice | None) -> str:
    return getattr(progress, "words", "loading")


def _no_model(progress: Callable[[Event], None], /) -> EngineLike:
    """Refuse to load: the recipe while no model is chosen."""
    raise ModelUnavailable("no model is chosen yet", "press F6 to choose one")


class EngineLoader:
    """The loader of the app's engine: it loads, switches and closes it.

    Args:
        wanted: the pair to load first; None if none is known.
        recipe_for: how a pair is loaded.
        host_class: where engines live.
        post: takes messages from any thread.
        server: the address of the server whose engine it is; "" where models are loaded here.

    Attributes:
        host: every request goes through it; it outlives the engines in it.
        wanted: the pair that is loaded, or is to be.
        info: of the engine that was loaded last.
        ready: the wanted pair is loaded.
        failed: the last load failed, or what was loaded died; ``load`` tries again.
        resting: why the pair was unloaded, "" where it was not; ``load`` loads it again.
        progress: of the load that is running, or of what is measured at rest.
        warned: what loads warned of, to be shown.
    """

    def __init__(
        self,
        wanted: Pair | None,
        recipe_for: Callable[[str, str | None], EngineFactory],
        host_class: Callable[[EngineFactory], HostLike],
        post: Callable[[Message], object],
        server: str = "",
    ) -> None:
        self.wanted = wanted
        self.info: EngineInfo | None = None
        self.server = server
        self.ready = self.failed = False
        self.resting = ""
        self.progress: Loading | Notice | None = None
        self.warned: list[str] = []
        self._recipe_for = recipe_for
        self._post = post
        self._loads = 0
        self._before: Pair | None = None
        self.host = host_class(recipe_for(*wanted) if wanted else _no_model)
        self.host.on_event = self._on_event
        self.host.on_death = self._gone

    @property
    def bundled(self) -> bool:
        """True if the wanted pair is the one that comes with specllama."""
        return self.wanted is not None and is_bundled(self.wanted[0])

    @property
    def machine(self) -> Machine:
        """The machine's speed, to judge models not here yet; better known once a pair is loaded."""
        info = self.info if not self.server else None
        cores = info.threads if info is not None else usable_cores()[1]
        return this_machine(cores, on_gpu=info is not None and info.target.gpu_layers > 0)

    @property
    def foreign(self) -> bool:
        """True if it is another engine, which reports no rounds."""
        return self.info is not None and not self.info.target.path

    @property
    def possible(self) -> bool:
        """True if a model is loaded, loading, or will be loaded with the next message."""
        return self.wanted is not None

    def load(self) -> None:
        """Load the wanted pair in the background."""
        self._begin(None)

    def reload(self) -> None:
        """Load the same pair again: after a failure, or when its file or the options changed."""
        if self.wanted is None:
            return
        if self.failed:
            self.host.factory = self._recipe_for(*self.wanted)
            self.load()
        else:
            self.switch(*self.wanted)

    def switch(self, target: str, draft: str | None) -> None:
        """Load another pair; the previous one comes back if that fails."""
        self._before, self.wanted = self.wanted, lasting_pair(target, draft)
        self._begin(self._recipe_for(*self.wanted))

    def apply(self, message: EngineLoading | EngineReady | EngineFailed) -> None:
        """Update from a message, on the app's thread."""
        match message:
            case EngineLoading() if getattr(message.progress, "over", False):
                self.progress, self.info = None, self.host.info
            case EngineLoading():
                self.progress = message.progress
            case EngineReady():
                self.info, self.ready, self.failed, self.progress = message.info, True, False, None
                self.resting = ""
            case EngineFailed(kept=True):
                self.wanted = self._before  # its recipe is the host's again
                self.load()
            case EngineFailed():
                self.ready, self.failed, self.progress = False, True, None
                if self.wanted is not None:
                    # There is nothing to go back to: the next try loads what was chosen last.
                    self.host.factory = self._recipe_for(*self.wanted)

    def rest(self, why: str) -> None:
        """Free the memory of the pair until it is loaded again, or something is asked of it."""
        self.ready, self.resting = False, why
        threading.Thread(target=self.host.unload, name="specllama-unload", daemon=True).start()

    def skip(self) -> None:
        """End a measurement at rest."""
        if self.ready and self.progress is not None and isinstance(self.host, EngineHost):
            self.host.skip()

    def close(self) -> None:
        self.host.close()

    # ------------------------------------------------------------------ the load's thread

    def _begin(self, recipe: EngineFactory | None) -> None:
        self.ready = self.failed = False
        self.resting = ""
        self._loads += 1
        self._post(EngineLoading())
        threading.Thread(
            target=self._load, args=(self._loads, recipe), name="specllama-load", daemon=True
        ).start()

    def _load(self, number: int, recipe: EngineFactory | None) -> None:
        message: Message
        try:
            message = EngineReady(self.host.start() if recipe is None else self.host.switch(recipe))
        except Exception as error:
            kept = recipe is not None and self.info is not None
            message = EngineFailed(as_ours(error), kept=kept)
        # A load replaced by a newer one neither failed nor is ready.
        if number == self._loads:
            self._post(message)

    def _gone(self, death: SpecllamaError) -> None:
        """Report the death of the host; called from its reader thread."""
        self._post(EngineGone(death))

    def _on_event(self, event: Event) -> None:
        """Report the progress of an event; called from the host's reader thread."""
        new = news(event)
        self.warned += [notice.message for notice in new.notices if notice.level == "warning"]
        for progress in (new.load, new.measuring, *new.notices):
            if progress is not None:
                self._post(EngineLoading(progress))


def files_of(info: EngineInfo) -> tuple[object, ...]:
    """Return the facts that an engine's figures depend on: they still hold if a reload leaves them
    equal."""
    models = [model for model in (info.target, info.draft) if model is not None]
    return (
        *((model.path, model.file_bytes, model.n_ctx, model.repacked) for model in models),
        info.device,
        info.threads,
    )

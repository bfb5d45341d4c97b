"""The app's engine: what is loaded, what is being loaded, and what happens when that fails.

Loading runs in a thread behind the screen. A load that fails, or takes its process down, is one
note; the conversation and what was typed stay, and the next message, ``/reload`` or another choice
of models tries again. A switch that fails goes back to the pair before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual import on, work

from specllama.engine.host import EngineFactory, LoadEngine
from specllama.errors import EngineDied, SpecllamaError, UsageError
from specllama.events import Event, LoadProgress
from specllama.models.refs import lasting
from specllama.params import GenerateParams
from specllama.text import sanitize_line
from specllama.tui.messages import EngineFailed, EngineLoading, EngineReady
from specllama.tui.parts import AppPart

if TYPE_CHECKING:
    from specllama.tui.screens.models import Choice

AFTER_FAILURE = "F6 chooses another pair; /reload or your next message tries again"


def lasting_pair(target: str, draft: str | None) -> tuple[str, str | None]:
    """The pair as it is remembered: it may be opened from another folder next time."""
    return lasting(target), None if draft is None else lasting(draft)


def drafts_differently(a: GenerateParams, b: GenerateParams) -> bool:
    """Whether what was measured with the one says nothing about the other."""
    same = ("speculate", "proposer", "verify", "window", "draft_max", "draft_min", "draft_p_min")
    return any(getattr(a, name) != getattr(b, name) for name in same)


class EngineKeeper(AppPart):
    load_failed = False
    _load_text = ""
    _loads = 0
    _before_switch: tuple[str, str | None] | None = None

    def load_recipe(self, target: str, draft: str | None) -> EngineFactory:
        return LoadEngine(target, draft, self.options)

    @property
    def engine_possible(self) -> bool:
        """A model is loaded, loading, or will be loaded with the next message."""
        return self.wanted is not None

    @property
    def status(self) -> tuple[str, str]:
        """What the top line says about the engine, and in which ink."""
        ink, glyphs = self.ink, self.glyphs
        if self.engine_ready and self.engine_info is not None:
            return f"{glyphs.bullet} {sanitize_line(self.engine_info.device)}", ink.good
        if self.wanted is None:
            return f"{glyphs.ring} no model: F6", ink.warn
        if self.load_failed:
            return f"{glyphs.ring} not loaded", ink.bad
        return f"{glyphs.ring} {self._load_text or 'loading'}", ink.warn

    # ------------------------------------------------------------------ loading

    def engine_event(self, event: Event) -> None:
        """From the host's reader thread."""
        if isinstance(event, LoadProgress):
            self.post_message(EngineLoading(event))

    def load(self, factory: EngineFactory | None = None) -> None:
        """Load in the background what is wanted, or switch to ``factory``."""
        self.engine_ready = self.load_failed = False
        self._load_text = "loading"
        self._loads += 1
        self.chat.refresh_top()
        self._load(self._loads, factory)

    @work(thread=True, exit_on_error=False, group="load")
    def _load(self, number: int, factory: EngineFactory | None) -> None:
        try:
            info = self.host.start() if factory is None else self.host.switch(factory)
        except SpecllamaError as error:
            # A load that a newer one has pushed aside did not fail.
            if number == self._loads:
                self.post_message(EngineFailed(error, kept=factory is not None))
        else:
            if number == self._loads:
                self.post_message(EngineReady(info))

    @on(EngineLoading)
    def _engine_loading(self, event: EngineLoading) -> None:
        progress = event.progress
        self._load_text = f"loading {progress.role} {100 * progress.fraction:.0f}%"
        self.chat.refresh_top()
        if self.chat.busy:
            # The engine died and comes back for this request.
            self.chat.strip.loading = self._load_text
            self.chat.refresh_strip()

    @on(EngineReady)
    async def _engine_is_ready(self, event: EngineReady) -> None:
        self.engine_info = event.info
        self.engine_ready, self._load_text = True, ""
        if self.wanted is not None:
            self.prefs.last_target, self.prefs.last_draft = self.wanted[0], self.wanted[1] or ""
            self.save_prefs()
        chat = self.chat
        self.session.engine = self.host
        chat.engine_changed(event.info)
        if chat.queue:
            await chat.send_queued()
        else:
            self.measure_fixed()

    @on(EngineFailed)
    async def _engine_failed(self, event: EngineFailed) -> None:
        chat = self.chat
        self._load_text = chat.strip.loading = ""
        error = event.error
        if event.kept and self.engine_info is not None:
            # The host has put the old recipe back.
            self.wanted = self._before_switch
            name = sanitize_line(self.engine_info.target.name)
            next_step = f"back to {name}: the conversation goes on with it"
            self.load()
        else:
            self.load_failed = True
            next_step = AFTER_FAILURE
            chat.take_back_queue()
        hints = f"{error.hint}\n{next_step}" if error.hint else next_step
        await chat.transcript.note(error.message, hints, error=True)
        chat.refresh_top()
        chat.refresh_strip()

    def engine_trouble(self, error: SpecllamaError) -> None:
        """A reply failed. A dead engine comes back with the next message."""
        if isinstance(error, EngineDied):
            self.chat.refresh_top()

    def action_reload(self) -> None:
        """Load the same pair again: after a failure, or when its file has changed."""
        if self.wanted is None:
            self.notify("Choose a model first: F6", severity="warning")
            return
        self._before_switch = self.wanted
        factory = self.factory_for(*self.wanted) if self.engine_ready else None
        self.chat.when_idle(lambda: self.load(factory))

    def switch_model(self, choice: Choice | None) -> None:
        if choice is None:
            return
        self._before_switch = self.wanted
        self.wanted = lasting_pair(choice.target, choice.draft)
        factory = self.factory_for(*self.wanted)
        self.chat.when_idle(lambda: self.load(factory))

    # ------------------------------------------------------------------ the next request

    def use_method(self, name: str) -> None:
        plain = name == "none"
        params = self.session.params
        try:
            params = params.replace(speculate=not plain, proposer="auto" if plain else name)
        except UsageError as error:
            self.notify(error.message, severity="error", markup=False)
            return
        self.set_params(params)
        words = {"none": "plain decoding", "auto": "the method is chosen automatically"}
        self.notify(f"Next reply: {words.get(name) or self.glyphs.label(name)}")

    def set_params(self, params: GenerateParams) -> None:
        chat = self.chat
        before, self.session.params = self.session.params, params
        if drafts_differently(before, params):
            chat.strip.meter.restart()
        speculate = params.speculate and params.proposer != "none"
        if speculate != chat.strip.speculate:
            # Why the window was what it was says nothing about the next reply.
            chat.strip.reason, chat.strip.window = "", None
        chat.strip.speculate = speculate
        chat.refresh_strip()

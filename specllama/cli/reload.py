"""The reload of a running server on SIGHUP: its settings files and its keys."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from specllama.cli.served import Serves
from specllama.errors import SpecllamaError
from specllama.server.log import ServerLog
from specllama.server.service import Service
from specllama.settings.config import Settings
from specllama.settings.duration import seconds
from specllama.text import number_of

_AT_ONCE = ("idle-unload", "queue", "access-log")
_AFTER = ("model", "draft-model", "log-file")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The settings from files, variables and flags."""

    settings: Settings
    keys: tuple[str, ...]


class Reload:
    """The reload of a server's settings; it changes those that can change while it answers.

    Replies that are being written go on as they were asked for.

    Args:
        read: raises SpecllamaError where the files are wrong: then nothing changes.
        now: its present settings.
    """

    def __init__(
        self,
        read: Callable[[], ServerSettings],
        now: ServerSettings,
        serves: Serves,
        service: Service,
        log: ServerLog,
    ) -> None:
        self._read, self._now = read, now
        self._serves, self._service, self._log = serves, service, log
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last: Future[None] | None = None

    def begin(self) -> None:
        """Allow reloads from now on; called in the event loop."""
        self._loop = asyncio.get_running_loop()

    def ask(self) -> None:
        """Read again; from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is over
                self._last = asyncio.run_coroutine_threadsafe(self(), self._loop)

    async def __call__(self) -> None:
        try:
            told = await asyncio.to_thread(self._read)
        except SpecllamaError as error:
            self._log.say(f"the settings stay as they were: {error.message}")
            return
        self._log.say(self._changed(told))

    def _changed(self, new: ServerSettings) -> str:
        old, self._now = self._now, new
        at_once, later, after = [], [], []
        for setting, value in new.settings:
            if value.value == old.settings[setting.name]:
                continue
            if setting.name in _AFTER:
                after.append(setting.name)
            elif setting.field.startswith(("generate.", "sampling.")) or setting.name in _AT_ONCE:
                at_once.append(setting.name)
            elif not setting.field.startswith("app."):
                later.append(setting.name)
        if new.keys != old.keys:
            at_once.append(f"{number_of(len(new.keys), 'key')}")
        self._apply(new)
        said = [
            f"{', '.join(names)} ({when})" if when else ", ".join(names)
            for names, when in (
                (at_once, ""),
                (later, "when a model is loaded next"),
                (after, "after a restart"),
            )
            if names
        ]
        return f"the settings were read again; changed: {'; '.join(said) or 'nothing'}"

    def _apply(self, new: ServerSettings) -> None:
        serves, models = self._serves, self._service.models
        serves.follow(new.settings)
        for model in models.all.values():
            model.params = serves.params
            model.queue.most = serves.waiting
            if model.recipe is not None:
                model.recipe = replace(model.recipe, options=serves.options)
            models.stay(model, seconds(serves.idle_unload))
        self._service.access.keys = new.keys
        self._log.requests = new.settings["access-log"]

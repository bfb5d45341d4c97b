"""The models of a server: loaded when a request names one, unloaded when long unused.

One load at a time, so that each finds the memory that is really free. If a model does not fit,
others are unloaded: first those idle longest, then those in use. These finish their replies, while
new requests for them wait until the load is over, so that no model waits for ever. A model that
would not fit even alone is refused with the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from time import monotonic

from specllama.errors import DoesNotFit, SpecllamaError
from specllama.events import Event
from specllama.models.memory import MARGIN
from specllama.server.refusals import Refusal, does_not_fit, no_such_model, shutting_down
from specllama.server.request_queue import Watcher
from specllama.server.served import ServedModel
from specllama.told import news

LOOK_S = 5.0  # between two looks for models that came meanwhile

Hearer = Callable[[ServedModel], object]


class Models:
    """The models of one server.

    Args:
        served: the first is used if a request names none.
        most: number of models that may be loaded at once; 0: as many as fit into memory.
        more: lists the models that are here now, some of which may be known.

    Attributes:
        all: by name.
        begun: the first load, if any, is over; no request is accepted before.
        alone: there is one model, and requests may call it by any name.
        hearers: called in the event loop with every model whose state or progress changed.
    """

    def __init__(
        self,
        served: Sequence[ServedModel],
        *,
        most: int = 0,
        more: Callable[[], Iterable[ServedModel]] | None = None,
    ) -> None:
        self.first = served[0]
        self.most = most
        self.alone = len(served) == 1 and more is None
        self.all: dict[str, ServedModel] = {}
        self.begun = False
        self.hearers: set[Hearer] = set()
        self._more = more
        self._looked_s = -math.inf
        self._watchers: list[Watcher] = []
        self._turn = asyncio.Lock()  # to load or to unload
        self._tasks: set[asyncio.Task[None]] = set()
        for model in served:
            self._add(model)

    def _add(self, model: ServedModel) -> None:
        self.all[model.name] = model
        model.queue.watchers += self._watchers

    def watch(self, watcher: Watcher) -> None:
        """Send a watcher the requests of all models, also of later ones."""
        self._watchers.append(watcher)
        for model in self.all.values():
            model.queue.watchers.append(watcher)

    @property
    def loaded(self) -> list[ServedModel]:
        return [model for model in self.all.values() if model.queue.loaded]

    @property
    def longest(self) -> int:
        """Tokens of the longest context that is loaded."""
        return max((model.info.target.n_ctx for model in self.loaded), default=0)

    async def look(self) -> list[ServedModel]:
        """Return all models, also new ones, and read what their files hold."""
        if self._more is not None and monotonic() - self._looked_s >= LOOK_S:
            self._looked_s = monotonic()
            for model in await asyncio.to_thread(list, self._more()):
                if model.name not in self.all:
                    self._add(model)
        models = list(self.all.values())
        for model in models:
            if not model.known:
                await asyncio.to_thread(model.look)
        return models

    async def named(self, name: str | None) -> ServedModel:
        """Return the model that a request names; the first if it names none.

        Raises:
            Refusal: there is none of this name.
        """
        if not name or self.alone:
            return self.first
        return self._called(name) or await self.listed(name)

    async def listed(self, name: str) -> ServedModel:
        """Return the model of exactly this name, for a question about it.

        Raises:
            Refusal: there is none.
        """
        await self.look()
        if (found := self._called(name)) is None:
            raise no_such_model(name, list(self.all))
        return found

    def _called(self, name: str) -> ServedModel | None:
        return next((model for model in self.all.values() if model.is_called(name)), None)

    # -- loaded, in use, unloaded --

    async def begin(self, *, load: bool) -> None:
        """Accept requests, after the first model is loaded if ``load``.

        Raises:
            Refusal, SpecllamaError: it cannot be loaded.
        """
        if load:
            await self.load(self.first)
        self.begun = True

    async def use(self, model: ServedModel, keep_s: float | None = None) -> Callable[[], None]:
        """Load a model and mark it as in use; return the function that ends the use.

        Args:
            keep_s: seconds that it may stay loaded unused from now on; None changes nothing.

        Raises:
            Refusal, SpecllamaError: it cannot be loaded.
        """
        while not model.queue.loaded or model.leaving:
            await self.load(model)
        model.uses += 1
        model.unused.clear()
        model.wake(keep_s)
        return lambda: self._used(model)

    def _used(self, model: ServedModel) -> None:
        model.uses -= 1
        if not model.uses:
            model.unused.set()
            self.keep(model)

    def keep(self, model: ServedModel, keep_s: float | None = None) -> None:
        """Restart the model's idle timer."""
        model.idle_s = monotonic()
        model.wake(keep_s)
        if model.keep_s < math.inf and not model.uses and model.queue.loaded:
            loop = asyncio.get_running_loop()
            model.timer = loop.call_later(model.left_s, self._begin, self._expire, model)

    def _begin(self, work: Callable[[ServedModel], object], model: ServedModel) -> None:
        task = asyncio.ensure_future(work(model))  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _expire(self, model: ServedModel) -> None:
        async with self._turn:
            if not model.uses and model.left_s <= 0:
                await self._unload(model)

    async def load(self, model: ServedModel) -> None:
        """Load a model unless it is loaded; concurrent requests wait for the same load.

        Raises:
            Refusal, SpecllamaError: it cannot be loaded.
        """
        if model.loading is None:
            model.loading = asyncio.ensure_future(self._load(model))
            model.loading.add_done_callback(_heard)
        await asyncio.shield(model.loading)

    def load_later(self, model: ServedModel) -> None:
        """Load a model without waiting; ``failed`` holds the reason if that fails."""
        self._begin(self._tried, model)

    async def _tried(self, model: ServedModel) -> None:
        with contextlib.suppress(Refusal, SpecllamaError):
            await self.load(model)

    async def _load(self, model: ServedModel) -> None:
        self._tell(model)
        try:
            async with self._turn:
                if model.leaving:
                    await model.unused.wait()
                    await self._unload(model)
                if not model.queue.loaded:
                    await self._loaded(model)
        except Exception as error:
            model.failed = str(error)
            if model.queue.closing:
                raise shutting_down() from None
            raise
        finally:
            model.loading = None
            self._tell(model)

    async def _loaded(self, model: ServedModel) -> None:
        self._follow(model)
        model.failed, model.progress = "", 0.0
        while self.most and len(self.loaded) >= self.most:
            await self._make_room(self.loaded)
        while True:
            others = self.loaded
            if model.recipe is not None:
                beside = sum(other.maps for other in others)
                model.queue.host.factory = dataclasses.replace(model.recipe, beside=beside)
            try:
                await model.queue.start()
                break
            except DoesNotFit as error:
                if not others:
                    raise
                held = sum(other.holds for other in others)
                if error.needed > (error.free + held) * MARGIN:
                    holds = {other.name: other.holds for other in others}
                    raise does_not_fit(model.name, error, holds) from None
                await self._make_room(others)
        await asyncio.to_thread(model.weigh)
        model.keep_s = model.usual_s
        self.keep(model)

    async def _make_room(self, others: Sequence[ServedModel]) -> None:
        """Unload the model that has been idle longest, or else one in use after its replies."""
        idle = [other for other in others if not other.uses]
        if idle:
            await self._unload(min(idle, key=lambda other: other.idle_s))
            return
        one = others[0]
        one.leaving = True
        await one.unused.wait()
        await self._unload(one)

    async def unload(self, model: ServedModel) -> None:
        """Unload a model after its replies; abort its load at once."""
        model.leaving = model.queue.loaded
        if model.loading is not None and not model.queue.loaded:
            await asyncio.to_thread(model.queue.host.unload)
        await model.unused.wait()
        async with self._turn:
            if model.leaving:
                await self._unload(model)

    def unload_later(self, model: ServedModel) -> None:
        """Unload a model without waiting."""
        model.leaving = model.queue.loaded
        self._begin(self.unload, model)

    async def _unload(self, model: ServedModel) -> None:
        model.wake(None)
        try:
            await model.queue.unload()
        finally:
            model.leaving = False
            model.holds = model.maps = 0
            self._tell(model)

    async def close(self) -> None:
        """End all engines."""
        for model in self.all.values():
            model.wake(None)
            await asyncio.to_thread(model.queue.host.close)

    # -- who hears of it --

    def _tell(self, model: ServedModel) -> None:
        for hear in list(self.hearers):
            hear(model)

    def _follow(self, model: ServedModel) -> None:
        """Receive the progress of a load from the model's process."""
        loop = asyncio.get_running_loop()
        host, before = model.queue.host, model.on_event

        def on_event(event: Event) -> None:
            if before is not None:
                before(event)
            if (load := news(event).load) is not None:
                loop.call_soon_threadsafe(self._progress, model, load.fraction)

        host.on_event = on_event

    def _progress(self, model: ServedModel, fraction: float) -> None:
        model.progress = fraction
        self._tell(model)


def _heard(load: asyncio.Future[None]) -> None:
    """Mark the error of a load as seen, even if no request waits for it: lists show it."""
    if not load.cancelled():
        load.exception()

"""An engine in this process with the interface of ``EngineHost``: a server's, or a stand-in.

An engine that died is opened anew for the next request, as a child is started anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from specllama.cancel import Cancel
from specllama.engine.process import OnMessage
from specllama.engine.serving import EngineFactory
from specllama.errors import EngineDied, SpecllamaError
from specllama.events import Event
from specllama.interface import EngineInfo, EngineLike, Message, Prompt
from specllama.settings.params import GenerateParams


class InlineHost:
    """An engine in this process, see ``HostLike``."""

    def __init__(self, factory: EngineFactory) -> None:
        self.factory = factory
        self.on_event: Callable[[Event], None] | None = None
        self.on_death: Callable[[], object] = lambda: None  # never: it is known by the next request
        self.death: SpecllamaError | None = None
        self.engine: EngineLike | None = None

    @property
    def info(self) -> EngineInfo:
        return self._started().info

    def _started(self) -> EngineLike:
        if self.engine is None:
            made = self.factory(self.on_event or (lambda event: None))
            self.engine = self.engine or made  # another thread may have been quicker
        return self.engine

    @contextmanager
    def _alive(self) -> Iterator[EngineLike]:
        engine = self._started()
        try:
            yield engine
        except EngineDied:
            if self.engine is engine:
                self.engine = None
                engine.close()
            raise

    def start(self) -> EngineInfo:
        return self._started().info

    def read_ahead(
        self, conversation: Sequence[Message], params: GenerateParams, on_message: OnMessage
    ) -> None:
        """Do nothing: a server reads what it is sent, never ahead."""

    def switch(self, factory: EngineFactory) -> EngineInfo:
        before, old = self.factory, self.engine
        self.factory, self.engine = factory, None
        try:
            return self.start()
        except SpecllamaError:
            self.factory, self.engine = before, old
            raise

    def generate(
        self,
        prompt: Prompt,
        params: GenerateParams,
        *,
        cancel: Cancel | None = None,
    ) -> Iterator[Event]:
        with self._alive() as engine:
            yield from engine.generate(prompt, params, cancel=cancel)

    def count_tokens(self, prompt: str | Sequence[Message]) -> int:
        with self._alive() as engine:
            return engine.count_tokens(prompt)

    def unload(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()

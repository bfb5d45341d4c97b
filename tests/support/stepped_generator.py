"""Engines that only generate, as a host process drives them: request by request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from specllama.cancel import Cancel
from specllama.events import Event
from specllama.interface import Prompt, ToolSyntax
from specllama.settings.params import GenerateParams


class OneAtATime:
    """``begin`` and ``step`` for an engine that only generates."""

    _id = 0
    _events: Iterator[Event] | None = None
    patience_s = 30.0

    def watched(self, beat: Callable[[], object]) -> None:
        """Every step is watched."""

    @property
    def free(self) -> bool:
        return self._events is None

    def keep(self) -> None:
        """It has nothing to keep."""

    unmeasured = False

    def measure(self, report: object = None, *, cancel: Cancel | None = None) -> bool:
        return True

    def slot(self, action: str, index: int, path: Path | None = None) -> tuple[int, int]:
        raise NotImplementedError

    def tool_syntax(self) -> ToolSyntax:
        return ""

    def thinks(self) -> bool:
        return False

    def prepare(
        self,
        prompt: Prompt,
        params: GenerateParams,
        *,
        cancel: Cancel | None = None,
    ) -> tuple[Prompt, GenerateParams]:
        return prompt, params

    def begin(self, ready: tuple[Prompt, GenerateParams], *, cancel: Cancel | None = None) -> int:
        self._events = self.generate(*ready, cancel=cancel)
        self._id += 1
        return self._id

    def step(self) -> list[tuple[int, Event | Exception]]:
        if self._events is None:
            return []
        said: Event | Exception
        try:
            said = next(self._events)
        except StopIteration:
            self._events = None
            return []
        except Exception as error:
            said = error
        if isinstance(said, Exception) or said.ends:
            self._events = None
        return [(self._id, said)]

    def generate(
        self,
        prompt: Prompt,
        params: GenerateParams,
        *,
        cancel: Cancel | None = None,
    ) -> Iterator[Event]:
        raise NotImplementedError

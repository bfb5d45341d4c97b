"""The demonstration engine in a process of its own."""

from __future__ import annotations

from collections.abc import Callable

from demo_engine import DemoEngine, DemoFactory
from stepped_generator import OneAtATime

from specllama.events import Event


class SteppedDemo(DemoEngine, OneAtATime):
    """See ``OneAtATime``."""


class SteppedDemoFactory(DemoFactory):
    """A recipe for ``EngineHost``."""

    def __call__(self, progress: Callable[[Event], None], /) -> SteppedDemo:
        made = super().__call__(progress)
        return SteppedDemo(made.reply, made.speed, made.tree, info=made.info)

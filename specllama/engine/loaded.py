"""The parts that one engine runs on, and the way to free them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from specllama.cancel import Cancel, StopFlag
from specllama.engine.profiles import Windows
from specllama.engine.prompting import Prompting
from specllama.engine.sampler_chains import SamplerChains
from specllama.engine.shelf import Shelf
from specllama.engine.slot import Slot
from specllama.errors import Cancelled
from specllama.events import Report
from specllama.interface import EngineInfo


def _nothing() -> None:
    pass


@dataclass(slots=True)
class Loaded:
    """The parts of an engine, from model files or from wherever a test takes them.

    Attributes:
        info: what to show people; replaced once more was measured.
        measured: measures what is not known yet, tells how far it is, and states it.
        slots: places for conversations, whose lanes are of one pool; at least one.
        prompting: prompts in the target's tokens.
        chains: the sampler chain of a request.
        windows: the draft window of a request.
        stop: what every pass looks at; the cancel of a request that runs alone sets it.
        kv_ram: bytes for parked texts.
        shelf: what is on disk; None keeps nothing there.
        close: frees the models.
    """

    info: EngineInfo
    slots: tuple[Slot, ...]
    prompting: Prompting
    chains: SamplerChains
    windows: Windows
    stop: StopFlag = field(default_factory=StopFlag)
    measured: Callable[[Report], EngineInfo] | None = None
    kv_ram: int = 0
    shelf: Shelf | None = None
    close: Callable[[], None] = _nothing

    def measure(self, report: Report, cancel: Cancel) -> bool:
        """Measure what is unknown, and report it; return False if ``cancel`` ended that."""
        if self.measured is None:
            return False
        try:
            with self.stop.obeying(cancel):
                self.info = self.windows.info = self.measured(report)
        except Cancelled:
            return False
        for slot in self.slots:
            if self.info.is_exact(slot.target.max_rows, line=False):
                slot.truncated(0)  # its passes were exact before that was known
        return True

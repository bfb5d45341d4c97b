"""Engines over whatever a test takes for a target: the one place where tests build a ``Loaded``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from specllama.backend.base import Lane, Vocab
from specllama.backend.fake import FakeVocab, fake_info
from specllama.cancel import StopFlag
from specllama.engine.loaded import Loaded
from specllama.engine.pace import Pace
from specllama.engine.profiles import Profile, Windows
from specllama.engine.prompting import Prompting
from specllama.engine.sampler_chains import ConstraintMaker, SamplerChains
from specllama.engine.seating import Seats
from specllama.engine.slot import Slot
from specllama.interface import EngineInfo
from specllama.settings.params import GenerateParams
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.window import FixedWindow, Window


class NoSeats(Seats):
    """For a scheduler whose conversations a test writes itself, in lanes of its own."""

    def __init__(self) -> None:
        self.pace = Pace()

    def vacate(self) -> bool:
        return False

    def release(self, id: int, keep: int) -> None:
        pass


class Given(Windows):
    """Windows that a test makes; of a fixed length unless it does."""

    def __init__(self, info: EngineInfo, make: Callable[[GenerateParams], Window] | None) -> None:
        super().__init__(Profile(), info)
        self._make = make

    def __call__(self, params: GenerateParams) -> Window:
        if self._make is not None:
            return self._make(params)
        return FixedWindow(params.reach(1), params.draft_min)


def loaded(
    target: Lane,
    vocab: Vocab | None = None,
    *,
    info: EngineInfo | None = None,
    drafters: Mapping[str, Drafter] | None = None,
    more: Sequence[Slot] = (),
    template: str | None = None,
    bos: str = "",
    eos: str = "",
    make_constraint: ConstraintMaker | None = None,
    make_window: Callable[[GenerateParams], Window] | None = None,
    stop: StopFlag | None = None,
) -> Loaded:
    """The parts of an engine whose first slot is the lane ``target`` with ``drafters``."""
    vocab, info = vocab or FakeVocab(), info or fake_info()
    windows = make_window if isinstance(make_window, Windows) else Given(info, make_window)
    return Loaded(
        info=info,
        slots=(Slot(target, drafters or {}), *more),
        prompting=Prompting(vocab, template, bos, eos),
        chains=SamplerChains(vocab, make_constraint),
        windows=windows,
        stop=stop or StopFlag(),
    )

"""Engines over what a test takes for a target: the one place where tests build a ``Loaded``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from table_model import FakePool, FakeTable, FakeVocab, fake_model

from specllama.backend.base import Lane, Part, Vocab
from specllama.backend.lane import CellLane
from specllama.bench.prompts import BenchPrompt
from specllama.bench.proof import prove
from specllama.cancel import Cancel
from specllama.engine.engine import Engine
from specllama.engine.pace import Pace
from specllama.engine.pair_loading import Loaded, SamplerChains
from specllama.engine.profiles import Profile, Windows
from specllama.engine.prompting import Prompting
from specllama.engine.seating import Seats
from specllama.engine.slot import Slot
from specllama.interface import EngineInfo
from specllama.models import contents
from specllama.settings.params import EngineOptions, GenerateParams
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.effects import Pass
from specllama.speculative.window import Window


def measured(target: Any, draft: Any = None, options: EngineOptions | None = None) -> Engine:
    """A loaded pair whose passes were compared with single steps, as every process of this home
    knows then."""
    contents._found.clear()  # what another home's tests read is not kept in this one
    engine = Engine.load(target, draft, options)
    assert engine.measure()
    return engine


def proved(
    engine: Engine, prompts: Sequence[BenchPrompt], *proposers: str, **more: Any
) -> tuple[int, int]:
    """Compare texts with those of plain decoding; return the tokens drafted and accepted."""
    given = {"temperatures": (0.0, 1.0), "draft_max": (4,), "max_tokens": 32, **more}
    cases = list(prove(engine, prompts, proposers=proposers, **given))
    assert [case for case in cases if not (case.ok and case.identical and case.law_holds)] == []
    return sum(case.drafted for case in cases), sum(case.accepted for case in cases)


class NoSeats(Seats):
    """For a scheduler whose conversations a test writes itself, in lanes of its own."""

    def __init__(self) -> None:
        self.pace = Pace()

    def vacate(self) -> bool:
        return False

    def release(self, id: int, keep: int) -> None:
        pass


class OnlyLane(FakePool):
    """A pool whose lane runs passes by ``forward``, which tests replace."""

    def run(self, parts: Sequence[Part]) -> None:
        if isinstance(one := parts[0], Pass):
            one.rows = one.lane.forward(one.tokens, outputs=one.outputs, parents=one.parents)
        else:
            super().run(parts)


class FakeContext(CellLane):
    """The only lane of a fake pool. ``options``: those of the pool."""

    def __init__(self, table: FakeTable, **options: Any) -> None:
        pool = OnlyLane(table, lanes=1, **options)
        super().__init__(pool, pool.take_sequence())
        pool.seat(self)
        self.passes = pool.fake.passes


def fake_info(n_ctx: int = 512, n_vocab: int = 64, *, exact_rows: int = 65) -> EngineInfo:
    """What an engine over fake contexts says of itself."""
    model = fake_model(n_ctx, n_vocab)
    return EngineInfo(
        target=model,
        draft=model,
        exactness=f"bitwise up to {exact_rows} rows",
        exact_rows=exact_rows,
        device="CPU",
        threads=1,
        flash_attn=False,
        load_ms=0.0,
        has_chat_template=False,
        exact_trees=exact_rows > 1,
    )


class Given(Windows):
    """Windows that a test makes; of a fixed length unless it does."""

    def __init__(self, info: EngineInfo, make: Callable[[GenerateParams], Window] | None) -> None:
        super().__init__(Profile(), info)
        self._make = make

    def __call__(self, params: GenerateParams) -> Window:
        if self._make is not None:
            return self._make(params)
        return Window(params.draft_limit(1))


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
    make_constraint: Callable[[GenerateParams], Any] | None = None,
    make_window: Callable[[GenerateParams], Window] | None = None,
    stop: Cancel | None = None,
) -> Loaded:
    """The parts of an engine whose first slot is the lane ``target`` with ``drafters``."""
    vocab, info = vocab or FakeVocab(), info or fake_info()
    chains = SamplerChains(vocab)
    if make_constraint is not None:
        chains._guide = make_constraint  # type: ignore[method-assign]
    windows = make_window if isinstance(make_window, Windows) else Given(info, make_window)
    return Loaded(
        info=info,
        slots=(Slot(target, drafters or {}), *more),
        prompting=Prompting(vocab, template, bos, eos),
        chains=chains,
        windows=windows,
        stop=stop or Cancel(),
    )


def engine_over(target: Lane, vocab: Vocab | None = None, **parts: Any) -> Engine:
    """An engine of ``loaded`` parts; it says of itself what is true of the lane."""
    vocab = vocab or FakeVocab(target.n_vocab)  # type: ignore[attr-defined]
    info = parts.pop("info", None) or fake_info(target.n_ctx, vocab.n_tokens)
    return Engine(loaded(target, vocab, info=info, **parts))

"""Conversations side by side over tables: the engine, requests, and each one's text alone."""

from collections.abc import Sequence

from engines import engine_over
from requests_made import asked
from table_model import FakePool, FakeTable, FakeVocab

from specllama.backend.base import Lane
from specllama.engine.engine import Engine
from specllama.engine.slot import Slot
from specllama.settings.params import GenerateParams
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.drafting.method import Kit

V = 24
TABLE = FakeTable(V, seed=3, sharpness=2.0, eog_bias=-4.0)
DRAFT = FakeTable(V, seed=4, sharpness=2.0, of=TABLE, agreement=0.7)


def engine_of(
    slots: int, *, in_order: bool = True, rows: int = 65, leaves: int = 16, tiles: bool = False
) -> Engine:
    """Conversations share a pool of the target and one of the draft model.

    Args:
        in_order: False frees the target's cells instead of leaving ghosts.
        rows, leaves: most that a pass of the target takes.
        tiles: long prompts are read in tiles.
    """
    pool = FakePool(
        TABLE, n_ctx=160, lanes=slots, in_order=in_order, max_rows=rows, max_leaves=leaves,
        tiles=tiles,
    )  # fmt: skip
    beside = FakePool(DRAFT, n_ctx=160, lanes=slots, in_order=False, by_order=False)

    def parts() -> tuple[Lane, dict[str, Drafter]]:
        lane = pool.open()
        return lane, Kit(lane, beside.open()).all()

    target, drafters = parts()
    more = [Slot(*parts()) for _ in range(slots - 1)]
    return engine_over(target, FakeVocab(V), drafters=drafters, more=more)


def params(
    method: str, seed: int, *, rule: str = "match", temperature: float = 0.8, ends: bool = True
) -> GenerateParams:
    return asked(method, temperature, free=True, seed=seed, verify=rule, ignore_eos=not ends)


def alone(prompt: Sequence[int], asked: GenerateParams, *, tiles: bool = False) -> tuple[int, ...]:
    *_, last = engine_of(1, tiles=tiles).generate(list(prompt), asked)
    return last.token_ids

"""Our own time in a round at a large vocabulary: everything but the passes of the models.

``pytest -s tests/lab/bench/test_round_costs.py`` prints the figures; nothing is asserted of a
clock. Processor time of this thread, so that what else runs on the machine counts less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import thread_time
from typing import Any

import numpy as np
import pytest
from engines import FakeContext, fake_info, loaded
from table_model import FakeTable, FakeVocab

from specllama.arrays import Row
from specllama.engine.engine import Engine
from specllama.events import RoundDone
from specllama.settings.params import GenerateParams, SamplingParams
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.drafting.draft_tree import TreeDrafter
from specllama.speculative.drafting.ngram import NgramDrafter
from specllama.speculative.window import Window

V = 151_936
ROWS = 40  # different rows, 24 MB: none stays in a cache from round to round
GUESSES = 4
TOKENS, REPEATS = 400, 5


class Shelf(FakeTable):
    """Rows as a language model's: a few likely tokens above a broad rest.

    A draft (``of``) has the same rows a little blurred, and now and then quite another.
    """

    def __init__(self, seed: int, of: Shelf | None = None) -> None:
        super().__init__(V, seed=seed)
        rng = np.random.default_rng(seed)
        rows = rng.normal(0.0, 2.2, (ROWS, V)).astype(np.float32)
        for row in rows:
            row[1 + rng.integers(0, V - 1, 60)] += rng.normal(11, 2, 60).astype(np.float32)
            row[1 + rng.integers(0, V - 1, 3)] += rng.normal(17, 2, 3).astype(np.float32)
        if of is not None:
            rows = of.rows + rows * np.float32(0.1)
            rows[::10] = rng.permuted(rows[::10], axis=1)
        self.rows = rows

    def row(self, tokens: Sequence[int]) -> Row:
        row: Row = self.rows[(tokens[-1] * 7 + len(tokens)) % ROWS]
        return row


class Timed(FakeContext):
    """What its cache does is the model's time, what comes before and behind it is ours."""

    def __init__(self, table: FakeTable, spent: list[float]) -> None:
        super().__init__(table, n_ctx=2048, in_order=False)

        def timed(method: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **named: Any) -> Any:
                begin = thread_time()
                try:
                    return method(*args, **named)
                finally:
                    spent[0] += thread_time() - begin

            return run

        for name in ("decode", "remove", "copy", "keep", "end"):
            setattr(self.pool.fake, name, timed(getattr(self.pool.fake, name)))


@pytest.fixture(scope="module")
def shelves() -> tuple[Shelf, Shelf]:
    target = Shelf(0)
    return target, Shelf(1, of=target)


def own_times(shelves: tuple[Shelf, Shelf], proposer: str, temperature: float) -> list[float]:
    """Microseconds of each round, from one ``RoundDone`` to the next."""
    spent = [0.0]
    target, draft = (Timed(shelf, spent) for shelf in shelves)
    drafters: dict[str, Any] = {
        "draft": ChainDrafter(draft, n_vocab=V),
        "tree": TreeDrafter(draft, n_vocab=V),
        "ngram": NgramDrafter(),
    }
    engine = Engine(
        loaded(
            target=target,
            vocab=FakeVocab(V),
            info=fake_info(2048, V),
            drafters=drafters,
            make_window=lambda params: Window(0 if proposer == "none" else GUESSES),
        )
    )
    params = GenerateParams(
        max_tokens=TOKENS,
        seed=1,
        proposer=proposer,
        sampling=SamplingParams(temperature=temperature),
    )
    times = []
    for _ in range(REPEATS):
        begin, spent[0] = thread_time(), 0.0
        drafted = rounds = 0
        for event in engine.generate("the rain in spain stays mainly", params):
            if isinstance(event, RoundDone):
                now = thread_time()
                rounds += 1
                if len(event.drafted) == GUESSES or proposer in ("none", "ngram"):
                    times.append((now - begin - spent[0]) * 1e6)
                    drafted += len(event.drafted)
                begin, spent[0] = thread_time(), 0.0
    return times


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("proposer", ["none", "ngram", "draft", "tree"])
def test_a_round(shelves: tuple[Shelf, Shelf], proposer: str, temperature: float) -> None:
    times = np.array(own_times(shelves, proposer, temperature))
    low, mid, high = np.quantile(times, (0.1, 0.5, 0.9))
    print(
        f"\n{proposer} at T {temperature:g}: {mid:.0f} us a round "
        f"(1 of 10 below {low:.0f}, above {high:.0f}), {len(times)} rounds of {GUESSES} guesses"
    )

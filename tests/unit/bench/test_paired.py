"""The estimator of every comparison by the clock: right on average, and as sure as it says."""

from __future__ import annotations

import math
import random

import pytest

from specllama.bench.outcome import Compared, as_one, ratio_words

TRIALS = 400


@pytest.mark.parametrize(("prompts", "laps"), [(1, 3), (4, 2), (8, 3)])
def test_an_interval_holds_what_these_prompts_gain_19_of_20_times(prompts: int, laps: int) -> None:
    """Prompts gain differently, and every run is off by some 10 %."""
    rng = random.Random(5)
    held = 0
    for _ in range(TRIALS):
        gains = [rng.gauss(0.2, 0.3) for _ in range(prompts)]
        rows = [
            [(math.exp(rng.gauss(0, 0.1)), math.exp(gain + rng.gauss(0, 0.1))) for _ in range(laps)]
            for gain in gains
        ]
        told = as_one(rows)
        assert told is not None
        assert told.low is not None
        assert told.high is not None
        held += told.low <= math.exp(sum(gains) / prompts) <= told.high
    assert 0.92 <= held / TRIALS <= 0.98


def test_a_group_is_as_sure_as_the_table_that_it_stands_in() -> None:
    steady = [[(1.0, 2.0), (1.0, 2.0)]]
    shaky = [[(1.0, 1.0), (1.0, 1.3)]]
    alone, beside = as_one(steady), as_one(steady, [*steady, *shaky])
    assert alone is not None
    assert beside is not None
    assert (alone.low, alone.ratio, alone.high) == pytest.approx((2.0, 2.0, 2.0))
    assert beside.ratio == pytest.approx(2.0)
    assert beside.low is not None
    assert beside.low < 1.8
    assert as_one([]) is as_one([[]]) is None


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(0.96, 1.2, "1.10× (0.96–1.20)"), (0.8, 0.99, "1.10× (0.80–0.99)"), (None, None, "1.10×")],
)
def test_the_words_of_a_ratio(low: float | None, high: float | None, words: str) -> None:
    assert ratio_words(Compared(1.1, low, high, 1.0, 2)) == words

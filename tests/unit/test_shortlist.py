"""The best tokens of a row tell the law that the whole row has."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specllama.arrays import Row
from specllama.errors import EngineError
from specllama.params import SamplingParams
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.selection import Peaks
from specllama.speculative.shortlist import FEW, Shortlist, confidence, shortlist

SIZES = st.sampled_from([1, 3, 64, 300, 4096, 5001, 32_000])


def random_row(seed: int, n: int, ties: bool) -> Row:
    rng = np.random.default_rng(seed)
    row = rng.normal(0.0, 2.0, n).astype(np.float32)
    row[rng.integers(0, n, 5)] += 11
    row[rng.random(n) < 0.1] = -np.inf
    row[rng.integers(0, n)] = 1.0
    return np.round(row) if ties else row


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1000), n=SIZES, k=st.integers(1, 600), ties=st.booleans())
def test_peaks_find_what_a_scan_finds(seed: int, n: int, k: int, ties: bool) -> None:
    row = random_row(seed, n, ties)
    peaks = Peaks(row)
    assert peaks.top == row.max()
    bar = peaks.bar(k)
    assert bar == -math.inf or np.count_nonzero(row >= bar) >= k
    for least in (bar, peaks.top, peaks.top - 3.0, 0.5, -math.inf):
        np.testing.assert_array_equal(peaks.reaching(least), np.flatnonzero(row >= least))


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 1000),
    n=SIZES,
    ties=st.booleans(),
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    changes=st.sampled_from(
        [
            {},
            {"top_k": 1},
            {"top_k": 512},
            {"typical_p": 0.5},
            {"top_p": 1.0, "min_p": 0.0},
            {"min_p": 1.0},
            {"xtc_probability": 1.0},
        ]
    ),
    forbidden=st.integers(0, 3),
)
def test_it_tells_the_law_of_the_row(
    seed: int, n: int, ties: bool, temperature: float, changes: dict[str, Any], forbidden: int
) -> None:
    row = random_row(seed, n, ties)
    bias = {int(token): -math.inf for token in np.argsort(-row)[:forbidden]}
    params = SamplingParams(temperature=temperature, logit_bias=bias, **changes)
    chain, short_chain = (SamplerChain(params, seed=1, tokens=[1, 2]) for _ in range(2))
    short = short_chain.short(row)
    assert isinstance(short, Shortlist)
    try:
        law = chain.law(row)
    except EngineError:
        with pytest.raises(EngineError):
            short_chain.law(short)
        return
    told = short_chain.law(short)
    assert told.ids.tolist() == law.ids.tolist()
    if (params.top_k or n) < n or chain.greedy:  # else the whole row is summed in another order
        assert told.probs.tobytes() == law.probs.tobytes()
    if len(short.ids) > 1:
        assert short_chain.gap == chain.gap


@pytest.mark.parametrize(
    "changes",
    [{"top_k": 0}, {"top_k": 1000}, {"repeat_penalty": 1.1}, {"logit_bias": {5: 1.0}}],
    ids=str,
)
def test_a_chain_that_could_pick_from_behind_it_reads_the_row(changes: dict[str, Any]) -> None:
    row = random_row(0, 4096, False)
    chain = SamplerChain(SamplingParams(**changes), tokens=[1])
    assert chain.reads is None
    assert chain.short(row) is row


@pytest.mark.parametrize(("temperature", "k"), [(0.0, FEW), (1.0, 40)])
def test_as_many_as_are_pushed_down_are_read_besides(temperature: float, k: int) -> None:
    bias = {token: -1.0 for token in range(7)}
    params = SamplingParams(temperature=temperature, logit_bias=bias)
    assert SamplerChain(params).reads == k + 7


@pytest.mark.parametrize("n", [300, 5000, 32_000])
def test_confidence_is_the_share_of_the_best(n: int) -> None:
    for seed in range(20):
        row = random_row(seed, n, False)
        whole = np.exp((row - row.max()).astype(np.float64)).sum()
        beside = np.sort(np.exp((row - row.max()).astype(np.float64)))[::-1][:40].sum()
        sure = confidence(row)
        assert sure == shortlist(row, 40).sure >= 1 / whole - 1e-6
        if n < 8192:
            assert sure == pytest.approx(1 / whole, rel=1e-5)
        else:
            assert sure == pytest.approx(1 / beside, rel=0.3)
    assert shortlist(short := shortlist(row), 3) is short


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_cannot_be_sampled_shows_it(bad: float) -> None:
    row = random_row(2, 5000, False)
    row[77] = bad
    short = shortlist(row)
    assert short.ids.tolist() == [77]
    assert confidence(short) == confidence(row) == 0.0
    for temperature in (0.0, 1.0):
        with pytest.raises(EngineError, match="cannot be sampled"):
            SamplerChain(SamplingParams(temperature=temperature)).law(short)

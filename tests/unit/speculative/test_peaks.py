"""The best of very many numbers are found without looking at each of them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specllama.arrays import Row
from specllama.errors import EngineError
from specllama.settings.params import SamplingParams
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.selection import Peaks, confidence

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


@pytest.mark.parametrize("n", [300, 5000, 32_000])
def test_confidence_is_the_share_of_the_best(n: int) -> None:
    for seed in range(20):
        row = random_row(seed, n, False)
        whole = np.exp((row - row.max()).astype(np.float64)).sum()
        beside = np.sort(np.exp((row - row.max()).astype(np.float64)))[::-1][:40].sum()
        sure = confidence(row)
        assert sure >= 1 / whole - 1e-6
        if n < 8192:
            assert sure == pytest.approx(1 / whole, rel=1e-5)
        else:
            assert sure == pytest.approx(1 / beside, rel=0.3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_cannot_be_sampled_shows_it(bad: float) -> None:
    row = random_row(2, 5000, False)
    row[77] = bad
    assert confidence(row) == 0.0
    for temperature in (0.0, 1.0):
        with pytest.raises(EngineError, match="cannot be sampled"):
            SamplerChain(SamplingParams(temperature=temperature)).law(row)

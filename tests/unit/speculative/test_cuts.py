"""A draw that a little rounding can change says so, whatever changes it."""

import dataclasses
import math

import numpy as np
import pytest

from specllama.settings.params import SamplingParams
from specllama.speculative.noise import draw
from specllama.speculative.rules import Walk, verify_match
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import EMPTY_DRAFT

OFF = SamplingParams(temperature=0.8, top_k=0, top_p=1.0, min_p=0.0)
CUTS = {
    "top-k": {"top_k": 12},
    "one": {"top_k": 1},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.2},
    "typical": {"typical_p": 0.8},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    "all": {"top_k": 30, "top_p": 0.95, "min_p": 0.05},
    "every one": {"top_k": 30, "typical_p": 0.9, "top_p": 0.95, "min_p": 0.05},
}
N_VOCAB, ROWS, MOVE = 200, 400, 1e-2


def drawn(row: np.ndarray, params: SamplingParams, seed: int) -> tuple[int, float]:
    chain = SamplerChain(params, seed=seed, tokens=[1, 2, 3])
    verdict = verify_match(EMPTY_DRAFT, Walk(row[None], chain), seed)
    assert verdict.target_token is not None
    return verdict.target_token, math.inf if verdict.gap is None else verdict.gap


@pytest.mark.parametrize("cuts", CUTS)
def test_a_token_that_rounding_changes_is_near_another(cuts: str) -> None:
    params = dataclasses.replace(OFF, **CUTS[cuts])
    rng = np.random.default_rng(5)
    changed, marked = 0, 0
    for seed in range(ROWS):
        row = (rng.normal(size=N_VOCAB) * rng.choice([0.3, 1.0, 3.0])).astype(np.float32)
        # neighbours closer than rounding, as flat rows of large vocabularies have them
        row += (np.argsort(np.argsort(row)) % 2 * 1e-4).astype(np.float32)
        token, gap = drawn(row, params, seed)
        for _ in range(3):
            moved = row + rng.uniform(-MOVE, MOVE, N_VOCAB).astype(np.float32)
            if drawn(moved, params, seed)[0] != token:
                changed += 1
                assert gap < 4 * MOVE, (seed, token, gap)
        marked += gap < 0.1
    assert changed > 0
    assert marked < 0.6 * ROWS, "a mark that is nearly everywhere says nothing"


def test_rows_that_are_certain_are_not_marked() -> None:
    row = np.zeros(N_VOCAB, np.float32)
    row[7] = 30.0
    for cuts in CUTS.values():
        params = dataclasses.replace(OFF, **cuts)
        if params.xtc_probability == 0.0:
            token, gap = drawn(row, params, 3)
            assert token == 7
            assert gap > 1.0


@pytest.mark.parametrize("cuts", CUTS)
def test_what_a_row_was_cut_by_is_kept_as_it_was(cuts: str) -> None:
    """The slack is told by what the law began with, which the law must not have changed."""
    params = dataclasses.replace(OFF, **CUTS[cuts])
    rng = np.random.default_rng(7)
    for seed in range(40):
        row = rng.normal(0.0, 1.0, N_VOCAB).astype(np.float32)
        chain = SamplerChain(params, seed=seed, tokens=[1, 2, 3])
        token, _ = draw(chain.law(row), seed, chain.position)
        kept = chain.slack(token)
        chain._cut = None
        assert kept == chain.slack(token)


def test_near_tokens_are_looked_for_only_where_rounding_can_matter() -> None:
    row = np.linspace(3.0, 0.0, N_VOCAB, dtype=np.float32)
    row[:2] = 4.0, 3.999
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, top_k=1, top_p=1.0, min_p=0.0)
        slacks = []
        for measured in (True, False):
            walk = Walk(row[None], SamplerChain(params, seed=1), measured)
            law = walk.law(-1)
            assert law.ids.tolist() == [0]
            slacks.append(walk.slack(0))
        assert slacks == [pytest.approx(1e-3, rel=1e-3), math.inf]

"""The sampler chain against a slow, dense reference that follows llama.cpp's definitions."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specllama.arrays import IntArray, Row
from specllama.errors import EngineError, UsageError
from specllama.settings.params import SamplingParams
from specllama.speculative.noise import coin
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.selection import confidence
from specllama.speculative.types import Law

OFF = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


# -- the reference: whole vocabulary, float64, plain loops ----------------------------------------


def adjusted(
    row: Sequence[float], p: SamplingParams, history: Sequence[int], breakers: frozenset[int]
) -> list[float]:
    """Bias, penalties, DRY."""
    z = [float(x) for x in row]
    for token, bias in p.logit_bias.items():
        if 0 <= token < len(z):
            z[token] += bias
    window = (
        list(history) if p.repeat_last_n < 0 else list(history)[-p.repeat_last_n or len(history) :]
    )
    if p.repeat_last_n != 0:
        for token, count in Counter(window).items():
            if token < len(z):
                z[token] = (
                    z[token] * p.repeat_penalty if z[token] <= 0 else z[token] / p.repeat_penalty
                )
                z[token] -= count * p.frequency_penalty + p.presence_penalty
    if p.dry_multiplier > 0 and p.dry_penalty_last_n != 0:
        for token, length in repeats(p, history, breakers).items():
            if token < len(z):
                z[token] -= p.dry_multiplier * p.dry_base ** (length - p.dry_allowed_length)
    return z


def repeats(p: SamplingParams, history: Sequence[int], breakers: frozenset[int]) -> dict[int, int]:
    """For each token the longest end of the text that stood before an earlier copy of it."""
    text = list(history) if p.dry_penalty_last_n < 0 else list(history)[-p.dry_penalty_last_n :]
    # the end of the text up to the newest breaker is all that may repeat
    limit = 0
    while limit < len(text) and text[-1 - limit] not in breakers:
        limit += 1
    longest: dict[int, int] = {}
    for at in range(len(text)):
        n = 0
        while n < min(at, limit) and text[at - 1 - n] == text[len(text) - 1 - n]:
            n += 1
        if n >= p.dry_allowed_length and text[at] not in breakers:
            longest[text[at]] = max(longest.get(text[at], 0), n)
    return longest


def softmax(z: Sequence[float]) -> list[float]:
    top = max(z)
    w = [math.exp(x - top) for x in z]
    return [x / sum(w) for x in w]


def reference(
    row: Sequence[float],
    p: SamplingParams,
    *,
    history: Sequence[int] = (),
    breakers: frozenset[int] = frozenset(),
    allowed: Sequence[bool] | None = None,
    seed: int = 0,
) -> dict[int, float]:
    """token -> probability."""
    z = adjusted(row, p, history, breakers)
    if p.temperature == 0:  # greedy: no truncation, no XTC (llama.cpp would apply them)
        ids = [t for t in range(len(z)) if allowed is None or allowed[t]]
        return {min(ids, key=lambda t: (-z[t], t)): 1.0}
    kept = truncated(z, p, seed, len(history))
    if allowed is not None:
        inside = [t for t in kept if allowed[t]]
        if not inside:
            z = [x if ok else -math.inf for x, ok in zip(z, allowed, strict=True)]
            inside = truncated(z, p, seed, len(history))
        kept = inside
    probs = softmax([z[t] / p.temperature for t in kept])
    return {t: q for t, q in zip(kept, probs, strict=True) if q > 0}


def truncated(z: Sequence[float], p: SamplingParams, seed: int, position: int) -> list[int]:
    """Surviving ids, best first."""
    ids = sorted((t for t in range(len(z)) if z[t] > -math.inf), key=lambda t: (-z[t], t))
    if p.top_k > 0:
        ids = ids[: p.top_k]
    if p.typical_p < 1:
        probs = softmax([z[t] for t in ids])
        entropy = -sum(q * math.log(q) for q in probs if q > 0)
        order = sorted(
            range(len(ids)), key=lambda i: abs(-math.log(max(probs[i], 1e-300)) - entropy)
        )
        total, n = 0.0, 0
        for i in order:
            total += probs[i]
            n += 1
            if total >= p.typical_p - 1e-12:
                break
        ids = [ids[i] for i in sorted(order[:n])]
    if p.top_p < 1:
        total, n = 0.0, 0
        for q in softmax([z[t] for t in ids]):
            total += q
            n += 1
            if total >= p.top_p - 1e-12:
                break
        ids = ids[:n]
    if p.min_p > 0:
        edge = z[ids[0]] + math.log(p.min_p)
        ids = [t for t in ids if z[t] >= edge] if p.min_p < 1 else ids[:1]
    if p.xtc_threshold <= 0.5 and len(ids) > 1 and coin(seed, position) < p.xtc_probability:
        ids = ids[max(sum(q >= p.xtc_threshold for q in softmax([z[t] for t in ids])) - 1, 0) :]
    return ids


def law_of(
    row: Row,
    p: SamplingParams,
    *,
    history: Sequence[int] = (),
    breakers: frozenset[int] = frozenset(),
    allowed: Sequence[bool] | None = None,
    seed: int = 0,
) -> Law:
    before = row.copy()
    chain = SamplerChain(
        p,
        seed=seed,
        tokens=history,
        breakers=breakers,
        constraint=None if allowed is None else Mask(allowed),
    )
    law = chain.law(row)
    np.testing.assert_array_equal(row, before, "the row was changed")
    assert (np.diff(law.ids) > 0).all(), "ids ascend"
    assert law.probs.dtype == np.float64
    assert (law.probs > 0).all()
    assert math.isclose(law.probs.sum(), 1.0, abs_tol=1e-12)
    assert law.ids.dtype == np.int32
    return law


def agree(row: Row, p: SamplingParams, **options: Any) -> Law:
    law = law_of(row, p, **options)
    expected = reference(row.tolist(), p, **options)
    assert dict(zip(law.ids.tolist(), law.probs.tolist(), strict=True)) == pytest.approx(
        expected, rel=2e-5, abs=1e-12
    )
    return law


class Mask:
    """A grammar that allows fixed tokens, whatever came before."""

    def __init__(self, allowed: Sequence[bool]) -> None:
        self._allowed = np.array(allowed, np.bool_)
        self.accepted: list[int] = []

    def allowed(self, ids: IntArray) -> npt.NDArray[np.bool_]:
        keep: npt.NDArray[np.bool_] = self._allowed[ids]
        return keep

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    def fork(self) -> Mask:
        other = Mask(self._allowed.tolist())
        other.accepted = self.accepted.copy()
        return other

    def ahead(self, most: int, habits: object) -> list[tuple[int, float]]:
        return []


def random_row(seed: int, n: int = 50, scale: float = 3.0) -> Row:
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def logits(*values: float) -> Row:
    return np.array(values, np.float32)


# -- one sampler at a time -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.01},
        {"temperature": 0.7},
        {"temperature": 100.0},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 50},
        {"top_k": 51},
        {"top_p": 1e-6},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"min_p": 1e-9},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"typical_p": 0.01},
        {"typical_p": 0.5},
        {"typical_p": 0.99},
        {"xtc_probability": 1.0},
        {"xtc_probability": 1.0, "xtc_threshold": 0.02},
        {"xtc_probability": 1.0, "xtc_threshold": 0.6},
        {"logit_bias": {0: 5.0, 3: -math.inf, 700: 3.0, -1: 3.0}},
        {"repeat_penalty": 1.4},
        {"repeat_penalty": 0.7},
        {"frequency_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"presence_penalty": 1.5},
        {"repeat_penalty": 1.4, "repeat_last_n": 3},
        {"repeat_penalty": 1.4, "repeat_last_n": -1},
        {"repeat_penalty": 1.4, "repeat_last_n": 0},
        {"dry_multiplier": 1.0},
        {"dry_multiplier": 0.8, "dry_allowed_length": 1, "dry_base": 1.1},
        {"dry_multiplier": 1.0, "dry_penalty_last_n": 6},
        {"dry_multiplier": 1.0, "dry_penalty_last_n": 0},
    ],
    ids=lambda changes: ",".join(f"{k}={v}" for k, v in changes.items()) or "nothing",
)
def test_each_sampler_alone(changes: dict[str, Any]) -> None:
    p = dataclasses.replace(OFF, **changes)
    rng = np.random.default_rng(1)
    for seed in range(12):
        history = rng.integers(0, 6, 20).tolist()
        agree(random_row(seed), p, history=history, seed=seed)
        agree(random_row(seed, scale=0.3), p, history=history, seed=seed)
        agree(random_row(seed, scale=25.0), p, history=history, seed=seed)


small = st.floats(-20, 20, width=32).map(lambda x: round(x * 4) / 4)  # ties are common


@settings(max_examples=300, deadline=None)
@given(
    row=st.lists(st.one_of(small, st.just(-math.inf)), min_size=2, max_size=24).filter(
        lambda row: max(row) > -math.inf
    ),
    p=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
        top_k=st.integers(0, 25),
        top_p=st.sampled_from([0.05, 0.5, 0.8, 1.0]),
        min_p=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
        typical_p=st.sampled_from([0.2, 0.7, 1.0]),
        repeat_penalty=st.sampled_from([1.0, 1.5]),
        frequency_penalty=st.sampled_from([0.0, 0.25]),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        repeat_last_n=st.sampled_from([-1, 0, 3, 64]),
        dry_multiplier=st.sampled_from([0.0, 0.5]),
        dry_allowed_length=st.sampled_from([1, 2, 3]),
        dry_penalty_last_n=st.sampled_from([-1, 0, 5]),
        xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
        xtc_threshold=st.sampled_from([0.05, 0.3, 0.6]),
    ),
    history=st.lists(st.integers(0, 5), max_size=16),
    breakers=st.frozensets(st.integers(0, 5), max_size=1),
    forbidden=st.frozensets(st.integers(0, 23), max_size=12),
    seed=st.integers(0, 2**32),
)
def test_any_combination(
    row: list[float],
    p: SamplingParams,
    history: list[int],
    breakers: frozenset[int],
    forbidden: frozenset[int],
    seed: int,
) -> None:
    allowed = [t not in forbidden for t in range(len(row))]
    possible = any(ok and x > -math.inf for ok, x in zip(allowed, row, strict=True))
    z = np.array(row, np.float32)
    options: dict[str, Any] = {"history": history, "breakers": breakers, "seed": seed}
    if p.typical_p < 1.0:
        # equal distances to the entropy are ordered by rounding: take those from the test
        adjusted_row = [x for x in adjusted(row, p, history, breakers) if x > -math.inf]
        spread = np.sort(np.abs(-np.log(np.maximum(softmax(adjusted_row), 1e-300)) + 0))
        if (np.diff(spread) < 1e-9).any() or len(adjusted_row) < len(row):
            p = dataclasses.replace(p, typical_p=1.0)
    try:
        agree(z, p, **options)
        if possible:
            agree(z, p, allowed=allowed, **options)
        else:
            with pytest.raises(UsageError, match="grammar"):
                law_of(z, p, allowed=allowed, **options)
    except AssertionError:
        if not _on_an_edge(row, p, history, breakers):
            raise


def _on_an_edge(
    row: Sequence[float], p: SamplingParams, history: Sequence[int], breakers: frozenset[int]
) -> bool:
    """Whether a threshold is met to within rounding, so that float32 and float64 may part."""
    z = adjusted(row, p, history, breakers)
    for cut in (p.top_p, p.typical_p):
        if cut < 1:
            for k in (p.top_k, 0):
                ids = sorted(z, reverse=True)[: k or None]
                if np.abs(np.cumsum(softmax(ids)) - cut).min() < 1e-5:
                    return True
    if 0 < p.min_p < 1:
        return min([abs(x - max(z) - math.log(p.min_p)) for x in z if x > -math.inf]) < 1e-5
    return False


@pytest.mark.parametrize("repeat", [0.01, 1.1, 1.3, 3.7, 10.0])
@pytest.mark.parametrize("presence", [0.0, 0.1])
def test_a_penalty_rounds_as_float32_does(repeat: float, presence: float) -> None:
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, 20_000, dtype=np.uint32)  # subnormals among them
    row = bits.view(np.float32)
    row = np.append(row[np.isfinite(row) & (np.abs(row) < 1e36)], np.float32(-np.inf))
    factor = np.float32(repeat)
    expected = np.where(row <= 0, row * factor, row / factor)
    if presence:
        expected = expected - np.float32(presence)
    p = dataclasses.replace(OFF, repeat_penalty=repeat, presence_penalty=presence, repeat_last_n=-1)
    z = SamplerChain(p, tokens=list(range(len(row))) * 2)._adjusted(row)
    np.testing.assert_array_equal(z.view(np.uint32), expected.view(np.uint32))


def test_ties_at_the_edge_of_top_k_go_to_the_lowest_ids() -> None:
    row = logits(1, 5, 3, 3, 3, 3, 0)
    assert law_of(row, dataclasses.replace(OFF, top_k=3)).ids.tolist() == [1, 2, 3]
    assert law_of(logits(2, 2, 2, 2), dataclasses.replace(OFF, top_k=2)).ids.tolist() == [0, 1]
    assert law_of(logits(2, 2, 2, 2), dataclasses.replace(OFF, top_k=1)).ids.tolist() == [0]


def test_ties_at_the_edge_of_top_p_go_to_the_lowest_ids() -> None:
    p = dataclasses.replace(OFF, top_p=0.5)
    assert law_of(logits(0, 0, 0, 0), p).ids.tolist() == [0, 1]
    assert law_of(logits(-math.inf, 0, 0, 0, 0), p).ids.tolist() == [1, 2]


def test_greedy_takes_the_lowest_id_of_a_tie_and_reports_the_lead() -> None:
    chain = SamplerChain(SamplingParams(temperature=0.0))
    row = logits(1, 4, 2.5, 4)
    assert chain.law(row).ids.tolist() == [1]
    assert chain.gap == 0.0
    assert chain.law(logits(1, 4, 2.5, 3)).ids.tolist() == [1]
    assert chain.gap == 1.0
    frozen = logits(1, 4, 2.5, 3)
    frozen.flags.writeable = False
    assert chain.law(frozen).ids.tolist() == [1]
    assert chain.gap == 1.0
    assert chain.law(logits(3)).ids.tolist() == [0]
    assert chain.gap == math.inf
    assert chain.law(logits(3, -math.inf)).ids.tolist() == [0]
    assert chain.gap == math.inf
    sampled = SamplerChain(OFF)
    sampled.law(row)
    assert sampled.gap == math.inf


def test_greedy_is_the_limit_of_low_temperatures() -> None:
    for seed in range(20):
        row = random_row(seed)
        cold = law_of(row, dataclasses.replace(OFF, temperature=1e-3))
        greedy = law_of(row, dataclasses.replace(OFF, temperature=0.0))
        assert cold.ids[np.argmax(cold.probs)] == greedy.ids[0] == np.argmax(row)


def test_extreme_temperatures_and_logits_stay_silent() -> None:
    """No numpy warning ever: it would be printed across the terminal (warnings are errors here)."""
    row = logits(1e30, -1e30, 5e29, 0, -math.inf)
    for temperature in (1e-300, 1e-6, 1.0, 100.0):
        for changes in ({}, {"top_p": 0.9}, {"typical_p": 0.5}, {"min_p": 0.1}, {"top_k": 2}):
            p = dataclasses.replace(OFF, temperature=temperature, **changes)
            assert law_of(row, p).ids[0] == 0


def test_dry_penalties_never_overflow() -> None:
    p = dataclasses.replace(
        OFF, dry_multiplier=100.0, dry_base=100.0, dry_allowed_length=1, temperature=1.0
    )
    history = [1] * 200
    assert law_of(logits(0, 50, 0), p, history=history).ids.tolist() == [0, 2]
    only = law_of(logits(-math.inf, 50, -math.inf), p, history=history)
    assert only.ids.tolist() == [1], "a penalty is not a ban"


def test_large_biases_are_finite() -> None:
    law = law_of(logits(0, 0, 0), dataclasses.replace(OFF, logit_bias={1: 1e300, 2: -1e300}))
    assert law.ids.tolist() == [1]


# -- rows that cannot be sampled -----------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "row",
    [
        logits(0, math.nan, 1),
        logits(math.nan, math.nan),
        logits(0, math.inf, 1),
        logits(-math.inf, -math.inf),
        logits(math.nan, -math.inf),
    ],
    ids=["one nan", "all nan", "inf", "all forbidden", "nan and forbidden"],
)
def test_rows_that_cannot_be_sampled(row: Row, temperature: float) -> None:
    for changes in ({}, {"top_k": 1}, {"top_k": 2}, {"top_p": 0.5}, {"repeat_penalty": 1.1}):
        p = dataclasses.replace(OFF, temperature=temperature, **changes)
        with pytest.raises(EngineError):
            SamplerChain(p, tokens=[0, 1]).law(row)


def test_everything_forbidden_by_a_bias_says_so() -> None:
    p = dataclasses.replace(OFF, logit_bias={0: -math.inf, 1: -math.inf})
    with pytest.raises(UsageError, match="bias"):
        SamplerChain(p).law(logits(1, 2))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_whose_tokens_are_all_biased_away(temperature: float) -> None:
    p = dataclasses.replace(OFF, temperature=temperature, logit_bias={1: -math.inf})
    with pytest.raises(UsageError, match="bias"):
        law_of(logits(1, 2, 3), p, allowed=[False, True, False])


# -- state ---------------------------------------------------------------------------------------


def test_forks_are_independent() -> None:
    p = dataclasses.replace(OFF, repeat_penalty=1.5, dry_multiplier=1.0, xtc_probability=0.5)
    history = [1, 2, 3, 1, 2]
    chain = SamplerChain(p, seed=4, tokens=history, constraint=Mask([True] * 50))
    row = random_row(3)
    before = chain.law(row)
    fork = chain.fork()
    for token in (3, 1, 2, 9):
        fork.advance(token)
        fork.law(row)
    after = chain.law(row)
    np.testing.assert_array_equal(before.ids, after.ids)
    np.testing.assert_array_equal(before.probs, after.probs)
    assert (chain.position, fork.position) == (5, 9)
    assert isinstance(chain.constraint, Mask)
    assert isinstance(fork.constraint, Mask)
    assert (chain.constraint.accepted, fork.constraint.accepted) == ([], [3, 1, 2, 9])
    # and the other way round
    chain.advance(7)
    fresh = SamplerChain(p, seed=4, tokens=[*history, 3, 1, 2, 9])
    np.testing.assert_array_equal(fork.law(row).probs, fresh.law(row).probs)


@pytest.mark.parametrize("penalised", [False, True])
def test_advancing_is_the_same_as_starting_there(penalised: bool) -> None:
    p = dataclasses.replace(
        OFF,
        xtc_probability=0.5,
        repeat_penalty=1.3 if penalised else 1.0,
        dry_multiplier=1.0 if penalised else 0.0,
        repeat_last_n=5,
    )
    tokens = np.random.default_rng(0).integers(0, 8, 30).tolist()
    walking = SamplerChain(p, seed=2, tokens=tokens[:10])
    for i in range(10, 30):
        row = random_row(i)
        there = SamplerChain(p, seed=2, tokens=tokens[:i])
        np.testing.assert_array_equal(walking.law(row).probs, there.law(row).probs)
        assert walking.position == there.position == i
        walking.advance(tokens[i])


def test_an_empty_history_can_grow() -> None:
    """A fork of a chain that has seen nothing must not share its list."""
    chain = SamplerChain(dataclasses.replace(OFF, repeat_penalty=2.0))
    fork = chain.fork()
    fork.advance(1)
    np.testing.assert_array_equal(chain.law(logits(1, 1)).probs, [0.5, 0.5])
    assert fork.law(logits(1, 1)).probs[1] < 0.5


def test_a_stop_token_ends_the_grammar() -> None:
    mask = Mask([True, False, False])
    chain = SamplerChain(OFF, constraint=mask)
    chain.advance_committed(0, lambda t: t == 0)
    assert chain.constraint is None
    assert mask.accepted == []
    chain = SamplerChain(OFF, constraint=mask)
    chain.advance_committed(2, lambda t: t == 0)
    assert mask.accepted == [2]


def test_a_grammar_masks_the_survivors_first() -> None:
    """Masked survivors if there are any; otherwise the whole row is masked, then truncated."""
    p = dataclasses.replace(OFF, top_k=2)
    row = logits(5, 4, 3, 2)
    assert law_of(row, p, allowed=[False, True, True, True]).ids.tolist() == [1]
    assert law_of(row, p, allowed=[False, False, True, True]).ids.tolist() == [2, 3]
    greedy = dataclasses.replace(OFF, temperature=0.0)
    assert law_of(row, greedy, allowed=[False, False, True, True]).ids.tolist() == [2]


def test_a_forced_token_has_an_infinite_lead() -> None:
    """Only what the grammar allows can compete: a near-tie with a forbidden token is none."""
    chain = SamplerChain(SamplingParams(temperature=0.0), constraint=Mask([True, False, True]))
    assert chain.law(logits(5, 4.99, 1)).ids.tolist() == [0]
    assert chain.gap >= 1.0
    assert chain.law(logits(5, 4.99, 4.5)).ids.tolist() == [0]
    assert chain.gap == 0.5
    chain = SamplerChain(SamplingParams(temperature=0.0), constraint=Mask([False, True, False]))
    assert chain.law(logits(5, 4.99, 1)).ids.tolist() == [1]
    assert chain.gap == math.inf


# -- large vocabularies --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 40},
        {"top_k": 40, "top_p": 0.95, "min_p": 0.05},
        {"top_p": 0.9},
        {"min_p": 0.02},
        {"min_p": 1e-7},
        {"top_k": 1000, "typical_p": 0.9},
        {"top_p": 0.9, "xtc_probability": 1.0},
        {"temperature": 0.0},
        {"top_k": 20_000, "top_p": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [0.5, 3.0, 8.0])
def test_fast_paths_at_152_thousand_tokens(changes: dict[str, Any], scale: float) -> None:
    """Peaked and flat rows: the near-candidate shortcut changes nothing."""
    row = random_row(7, 151_936, scale)
    p = dataclasses.replace(OFF, **changes)
    law = law_of(row, p, seed=1)
    kept, probs = dense_reference(row, p)
    np.testing.assert_array_equal(law.ids, kept)
    np.testing.assert_allclose(law.probs, probs, rtol=1e-5)


@pytest.mark.parametrize("lead", [11.0, 13.0, 15.0])
@pytest.mark.parametrize(
    "changes", [{"top_p": 0.9}, {"top_p": 0.5}, {"min_p": 1e-6}, {"top_k": 40}], ids=str
)
def test_a_peak_over_a_heavy_tail(lead: float, changes: dict[str, Any]) -> None:
    """Far tokens that together outweigh the peak must not be forgotten by the shortcut."""
    row = random_row(8, 151_936, 0.1)
    row[77] = lead
    p = dataclasses.replace(OFF, **changes)
    law = law_of(row, p)
    kept, probs = dense_reference(row, p)
    np.testing.assert_array_equal(law.ids, kept)
    np.testing.assert_allclose(law.probs, probs, rtol=1e-5)


def dense_reference(row: Row, p: SamplingParams) -> tuple[IntArray, npt.NDArray[np.float64]]:
    """As ``truncated``, vectorised: everything sorted, nothing skipped."""
    z = row.astype(np.float64)
    order = np.lexsort((np.arange(len(z)), -z))
    if p.temperature == 0:
        return order[:1].astype(np.int32), np.ones(1)
    if p.top_k:
        order = order[: p.top_k]
    q = np.exp(z[order] - z[order[0]])
    q /= q.sum()
    if p.typical_p < 1:
        surprise = -np.log(q)
        near = np.argsort(np.abs(surprise - (q * surprise).sum()), kind="stable")
        n = int(np.searchsorted(np.cumsum(q[near]), p.typical_p - 1e-12)) + 1
        order = order[np.sort(near[:n])]
    elif p.top_p < 1:
        order = order[: int(np.searchsorted(np.cumsum(q), p.top_p - 1e-12)) + 1]
    if p.min_p:
        order = order[z[order] >= z[order[0]] + math.log(p.min_p)]
    if p.xtc_probability:
        q = np.exp(z[order] - z[order[0]])
        order = order[max(int((q / q.sum() >= p.xtc_threshold).sum()) - 1, 0) :]
    ids = np.sort(order)
    w = np.exp((z[ids] - z[ids].max()) / p.temperature)
    return ids.astype(np.int32), w / w.sum()


def test_confidence_is_the_probability_of_the_best_token() -> None:
    for seed in range(10):
        row = random_row(seed, 300)
        assert confidence(row) == pytest.approx(max(softmax(row.tolist())), rel=1e-3)
    assert confidence(logits(0, -math.inf)) == 1.0
    for bad in (logits(math.nan, 1), logits(math.inf, 1), logits(-math.inf, -math.inf)):
        assert confidence(bad) == 0.0

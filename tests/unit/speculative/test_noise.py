"""The common noise: exponential, independent over (seed, position, token), and a good coupling."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Toy, ToyWalk, emitted

from specllama.arrays import FloatArray
from specllama.settings.params import SamplingParams
from specllama.speculative import noise
from specllama.speculative.noise import _key, coin, draw, exp_noise, reply_position
from specllama.speculative.rules import verify_match
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import Draft, Law

Z = 4.75  # normal quantile of 1 - 1e-6


def chi_square_limit(freedom: int) -> float:
    """The 1 - 1e-6 quantile (Wilson and Hilferty)."""
    c = 2 / (9 * freedom)
    return freedom * (1 - c + Z * math.sqrt(c)) ** 3


def chi_square(counts: FloatArray, p: FloatArray) -> float:
    expected = counts.sum() * p
    return float(((counts - expected) ** 2 / expected).sum())


def law_of(*p: float) -> Law:
    return Law(np.arange(len(p), dtype=np.int32), np.array(p) / sum(p))


def test_noise_is_a_pure_function_of_seed_position_and_token() -> None:
    ids = np.array([5, 0, 151_935], np.int32)
    noise = exp_noise(3, 17, ids)
    np.testing.assert_array_equal(noise, exp_noise(3, 17, ids))
    np.testing.assert_array_equal(noise[::-1], exp_noise(3, 17, ids[::-1].copy()))
    for changed in (exp_noise(4, 17, ids), exp_noise(3, 18, ids), exp_noise(3, 17, ids + 1)):
        assert not np.isclose(noise, changed).any()


def test_noise_never_changes_between_versions() -> None:
    """A seed that was written down must give the same text tomorrow."""
    golden = exp_noise(42, 7, np.array([0, 1, 2], np.int32))
    np.testing.assert_allclose(
        golden, [0.771194318272424, 0.8151841294260532, 0.05855165615605002], rtol=1e-12
    )
    assert coin(42, 7) == pytest.approx(0.44324767851439545, rel=1e-12)


def _unmix(x: int) -> int:
    """The inverse of splitmix64's finaliser."""
    mask = 2**64 - 1

    def unshift(y: int, by: int) -> int:
        out = y
        for _ in range(64 // by):
            out = y ^ (out >> by)
        return out

    x = unshift(x, 31) * pow(0x94D049BB133111EB, -1, 2**64) & mask
    x = unshift(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
    return unshift(x, 30)


@pytest.mark.parametrize("hashed", [0, 2**64 - 1])
def test_noise_is_positive_for_the_most_extreme_hashes(hashed: int) -> None:
    """With 53 bits the uniform of the largest hash would round up to 1, its noise to 0."""
    token = (_unmix(hashed) - _key(3, 5)) * pow(0x9E3779B97F4A7C15, -1, 2**64) % 2**64
    noise = exp_noise(3, 5, np.array([token], np.uint64))
    assert noise[0] == pytest.approx(-math.log1p(-(2.0**-53)) if hashed else 53 * math.log(2))


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 2**31])
def test_noise_is_finite_and_positive_at_the_edges(seed: int, position: int) -> None:
    noise = exp_noise(seed, position, np.arange(1000, dtype=np.int32))
    assert np.isfinite(noise).all()
    assert (noise > 0).all()
    assert 0.0 < coin(seed, position) < 1.0


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
def test_noise_is_standard_exponential_along_every_axis(axis: str) -> None:
    n = 10_000
    if axis == "token":
        noise = exp_noise(1, 1, np.arange(n, dtype=np.int32))
    else:
        one = np.array([11], np.int32)
        keys = ((1, i) if axis == "position" else (i, 1) for i in range(n))
        noise = np.concatenate([exp_noise(s, p, one) for s, p in keys])
    # Kolmogorov-Smirnov at 1e-6, and no correlation between neighbours
    u = np.sort(1 - np.exp(-noise))
    assert np.abs(u - (np.arange(n) + 0.5) / n).max() < math.sqrt(math.log(2e6) / (2 * n)) + 1 / n
    for lag in (1, 2, 7):
        assert abs(np.corrcoef(noise[:-lag], noise[lag:])[0, 1]) < Z / math.sqrt(n)


def test_draws_follow_the_law_and_are_independent_of_each_other() -> None:
    """Chi-square of single draws over positions, of neighbouring pairs, and over seeds."""
    law = law_of(0.4, 0.3, 0.15, 0.1, 0.05)
    n = 10_000
    for tokens in ([draw(law, 5, i)[0] for i in range(n)], [draw(law, i, 5)[0] for i in range(n)]):
        counts = np.bincount(tokens, minlength=5).astype(float)
        assert chi_square(counts, law.probs) < chi_square_limit(4)
        pairs = np.array(tokens[:-1:2]) * 5 + np.array(tokens[1::2])
        counts = np.bincount(pairs, minlength=25).astype(float)
        assert chi_square(counts, np.outer(law.probs, law.probs).ravel()) < chi_square_limit(24)


def test_a_draw_looks_at_the_support_only() -> None:
    """Tokens outside the law change nothing: truncation keeps the winner if it survives."""
    full = law_of(0.5, 0.2, 0.2, 0.1)
    for position in range(300):
        winner, _ = draw(full, 9, position)
        for gone in range(4):
            keep = full.ids != gone
            if gone != winner:
                less = Law(full.ids[keep], full.probs[keep] / full.probs[keep].sum())
                assert draw(less, 9, position)[0] == winner


def test_lead_is_the_log_score_gap() -> None:
    law = law_of(0.5, 0.3, 0.2)
    for position in range(50):
        token, lead = draw(law, 2, position)
        scores = np.log(law.probs) - np.log(exp_noise(2, position, law.ids))
        first, second = np.sort(scores)[::-1][:2]
        assert token == int(np.argmax(scores))
        assert lead == pytest.approx(first - second)
        assert lead >= 0.0
    assert draw(Law.point(7), 2, 0) == (7, math.inf)


def test_a_tail_of_denormal_probabilities_warns_about_nothing() -> None:
    law = Law(np.arange(4, dtype=np.int32), np.array([1.0, 1e-310, 5e-324, 2e-308]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for position in range(50):
            token, lead = draw(law, 1, position)
            assert token == 0
            assert lead > 0.0


def test_gumbel_coupling_formula() -> None:
    """Draft and target agree with probability sum_x 1 / sum_y max(p_y/p_x, q_y/q_x)."""
    rng = np.random.default_rng(0)
    for _ in range(3):
        p, q = rng.dirichlet([0.6] * 6), rng.dirichlet([0.6] * 6)
        law_p, law_q = law_of(*p), law_of(*q)
        expected = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(6))
        n = 5000
        met = sum(draw(law_p, 1, i)[0] == draw(law_q, 1, i)[0] for i in range(n)) / n
        assert abs(met - expected) < Z * math.sqrt(expected * (1 - expected) / n)
        tv = 0.5 * np.abs(p - q).sum()
        assert expected >= (1 - tv) / (1 + tv) - 1e-12


def test_coin_is_uniform_and_apart_from_the_token_noise() -> None:
    n = 10_000
    coins = np.array([coin(3, i) for i in range(n)])
    counts = np.histogram(coins, 20, (0.0, 1.0))[0].astype(float)
    assert chi_square(counts, np.full(20, 0.05)) < chi_square_limit(19)
    noise = np.array([exp_noise(3, i, np.array([0], np.int32))[0] for i in range(n)])
    assert abs(np.corrcoef(coins, noise)[0, 1]) < Z / math.sqrt(n)


# -- same seed, same text -----------------------------------------------------------------------


def write(toy: Toy, seed: int, length: int, drafts: object = None) -> tuple[int, ...]:
    """Text of the toy under ``match``, with drafts from ``drafts(text)`` (None: plain)."""
    text: tuple[int, ...] = ()
    while len(text) < length:
        draft = drafts(text) if callable(drafts) else Draft()
        text += emitted(draft, verify_match(draft, ToyWalk(toy, draft, text), seed))
    return text[:length]


def test_any_draft_leaves_the_text_of_a_seed_unchanged() -> None:
    rng = np.random.default_rng(4)
    for seed in range(60):
        target, other = Toy(5, seed, zero=0.2), Toy(5, 500 + seed, zero=0.2)

        def drawn(text: tuple[int, ...], toy: Toy = other, seed: int = seed) -> Draft:
            out = text
            for _ in range(int(rng.integers(0, 5))):
                out += (draw(toy.law(out), seed, len(out))[0],)
            return Draft.chain(out[len(text) :], "toy")

        def random(text: tuple[int, ...]) -> Draft:
            n = int(rng.integers(0, 6))
            parents = tuple(int(rng.integers(-1, i)) if i else -1 for i in range(n))
            tokens = tuple(int(t) for t in rng.integers(0, 5, n))
            return Draft(tokens, parents, (None,) * n, (None,) * n, ("toy",) * n)

        plain = write(target, seed, 14)
        assert write(target, seed, 14, drawn) == plain
        assert write(target, seed, 14, random) == plain


@pytest.mark.parametrize("mistake", ["index in round", "one noise for all"])
def test_control_noise_with_the_wrong_key_changes_the_text(mistake: str) -> None:
    """Keyed by the index in the round, or reused over positions, the same harness sees it."""

    class Wrong(ToyWalk):
        @property
        def position(self) -> int:
            return len(self._passed) if mistake == "index in round" else 0

    def text_of(walk: type[ToyWalk], seed: int, k: int) -> tuple[int, ...]:
        target, other = Toy(5, seed), Toy(5, 500 + seed)
        text: tuple[int, ...] = ()
        while len(text) < 12:
            out = text
            for i in range(k):
                at = i if mistake == "index in round" else 0
                out += (draw(other.law(out), seed, at)[0],)
            draft = Draft.chain(out[len(text) :], "toy")
            text += emitted(draft, verify_match(draft, walk(target, draft, text), seed))
        return text[:12]

    if mistake == "index in round":
        # plain decoding draws index 0 again and again, drafts shift it: the texts part
        assert any(text_of(Wrong, seed, 3) != text_of(Wrong, seed, 0) for seed in range(20))
        assert all(text_of(ToyWalk, seed, 3) == text_of(ToyWalk, seed, 0) for seed in range(20))
    # and the law of a text is wrong: the second token depends on the noise of the first
    fair = Toy(5, 0, fixed=(0.2,) * 5)
    counts = np.zeros((2, 25))
    for row, walk in enumerate((ToyWalk, Wrong)):
        for seed in range(800):
            text: tuple[int, ...] = ()
            while len(text) < 2:
                text += emitted(Draft(), verify_match(Draft(), walk(fair, Draft(), text), seed))
            counts[row, text[0] * 5 + text[1]] += 1
    uniform = np.full(25, 0.04)
    assert chi_square(counts[0], uniform) < chi_square_limit(24) < chi_square(counts[1], uniform)


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 6.0])
@pytest.mark.parametrize("peak", [1.0, 1e6, 1e30])
def test_a_race_of_many_ends_as_if_all_were_timed(spread: float, peak: float) -> None:
    rng = np.random.default_rng(0)
    ids = np.arange(20_000, dtype=np.int32)
    for seed in range(6):
        weights = np.exp(rng.normal(0.0, spread, len(ids)))
        weights[rng.integers(len(ids))] *= peak
        law = Law(ids, weights / weights.sum())
        with np.errstate(over="ignore"):
            times = exp_noise(seed, 5 * seed, ids) / law.probs
        first, second = np.argsort(times)[:2]
        token, lead = draw(law, seed, 5 * seed)
        assert token == ids[first]
        assert lead == pytest.approx(float(np.log(times[second] / times[first])), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31),
    temperature=st.sampled_from([1e-3, 0.3, 0.7, 1.0, 1.5, 30.0]),
    n=st.integers(4_000, 9_000),
    kind=st.sampled_from(["spread", "ties", "all alike", "peaked", "forbidden"]),
)
def test_a_row_without_truncation_is_drawn_as_if_all_were_timed(
    seed: int, position: int, temperature: float, n: int, kind: str
) -> None:
    """Token for token what a law of every logit and a time for every token give."""
    row = np.random.default_rng(seed).normal(0.0, 2.2, n).astype(np.float32)
    if kind == "ties":
        row = np.round(row)
    elif kind == "all alike":
        row[:] = 3.0
    elif kind == "peaked":
        row[:2] += 18.0
    elif kind == "forbidden":
        row[row < 0.0] = -np.inf
    off = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
    law = SamplerChain(off, seed=seed).law(row)
    z = row.astype(np.float64)
    weights = np.exp((z - z.max()) / temperature)
    ids = np.flatnonzero(weights > 0.0)
    probs = (weights / weights.sum())[ids]
    np.testing.assert_array_equal(law.ids, ids)
    np.testing.assert_allclose(law.probs, probs, rtol=1e-12)
    with np.errstate(over="ignore"):
        times = exp_noise(seed, position, ids.astype(np.int32)) / probs
        first, second = np.argsort(times)[:2] if len(ids) > 1 else (0, 0)
        expected = float(np.log(times[second] / times[first])) if len(ids) > 1 else math.inf
    token, lead = draw(law, seed, position)
    assert token == ids[first]
    assert lead == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("chance", [1e-3, 0.02])
def test_a_race_ends_right_when_its_favourites_are_slow(chance: float) -> None:
    """Hashes at either end: the likeliest tokens late, an unlikely one with the least noise."""
    n, seed = 5_000, 3
    ids = np.arange(n, dtype=np.int32)
    for position in range(40):
        noise = exp_noise(seed, position, ids)
        weights = np.full(n, (1 - chance) / 40)
        weights[np.argsort(noise)[:-40]] = chance / n
        law = Law(ids, weights / weights.sum())
        times = noise / law.probs
        assert draw(law, seed, position)[0] == np.argmin(times)


def unmixed(x: int) -> int:
    """The number whose hash is ``x``."""
    for shift, factor in ((31, noise._MIX_2), (27, noise._MIX_1), (30, 1)):
        y = x
        for _ in range(64 // shift):
            y = x ^ (y >> shift)
        x = (y * pow(factor, -1, 1 << 64)) & noise._MASK
    return x


def test_no_noise_is_below_its_bound() -> None:
    least = -np.log((2**52 - 1 + 0.5) * 2.0**-52)
    assert noise._LEAST_NOISE * (1 - 1e-9) <= least <= noise._LEAST_NOISE * (1 + 1e-9)


@pytest.mark.parametrize("n", [5_000, 151_936, 262_144])
@pytest.mark.parametrize("temperature", [0.4, 0.8, 2.0])
@pytest.mark.parametrize("least", [False, True])
def test_a_token_far_below_wins_where_its_noise_lets_it(
    n: int, temperature: float, least: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token with the least noise, a hair this and that side of the winner's time; ``least``:
    with a hash of ones alone, the least that there is."""
    if least:
        key = (unmixed(noise._MASK) - 77 * noise._GOLDEN) & noise._MASK
        monkeypatch.setattr(noise, "_key", lambda seed, position: key)
    off = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
    rng = np.random.default_rng(n)
    for seed in range(4):
        row = rng.normal(-200.0 if least else -4.0, 0.3, n).astype(np.float32)
        row[rng.integers(100, n, 100)] = rng.normal(6.0, 1.0, 100)
        waits = exp_noise(seed, 9, np.arange(n, dtype=np.int32))
        luckiest = int(np.argmin(np.where(row < 0.0, waits, np.inf)))
        assert not least or (luckiest, waits[77]) == (77, pytest.approx(2.0**-53))
        row[luckiest] = -np.inf
        others = np.log(waits) - row.astype(np.float64) / temperature
        first = int(others.argmin())
        for move, winner in ((1e-3, luckiest), (-1e-3, first)):
            row[luckiest] = temperature * (np.log(waits[luckiest]) - others[first]) + move
            token, lead = draw(SamplerChain(off, seed=seed).law(row), seed, 9)
            assert token == winner
            assert 0.0 < lead < 3e-3 / temperature


def test_who_cannot_win_is_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    almost = noise._almost

    def counted(x: Any, shifted: Any) -> Any:
        hashed.append(len(x))
        return almost(x, shifted)

    monkeypatch.setattr(noise, "_almost", counted)
    off = SamplingParams(temperature=0.5, top_k=0, top_p=1.0, min_p=0.0)
    row = np.random.default_rng(1).normal(0.0, 1.0, 151_936).astype(np.float32)
    row[1_000:1_100] += 30.0
    law = SamplerChain(off, seed=1).law(row)
    for position in range(20):
        hashed.clear()
        assert 1_000 <= draw(law, 1, position)[0] < 1_100
        assert sum(hashed) < 10_000
    hashed.clear()
    exp_noise(1, 0, np.arange(100, dtype=np.int32))
    assert hashed == [100], "what is counted here is what hashes"


def test_two_that_are_nearly_even_are_timed_as_all_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rounding could tell the first from the second, the exact law does."""
    row = np.random.default_rng(3).normal(0.0, 2.0, 20_000).astype(np.float32)
    law = SamplerChain(SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)).law(row)
    right = draw(law, 5, 5)
    wrong = np.array([7, 8], np.int32), np.array([1.0, 1.0 + 1e-12])
    monkeypatch.setattr(noise, "_contenders", lambda *asked: wrong)
    assert draw(law, 5, 5) == pytest.approx(right, rel=1e-9)


def test_no_two_tokens_of_a_conversation_share_a_position() -> None:
    places = [reply_position(n, begun) for n in range(4) for begun in (0, 1, 2, 1_000_000)]
    assert len(set(places)) == len(places)
    assert reply_position(0, 7) == 7, "a raw text counts from its first token"
    assert reply_position(3, 5) + 1 == reply_position(3, 6)

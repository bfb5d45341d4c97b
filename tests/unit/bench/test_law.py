"""The test of a law: its bets are fair, it finds what is wrong, and it seldom cries wolf."""

from __future__ import annotations

import numpy as np
import pytest
from wrong_laws import SHAPES, World, apart, found, softmax, world, wrong

from specllama.bench.law import CAP, RIVALS, Habit, LawTest, Spot, bets, evidence, growth

N = 12


@pytest.fixture(scope="module")
def small() -> World:
    return world(3, positions=256)


def everything(seed: int = 0) -> tuple[np.ndarray, Spot]:
    """A law, and a spot for each token that can be drawn from it."""
    rng = np.random.default_rng(seed)
    p, q, habit = softmax(2.0 * rng.standard_normal((3, N)))
    return p, Spot(
        np.tile(p, (N, 1)),
        np.arange(N),
        0.7,
        draft=np.tile(q, (N, 1)),
        habit=np.tile(habit, (N, 1)),
        copied=np.full(N, 3),
    )


def mean_f(law: np.ndarray, spot: Spot, **allowed: float) -> np.ndarray:
    """[K, S] the mean of every bet's factor under ``law``, over its tokens and the coin."""
    coins = (np.arange(100) + 0.5) / 100
    fs = [np.exp(growth(*bets(spot, np.full(N, coin)), **allowed)) for coin in coins]
    return np.einsum("x,xks->ks", law, np.mean(fs, axis=0))


def test_every_bet_is_fair_under_the_plain_law() -> None:
    p, spot = everything()
    assert mean_f(p, spot) == pytest.approx(np.ones((len(RIVALS), 6)), abs=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_no_bet_gains_from_logits_that_are_off_by_the_slack(seed: int) -> None:
    p, spot = everything(seed)
    slack = 0.1
    ratios, _ = bets(spot, np.full(N, 0.5))
    for k in range(len(RIVALS)):  # the law that favours this bet most
        law = softmax(np.log(p) + slack * np.sign(ratios[:, k] - 1.0))
        assert mean_f(law, spot, slack=slack)[k].max() <= 1.0 + 1e-3
        assert mean_f(law, spot)[k].max() > 1.0 or np.allclose(ratios[:, k], 1.0)


def test_no_bet_gains_from_a_few_tokens_that_are_read_wrongly() -> None:
    p, spot = everything()
    stray = 0.05
    ratios, _ = bets(spot, np.full(N, 0.01))
    for k in range(len(RIVALS)):
        law = (1.0 - stray) * p
        law[np.argmax(ratios[:, k])] += stray
        assert mean_f(law, spot, stray=stray)[k].max() <= 1.0 + 1e-3


def test_a_ratio_is_cut_where_a_token_may_be_read_wrongly() -> None:
    gain = growth(np.array([1e9] * len(RIVALS)), np.ones(len(RIVALS)), stray=0.001)
    assert np.exp(gain).max() < CAP + 1e-9


def test_a_right_law_is_seldom_called_wrong(small: World) -> None:
    at, _ = found(small, small.plain, runs=200, most=150, seed=5)
    assert (at <= 150).sum() <= 2


def test_nor_where_our_own_logits_are_rounded_otherwise(small: World) -> None:
    how = {"runs": 50, "most": 150, "seed": 6, "rounding": 0.3}
    at, _ = found(small, small.plain, slack=0.3, **how)
    assert (at <= 150).sum() <= 1


@pytest.mark.parametrize("shape", SHAPES)
def test_a_wrong_law_is_found(small: World, shape: str) -> None:
    off = 0.08
    laws = wrong(small, shape, off)
    assert apart(small.plain, laws) == pytest.approx(off, rel=1e-3)
    at, by = found(small, laws, runs=4, most=3000, seed=7, slack=0.01)
    assert np.median(at) < 2000
    expected = {
        "drafts accepted too often": {"draft", "overlap"},
        "copies accepted too often": {"copied"},
        "noise": {"noise"},
        "residual not renormalised": {"habit"},
    }.get(shape)
    assert expected is None or sum(name in expected for name in by) >= 2


def test_a_law_that_is_further_off_is_found_sooner(small: World) -> None:
    near, far = (
        np.median(found(small, wrong(small, "noise", off), runs=8, most=3000, seed=8)[0])
        for off in (0.02, 0.2)
    )
    assert far < near / 3


def test_a_token_without_a_chance_ends_the_matter() -> None:
    p = np.array([0.5, 0.5, 0.0])
    test = LawTest()
    assert test.see(Spot(p, np.asarray(2)))
    assert (test.found_at, test.tokens) == (1, 1)
    assert not test.see(Spot(p, np.asarray(0))) or test.found_at == 1
    assert np.isfinite(test.most)


def test_what_was_shown_stays_shown() -> None:
    p = np.array([0.01, 0.99])
    test = LawTest()
    while not test.see(Spot(p, np.asarray(0))):
        pass
    at = test.found_at
    for _ in range(2000):
        test.see(Spot(p, np.asarray(1)))
    assert test.shown
    assert test.found_at == at
    assert test.tokens == 2000 + (at or 0)
    assert test.by in RIVALS


def test_evidence_is_the_mean_of_all_wealth() -> None:
    assert evidence(np.log(np.array([[1.0, 3.0], [0.0 + 1e-300, 8.0]]))) == pytest.approx(
        np.log(3.0)
    )


def test_a_habit_is_of_surprising_tokens() -> None:
    habit = Habit()
    assert habit.law(4) == pytest.approx([0.25] * 4)
    habit.note(2, 0.1)
    habit.note(1, 1.0)
    assert habit.law(4) == pytest.approx([0.125, 0.125, 0.625, 0.125])
    assert habit.law({"a": 0, 2: 1}, np.array([1.0, 3.0])) == pytest.approx([0.125, 0.875])

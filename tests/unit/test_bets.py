"""A draft model's guesses as bets on a credit."""

from __future__ import annotations

import math

import pytest

from specllama.speculative.bets import Bets
from specllama.speculative.calibrate import SourceState

V = [0.0, 1.0, 1.8, 2.55, 2.4, 3.25, 3.9, 4.8, 4.75]
STEP = 0.17
RICH = 1e6


def bets(purse: float = RICH, stake: float = RICH) -> Bets:
    return Bets(V, STEP, 1.0, purse=purse, stake=stake, most=7, spent=STEP)


@pytest.fixture
def state() -> SourceState:
    state = SourceState()
    state.mean_next = 0.9
    return state


def mean_gain(a: float, length: int) -> float:
    """Tokens that so many guesses give on average, less what they cost once the first is seen."""
    tokens = sum(a * 0.9**i for i in range(length))
    return tokens - ((length - 1) * STEP + V[length + 1] - V[1])


def test_far_from_ruin_a_bet_is_worth_its_mean(state: SourceState) -> None:
    for a in (0.5, 0.8, 0.95):
        best = max(mean_gain(a, n) for n in range(1, 8))
        assert bets().gain(state, a) == pytest.approx(best, abs=1e-3)


def test_near_ruin_the_logarithm_decides(state: SourceState) -> None:
    assert bets().gain(state, 0.85) > 0.5
    gains = [bets(purse, purse).gain(state, 0.85) for purse in (2.0, 4.0, 8.0, 100.0)]
    assert gains == sorted(gains)
    assert gains[0] < 0.05


def test_the_gain_is_the_expected_logarithm_of_what_is_left(state: SourceState) -> None:
    """Every outcome of a round whose first two guesses are sent, enumerated."""
    purse, a = 5.0, 0.8
    round_ = bets(purse, purse)
    round_.send(0.9)
    round_.send(0.7)
    round_.spent = 3 * STEP

    def expected(more: int) -> float:
        cost = (3 + max(more - 1, 0)) * STEP + V[3 + more] - V[1]
        hits = [0.9, 0.7, a, *[0.9] * 4][: 2 + more]
        total, reached = 0.0, 1.0
        for accepted, hit in enumerate([*hits, 0.0]):
            total += reached * (1.0 - hit) * math.log(1.0 + (accepted - cost) / purse)
            reached *= hit
        return total

    best = max(expected(more) for more in (1, 2, 3, 4, 5))
    assert round_.gain(state, a) == pytest.approx(purse * (best - expected(0)))


def test_no_draft_goes_beyond_the_stake(state: SourceState) -> None:
    assert bets(stake=1.0).gain(state, 0.99) == pytest.approx(mean_gain(0.99, 1), abs=1e-3)
    assert bets(stake=0.5).gain(state, 0.99) < 0.0
    assert bets(stake=0.5).look(state) == 0.0


def test_beside_a_copy_only_its_failures_count(state: SourceState) -> None:
    alone, beside = bets(), bets()
    beside.reached = [0.4]
    beside.taken = 2
    assert 0.0 < beside.gain(state, 0.95) < alone.gain(state, 0.95)


def test_a_promise_says_what_credit_it_takes(state: SourceState) -> None:
    poor = bets(1.0, 1.0)
    value, least = poor.promise(state, 0.2)
    assert value > 0.2 > poor.look(state)
    assert value == bets().promise(state, 0.2)[0]
    enough = bets(RICH, least + 1e-9)
    enough.spent = STEP
    assert enough.look(state) > 0.2
    assert bets(RICH, least - 1e-3).look(state) <= 0.2
    assert bets().promise(state, 1e3)[1] == 0.0


def test_a_sure_expense_is_dearer_the_more_of_the_purse_it_takes() -> None:
    purse = bets(10.0, 10.0)
    assert purse.dear(0.0) == 0.0
    assert purse.dear(0.1) == pytest.approx(0.1, rel=0.01)
    factors = [purse.dear(ms) / ms for ms in (1.0, 5.0, 9.0)]
    assert factors == sorted(factors)
    assert factors[-1] > 2.0


def test_what_is_needed_is_where_the_gain_turns(state: SourceState) -> None:
    needed = bets(8.0, 8.0).needed(state)
    assert bets(8.0, 8.0).gain(state, needed) == pytest.approx(0.0, abs=1e-6)
    assert bets(3.0, 3.0).needed(state) > needed

"""The ledger: who may lose what, and a sum that never exceeds the bound."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from specllama.speculative.policy.constants import BEHIND, EPSILON
from specllama.speculative.policy.ledger import Ledger

SOURCES = ("draft", "mixed", "eagle3", "lookahead")


@pytest.mark.parametrize("seed", range(30))
def test_the_sum_is_the_standing_and_never_above_the_bound(seed: int) -> None:
    """Whatever is booked: what was lost since the start is the first sum less the present one."""
    rng = random.Random(seed)
    ledger = Ledger()
    start = ledger.total
    assert start < BEHIND
    standing = 0.0
    for _ in range(400):
        source = rng.choice(SOURCES)
        if rng.random() < 0.5:
            ledger.earn(1, source)
            standing += EPSILON
        else:
            exploring = rng.random() < 0.3
            most = ledger.balance(source) if exploring else ledger.covers(source)
            assert most <= ledger.total + 1e-9
            steps = rng.uniform(-most, 0.5)
            ledger.book(source, steps, exploring=exploring)
            standing += steps
        # gains beyond the bound are not kept, so the true standing is at least as good
        assert -1e-9 <= ledger.total <= BEHIND + 1e-9
        assert ledger.total <= start + standing + 1e-9 or standing < 0.0
        assert all(own >= 0.0 for own in ledger.own.values())


def test_exploring_is_paid_from_the_sources_own_balance() -> None:
    ledger = Ledger()
    own, spare = ledger.balance("draft"), ledger.spare
    ledger.book("draft", -own, exploring=True)
    assert ledger.balance("draft") == 0.0
    assert ledger.spare == spare
    assert ledger.covers("draft") == spare  # where it promises a gain it may use the rest
    for _ in range(100):
        ledger.earn(1, "draft")
    assert ledger.balance("draft") == pytest.approx(EPSILON * 100 / 2)


def test_a_loss_where_a_gain_was_promised_is_paid_from_what_nobody_owns() -> None:
    ledger = Ledger()
    own = ledger.balance("draft")
    ledger.book("draft", -2.0)
    assert ledger.balance("draft") == own
    assert ledger.total == pytest.approx(Ledger().total - 2.0)
    ledger.book("draft", -100.0)  # a disturbed round: a debt, which is paid back whole
    assert ledger.balance("draft") == 0.0
    assert ledger.spare < 0.0
    assert ledger.covers("draft") == 0.0


def test_what_one_source_loses_no_other_may_lose_again() -> None:
    ledger = Ledger()
    for source in SOURCES:
        ledger.balance(source)
    lost = 0.0
    for source in SOURCES:
        lost += ledger.covers(source)
        ledger.book(source, -ledger.covers(source))
    assert lost == pytest.approx(Ledger().total)
    assert ledger.total == pytest.approx(0.0)


def test_gains_fill_a_sources_own_balance_first() -> None:
    ledger = Ledger()
    ledger.book("ngram", -ledger.covers("ngram"))
    ledger.book("ngram", 1.5)
    assert 0.0 < ledger.balance("ngram") < 1.0
    assert ledger.total == pytest.approx(1.5)
    ledger.book("ngram", 1e6)
    assert ledger.total == pytest.approx(BEHIND)


def test_a_source_in_debt_times_gets_no_money_that_is_not_there() -> None:
    ledger = Ledger()
    ledger.book("draft", -ledger.covers("draft") - 1.0)
    total = ledger.total
    assert ledger.balance("eagle3") == 0.0
    assert ledger.total == total


def test_a_lead_pays_for_what_could_not_be_foreseen_and_for_nothing_else() -> None:
    ledger = Ledger()
    ledger.book("draft", 1e6)
    full, lead = ledger.total, ledger.lead
    assert full == BEHIND
    assert lead == BEHIND
    ledger.book("draft", 0.5, overrun=3.0)  # of which the gain of that round is taken first
    assert ledger.total == pytest.approx(full)
    assert ledger.lead == pytest.approx(lead - 2.5)
    ledger.book("draft", -3.0)
    assert ledger.total == pytest.approx(full - 3.0)
    ledger.book("draft", 0.0, overrun=lead)
    assert ledger.lead == 0.0
    assert ledger.total == pytest.approx(full - 3.0 - 2.5)
    new = Ledger()
    assert new.lead == 0.0
    total = new.total
    new.book("draft", 1.0, overrun=4.0)
    assert new.total == pytest.approx(total - 3.0)


def test_it_is_kept() -> None:
    ledger = Ledger()
    ledger.book("draft", -3.0)
    ledger.balance("mixed")
    data = json.loads(json.dumps(msgspec.to_builtins(ledger)))
    assert msgspec.convert(data, Ledger) == ledger
    assert msgspec.convert({"spare": 1e9, "own": {"draft": 50.0}}, Ledger).total <= BEHIND
    for damage in ({"spare": None}, {"spare": "much"}, {"own": [1.0]}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**data, **damage}, Ledger)

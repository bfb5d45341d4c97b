"""What fixed draft lengths gain at given costs."""

from __future__ import annotations

import pytest

from specllama.gain import best_plan, cannot_gain, pays_above, plans, steady


def test_best_plan_against_the_closed_form() -> None:
    """Best k and its speed-up for iid acceptance and linear costs: Leviathan et al. 2023, Thm 3.8,
    worked out by hand for a few cells."""
    for alpha, step, slope, speed, length in (
        (0.7, 0.1, 0.03, 1.82, 4),
        (0.8, 0.05, 0.03, 2.67, 6),
        (0.5, 0.1, 0.55, 1.00, 0),
        (0.6, 0.0, 0.12, 1.60, 3),
    ):
        survival = steady(alpha, 29)
        verify = [0.0, *(1 + slope * (n - 1) for n in range(1, 31))]
        best = best_plan(survival, step, verify)
        assert best.length == length
        assert best.speed == pytest.approx(speed, abs=0.006)


def test_a_guess_pays_if_more_are_kept_than_it_costs_in_steps() -> None:
    above = pays_above(1.0, 10.0, 2.0)
    assert above == pytest.approx(0.3)
    for acceptance, pays in ((above - 0.01, False), (above + 0.01, True)):
        assert (best_plan(steady(acceptance), 1.0, [0.0, 10.0, 12.0]).speed > 1.0) is pays


def test_no_gain_where_step_and_row_cost_a_plain_step() -> None:
    verify = [0.0, 1.0, 1.7, 2.4, 3.1]
    assert "cost 1.10 of a plain step" in cannot_gain(0.4, verify)
    assert cannot_gain(0.05, verify) == ""


def test_a_plan_pays_for_catching_up_after_full_acceptance() -> None:
    verify = [0.0, 10.0, 11.0, 12.0]
    found = plans([0.8, 0.5], 1.0, verify, 2.0)
    assert [plan.length for plan in found] == [1, 2]
    assert found[0].speed == pytest.approx(1.8 * 10 / (1 + 11 + 0.8 * 2))
    assert found[1].speed == pytest.approx(2.3 * 10 / (2 + 12 + 0.5 * 2))
    assert best_plan([0.8, 0.5], 1.0, verify, 2.0) == found[1]
    assert best_plan([0.1], 5.0, verify, 2.0).length == 0

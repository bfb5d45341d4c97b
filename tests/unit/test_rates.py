"""What fixed draft lengths gain at given costs."""

from __future__ import annotations

import pytest

from specllama.rates import fixed_speeds, pays_above, steady


def test_the_best_length_against_the_closed_form() -> None:
    """Best k and its speed-up for iid acceptance and linear costs: Leviathan et al. 2023, Thm 3.8,
    worked out by hand for a few cells."""
    for alpha, step, slope, speed, length in (
        (0.7, 0.1, 0.03, 1.82, 4),
        (0.8, 0.05, 0.03, 2.67, 6),
        (0.6, 0.0, 0.12, 1.60, 3),
    ):
        verify = [0.0, *(1 + slope * (n - 1) for n in range(1, 31))]
        speeds = fixed_speeds(steady(alpha, 29), step, verify)
        assert max(speeds, key=speeds.__getitem__) == length
        assert speeds[length] == pytest.approx(speed, abs=0.006)
    assert max(fixed_speeds(steady(0.5), 0.1, [0.0, 1.0, 1.55, 2.1]).values()) < 1.0


def test_a_guess_pays_if_more_are_kept_than_it_costs_in_steps() -> None:
    above = pays_above(1.0, 10.0, 2.0)
    assert above == pytest.approx(0.3)
    for acceptance, pays in ((above - 0.01, False), (above + 0.01, True)):
        assert (fixed_speeds(steady(acceptance), 1.0, [0.0, 10.0, 12.0])[1] > 1.0) is pays


def test_a_length_pays_for_catching_up_after_full_acceptance() -> None:
    found = fixed_speeds([0.8, 0.5], 1.0, [0.0, 10.0, 11.0, 12.0], 2.0)
    assert found == pytest.approx(
        {1: 1.8 * 10 / (1 + 11 + 0.8 * 2), 2: 2.3 * 10 / (2 + 12 + 0.5 * 2)}
    )

"""The cost table: what it believes, how it forgets, and the best fixed length at given costs."""

from __future__ import annotations

import json

import pytest

from specllama.speculative.cost import CostTable, best_plan, ceiling, expected_tokens, plans


def fed(costs: dict[int, float], times: int = 6) -> CostTable:
    table = CostTable()
    for _ in range(times):
        for rows, ms in costs.items():
            table.observe(rows, ms)
    return table


def test_the_first_pass_of_a_shape_does_not_count() -> None:
    table = CostTable()
    table.observe(1, 500.0)
    assert table.one is None
    table.observe(1, 20.0)
    assert table.one == 20.0
    assert table.measured


def test_measured_cells_are_believed_and_gaps_interpolated() -> None:
    table = fed({1: 10.0, 2: 15.0, 4: 21.0, 6: 40.0})
    assert table.ms(2) == pytest.approx(15.0)
    assert table.ms(4) == pytest.approx(21.0)
    assert table.ms(3) == pytest.approx(18.0)
    assert table.ms(5) == pytest.approx(30.5)
    assert table.ms(0) == 0.0
    assert table.upto(6) == pytest.approx([table.ms(n) for n in range(7)])


def test_a_cliff_is_kept_not_smoothed() -> None:
    """More rows may cost less (CUDA switches kernels): the table is never made monotone."""
    table = fed({1: 10.0, 8: 27.0, 9: 16.0})
    assert table.ms(9) < table.ms(8)


def test_full_kernel_groups_are_hoped_to_be_cheap() -> None:
    """Dear passes of two and three rows must not hide that four are cheaper."""
    table = fed({1: 10.0, 2: 17.0, 3: 25.0})
    assert table.ms(4) < table.ms(3)
    assert table.ms(5) > table.ms(3)


def test_drift_moves_the_level_not_the_ratios() -> None:
    table = fed({1: 10.0, 4: 20.0}, times=20)
    for _ in range(60):
        table.observe(1, 14.0)
    assert table.one == pytest.approx(14.0, rel=0.02)
    assert table.ratio(4) == pytest.approx(2.0, rel=0.02)


def test_one_outlier_moves_little() -> None:
    table = fed({1: 10.0, 4: 20.0}, times=20)
    table.observe(4, 200.0)
    table.observe(1, 100.0)
    assert table.ms(1) < 10.7
    assert table.ms(4) < 22.5


def test_slowed_first_passes_are_seen_through() -> None:
    """A busy moment at the start must not become the yardstick."""
    table = CostTable()
    for ms in (99.0, 40.0, 40.0, 40.0):
        table.observe(1, ms)
    assert table.known(1)
    for _ in range(3):
        table.observe(2, 16.0)
    assert table.one == pytest.approx(20.0)  # two rows took 16: one cannot take 40
    table.observe(1, 10.0)
    assert table.one == pytest.approx(10.0, rel=0.01)
    assert table.ms(2) == pytest.approx(16.0, rel=0.01)
    again = CostTable.from_dict(json.loads(json.dumps(table.to_dict())))
    again.observe(1, 60.0)
    assert again.one == pytest.approx(10.0, rel=0.05)


def test_the_first_wide_pass_of_a_process_is_not_believed_to_be_dear() -> None:
    """It loads what later ones find loaded; what looks too dear is never read again."""
    table = CostTable(hopeful=False)
    table.guess(4.0)
    table.observe(24, 700.0)
    assert table.ms(24) <= 12 * 4.0
    for _ in range(4):
        table.observe(1, 4.0)
    table.observe(24, 22.0)
    assert table.ms(24) == pytest.approx(22.0)
    data = json.loads(json.dumps(table.to_dict()))
    data["cells"]["24"] = [120.0, 1]
    assert CostTable.from_dict(data).ms(24) < 24 * 4.0


def test_wide_passes_share_cells() -> None:
    table = fed({1: 2.0, 100: 20.0})
    assert table.ms(96) < table.ms(100) <= table.ms(128)
    assert table.ms(10_000) > table.ms(512)


def test_a_prior_gives_way_to_a_measurement() -> None:
    table = CostTable()
    table.guess(3.0)
    assert table.one == 3.0
    assert not table.measured
    for _ in range(3):
        table.observe(1, 9.0)
    table.guess(3.0)
    assert table.one == 9.0


def test_round_trip_and_damage() -> None:
    table = fed({1: 10.0, 2: 15.0, 16: 55.0})
    data = json.loads(json.dumps(table.to_dict()))
    again = CostTable.from_dict(data)
    assert again.upto(17) == pytest.approx(table.upto(17), rel=1e-3)
    for damage in (
        {**data, "level_ms": -1.0},
        {**data, "slope": float("nan")},
        {**data, "cells": {"2": [0.0, 3]}},
        {**data, "cells": {"0": [1.0, 3]}},
        {**data, "cells": {"20": [1.0, 3]}},
        {"slope": 0.1},
    ):
        with pytest.raises((ValueError, TypeError, KeyError)):
            CostTable.from_dict(damage)


def test_best_plan_against_the_closed_form() -> None:
    """Best k and its speed-up for iid acceptance and linear costs: Leviathan et al. 2023, Thm 3.8,
    worked out by hand for a few cells."""
    for alpha, step, slope, speed, length in (
        (0.7, 0.1, 0.03, 1.82, 4),
        (0.8, 0.05, 0.03, 2.67, 6),
        (0.5, 0.1, 0.55, 1.00, 0),
        (0.6, 0.0, 0.12, 1.60, 3),
    ):
        survival = [alpha**i for i in range(1, 30)]
        verify = [0.0, *(1 + slope * (n - 1) for n in range(1, 31))]
        best = best_plan(survival, step, verify)
        assert best.length == length
        assert best.speed == pytest.approx(speed, abs=0.006)


def test_expected_tokens_counts_the_target_token() -> None:
    assert expected_tokens([0.5, 0.25], 0) == 1.0
    assert expected_tokens([0.5, 0.25], 2) == 1.75


def test_no_gain_where_step_and_row_cost_a_plain_step() -> None:
    verify = [0.0, 1.0, 1.7, 2.4, 3.1]
    assert ceiling(0.97, 0.4, verify, 3) == 1.0
    assert ceiling(0.97, 0.05, verify, 3) > 1.1


def test_a_plan_pays_for_catching_up_after_full_acceptance() -> None:
    verify = [0.0, 10.0, 11.0, 12.0]
    found = plans([0.8, 0.5], 1.0, verify, 2.0)
    assert [plan.length for plan in found] == [1, 2]
    assert found[0].speed == pytest.approx(1.8 * 10 / (1 + 11 + 0.8 * 2))
    assert found[1].speed == pytest.approx(2.3 * 10 / (2 + 12 + 0.5 * 2))
    assert best_plan([0.8, 0.5], 1.0, verify, 2.0) == found[1]
    assert best_plan([0.1], 5.0, verify, 2.0).length == 0


def test_a_wider_pass_that_seemed_cheap_does_not_make_wide_ones_free() -> None:
    """The level was guessed too high: extrapolated downwards, reading a text would earn time."""
    table = CostTable(level_ms=1.2, slope=0.2, hopeful=False)
    for _ in range(4):
        table.observe(2, 1.1)
    assert table.ms(2) < table.ms(1)
    assert table.ms(20) > 1.2
    assert table.most(20) >= table.ms(20)


def test_the_most_that_an_untimed_pass_can_cost() -> None:
    table = CostTable(slope=0.1)
    table.set(1, 10.0)
    assert table.ms(4) == pytest.approx(13.0)
    assert table.most(4) == pytest.approx(40.0)
    table.set(4, 16.0)
    assert table.most(4) == pytest.approx(16.0)
    assert table.most(6) == pytest.approx(36.0)

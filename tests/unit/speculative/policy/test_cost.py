"""The cost table: what it believes, how it forgets, and what depth adds."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from specllama.speculative.policy.costs import CostTable


def kept(table: CostTable) -> dict[str, Any]:
    """As it is written to a profile and read again."""
    data: dict[str, Any] = json.loads(json.dumps(msgspec.to_builtins(table, str_keys=True)))
    return data


def read(data: dict[str, Any]) -> CostTable:
    return msgspec.convert(data, CostTable, str_keys=True)


def fed(costs: dict[int, float], times: int = 6) -> CostTable:
    table = CostTable()
    for _ in range(times):
        for rows, ms in costs.items():
            table.observe(rows, ms)
    return table


def test_work_beside_the_first_passes_is_seen_through() -> None:
    """Graphs, buffers, a busy moment; a lucky one is not the yardstick, either."""
    table = CostTable()
    for ms in (500.0, 20.0, 31.0, 22.0):
        table.observe(1, ms)
    assert table.level == 22.0
    assert table.known(1)
    for ms in (90.0, 30.0, 34.0, 31.0):
        table.observe(2, ms)
    assert table.ms(2) == 31.0


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


def test_what_was_measured_at_rest_counts_where_nothing_was_timed() -> None:
    table = fed({1: 10.0, 2: 19.0})
    table.expect({2: 9.0, 5: 4.2})
    assert (table.ratio(2), table.ratio(5)) == (1.9, 4.2)
    cold = CostTable()
    cold.expect({4: 1.9})
    for ms in (60.0, 20.0, 21.0, 20.0):
        cold.observe(1, ms)
    assert cold.ms(4) == pytest.approx(38.0), "a slow first step changes no ratio"


def test_drift_moves_the_level_not_the_ratios() -> None:
    table = fed({1: 10.0, 4: 20.0}, times=20)
    for _ in range(60):
        table.observe(1, 14.0)
    assert table.level == pytest.approx(14.0, rel=0.02)
    assert table.ratio(4) == pytest.approx(2.0, rel=0.02)


def test_wide_passes_share_cells() -> None:
    table = fed({1: 2.0, 100: 20.0})
    assert table.ms(96) < table.ms(100) <= table.ms(128)
    assert table.ms(10_000) > table.ms(512)


def test_a_prior_gives_way_to_a_measurement() -> None:
    table = CostTable()
    table.guess(3.0)
    assert table.level == 3.0
    assert not table.seen(1)
    for _ in range(3):
        table.observe(1, 9.0)
    table.guess(3.0)
    assert table.level == 9.0


def test_what_is_kept_is_read_again_and_damage_refused() -> None:
    table = fed({1: 10.0, 2: 15.0, 16: 55.0})
    data = kept(table)
    assert read(data).upto(17) == pytest.approx(table.upto(17))
    for damage in (
        {**data, "level": -1.0},
        {**data, "deep": -1.0},
        {**data, "ratios": {"1": 1.0, "2": 0.0}},
        {**data, "ratios": {"2": 1.0}},
        {**data, "ratios": {"1": 1.0, "20": 2.0}},
        {**data, "counts": {"0": 3}},
    ):
        with pytest.raises(msgspec.ValidationError):
            read(damage)


def test_depth_is_told_from_drift() -> None:
    """Every reply is deeper from token to token, and the machine is now slower, now faster."""
    rng = random.Random(1)
    table = CostTable()
    for _ in range(12):
        start, load = rng.choice((50, 400, 900)), rng.choice((1.0, 1.1))
        for depth in range(start, start + 90):
            table.observe(1, load * (20.0 + 20.0 * depth / 1024) * rng.gauss(1.0, 0.03), depth)
        table.observe(4, load * (48.0 + 4 * 20.0 * depth / 1024), depth)
    assert table.ms(1, 1024) / table.ms(1, 0) == pytest.approx(2.0, abs=0.35)
    # a further row pays the attention again: at 1024 tokens 4 rows cost 128, not 96
    assert table.ms(4, 1024) / table.ms(1, 1024) == pytest.approx(3.2, abs=0.35)
    assert table.upto(4, 1024)[4] == pytest.approx(table.ms(4, 1024))


def test_without_a_slope_in_depth_there_is_none() -> None:
    rng = random.Random(2)
    table = CostTable()
    for depth in range(600):
        table.observe(1, 20.0 * rng.gauss(1.0, 0.05), depth)
    assert table.ms(1, 1024) < 1.25 * table.ms(1, 0)


def test_as_much_is_read_as_the_time_surely_allows() -> None:
    table = fed({1: 1.0, 16: 4.0, 64: 13.0})
    for ms in (0.5, 1.0, 2.0, 4.0, 9.9, 13.0):
        n = table.within(64, ms)
        assert n == max((m for m in range(1, 65) if table.most(m) <= ms), default=0)
    assert table.within(0, 5.0) == 0


def test_a_wider_pass_that_seemed_cheap_does_not_make_wide_ones_free() -> None:
    """The level was guessed too high: extrapolated downwards, reading a text would earn time."""
    table = CostTable(1.2)
    for _ in range(4):
        table.observe(2, 1.1)
    assert table.ms(2) < table.ms(1)
    assert table.ms(20) > 1.2
    assert table.most(20) >= table.ms(20)


def test_the_most_that_an_untimed_pass_can_cost() -> None:
    table = CostTable()
    table.set(1, 10.0)
    assert table.ms(4) == pytest.approx(14.5)
    assert table.most(4) == pytest.approx(40.0)
    table.set(4, 16.0)
    assert table.most(4) == pytest.approx(16.0)
    assert table.most(6) == pytest.approx(36.0)

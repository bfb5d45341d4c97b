"""Passes kept to widths in which every row has the same bits: pads, groups, what they cost.

The table model computes rows four at a time and what is left over one by one, as CPUs do K-quants:
a row depends on the width of its pass, on its place in it and on how many rows come out.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from engines import FakeContext
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool_machine import Alone, Machine
from table_model import FakePool, FakeTable

from specllama.backend.base import Part
from specllama.backend.exactness import Exactness, Group
from specllama.backend.probe import CELLS, WIDTHS, common, probe
from specllama.cli.options import GroupedCommand, resolve, settings_options
from specllama.engine.probing import steady
from specllama.errors import ContextFull, EngineError, UsageError
from specllama.settings.config_file import check
from specllama.settings.params import EngineOptions

V = 24
RUNS = int(os.environ.get("SPECLLAMA_POOL_RUNS", "60"))
TABLE = FakeTable(V, seed=3, order=6)
KEPT = [(4,), (8,), (4, 8, 12), (4, 8, 12, 16)]


def pool(kind: type[FakePool] = FakePool, **options: Any) -> FakePool:
    chosen = {"n_ctx": 160, "lanes": 4, "max_rows": 64, "max_leaves": 8, "by_four": True, **options}
    return kind(TABLE, **chosen)


def play(tested: FakePool, widths: Sequence[int], seed: int, steps: int) -> Machine:
    machine = Machine(tested, Alone(pool(lanes=1, widths=widths)), range(1, V))
    machine.play(seed, steps)
    return machine


# -- the laws of a pool --------------------------------------------------------------------------


@settings(max_examples=RUNS, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 60), widths=st.sampled_from(KEPT))
def test_every_row_is_that_of_its_lane_alone(seed: int, steps: int, widths: tuple[int]) -> None:
    assert play(pool(widths=widths), widths, seed, steps).wrong == 0


@settings(max_examples=RUNS // 3, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), widths=st.sampled_from(KEPT))
def test_passes_that_return_rows_have_one_of_the_widths(seed: int, widths: tuple[int]) -> None:
    tested = pool(widths=widths)
    seen: set[tuple[int, int]] = set()
    decode = tested.fake.decode

    def watched(*, tiled: bool) -> None:
        n = tested.fake.batch.n
        seen.add((n, int(tested.fake.batch.output[:n].sum())))
        decode(tiled=tiled)

    tested.fake.decode = watched  # type: ignore[method-assign]
    play(tested, widths, seed, 40)
    assert {n for n, rows in seen if rows} <= set(widths)
    assert all(rows in (0, n) for n, rows in seen), "all of them come out, or none"


class Quiet(FakePool):
    """Pads return no rows."""

    def run(self, parts: Sequence[Part]) -> None:
        asked, fake = sum(len(part.tokens) for part in parts), self.fake
        decode: Callable[..., None] = type(fake).decode

        def quiet(*, tiled: bool) -> None:
            fake.batch.output[asked : fake.batch.n] = 0
            decode(fake, tiled=tiled)

        fake.decode = quiet  # type: ignore[method-assign]
        super().run(parts)


class TooNarrow(FakePool):
    """The narrowest passes lack a row, unless it is asked for."""

    def keep_to(self, widths: Sequence[int], *, trees: bool) -> None:
        super().keep_to(widths, trees=trees)
        right, least = self.plan.rows, widths[0]
        self.plan.rows = lambda n, *at, **how: (  # type: ignore[method-assign]
            least - 1 if 0 < n < least else right(n, *at, **how)
        )


class Bare(FakePool):
    """No pads at all."""

    def keep_to(self, widths: Sequence[int], *, trees: bool) -> None:
        super().keep_to(widths, trees=trees)
        self.plan.rows = lambda n, *at, **how: n  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [Quiet, TooNarrow, Bare])
def test_pools_that_pad_wrongly_are_caught(kind: type[FakePool]) -> None:
    """Negative controls."""
    wrong = rows = 0
    for seed in range(4):
        machine = play(pool(kind, widths=(4, 8)), (4, 8), seed, 50)
        wrong, rows = wrong + machine.wrong, rows + machine.rows
    assert rows > 200
    assert wrong > rows / 20


def test_pads_leave_nothing_behind() -> None:
    tested = pool(widths=(8,), lanes=1)
    lane = tested.open()
    lane.forward([1, 2, 3], outputs="none")
    for n in (1, 3, 8, 1, 1):
        assert lane.forward([5] * n, outputs="all").shape == (n, V)
        assert len(lane.tokens) == lane.n_past == tested.held
    assert tested.fake.passes == [3, 8, 8, 8, 8, 8]
    assert (tested.ghosts, tested.compactions) == (0, 0)
    lane.close()
    assert tested.held == 0


def test_the_last_row_of_a_prompt_is_computed_in_a_pass_like_any_other() -> None:
    """However many states a drafter reads: they decide what else a pass returns."""
    tested = pool(widths=(4,))
    lane = tested.open()
    row = lane.forward([1, 2, 3, 4, 5, 6], outputs="last").copy()
    assert tested.fake.passes == [5, 4]
    lane.rollback(5)
    assert np.array_equal(lane.forward([6], outputs="all"), row)
    other = tested.open()
    other.capture("final_hidden")
    assert np.array_equal(other.forward([1, 2, 3, 4, 5, 6], outputs="last"), row)
    assert other.hidden.end - other.hidden.first == 1


def test_a_text_leaves_room_for_pads() -> None:
    tested = pool(widths=(4, 8), lanes=1, n_ctx=64)
    lane = tested.open()
    assert lane.n_ctx == tested.n_ctx == 64 - 3
    lane.forward([1] * 60, outputs="none")
    lane.forward([2], outputs="all")
    with pytest.raises(ContextFull):
        lane.forward([2], outputs="all")
    assert tested.fake.batch.position[3] == 63
    tested.settle()
    assert lane.n_past == tested.held == 61


def test_a_pass_is_no_wider_than_the_widest() -> None:
    tested = pool(widths=(4, 8))
    lane = tested.open()
    assert (lane.max_rows, tested.max_rows, tested.kernels.exact_rows) == (8, 8, 8)
    with pytest.raises(ValueError, match="at most 8 rows"):
        lane.forward([1] * 9, outputs="all")
    tested.keep_to((1, 2, 3), trees=False)
    assert (tested.max_leaves, tested.n_ctx) == (1, 160)


def test_rows_are_judged_over_as_many_cells_as_alone() -> None:
    """Where kernels choose by the cells that they look through, in steps of 256."""
    tested = pool(widths=(4, 8, 16), n_ctx=600)
    assert {tested.plan.rows_at(past) for past in range(500)} == {16}
    tested.kernels = replace(tested.kernels, any_width=False)
    cells = [-(-(past + 4) // 256) for past in range(540)]  # of a pass of one row
    for past in range(500):
        n = tested.plan.rows_at(past)
        assert -(-(past + next(w for w in (4, 8, 16) if w >= n)) // 256) == cells[past]
        assert {cells[past + i] for i in range(n)} == {cells[past]}
    assert [tested.plan.rows_at(past) for past in (0, 240, 241, 248, 250, 252, 253)] == [
        16, 13, 8, 5, 3, 1, 16,
    ]  # fmt: skip


# -- groups --------------------------------------------------------------------------------------


def look(**options: Any) -> Exactness:
    context = FakeContext(FakeTable(seed=1), n_ctx=CELLS, **options)

    def fill(copies: int) -> None:
        raise EngineError("no copies")

    return probe(context, None, fill, trained=CELLS, widths=WIDTHS)


def test_widths_whose_rows_agree_wherever_they_stand_are_found() -> None:
    found = look(by_four=True)
    assert [group.widths for group in found.groups] == [(1, 2, 3), (4, 8, 12, 16)]
    assert [group.trees for group in found.groups] == [False, True]
    assert found.rows == 3
    assert found.measured.endswith("; widths that agree: 1 to 3; 4, 8, 12 and 16")
    chains = look(by_four=True, max_leaves=1)
    assert [group.trees for group in chains.groups] == [False, False]


def test_where_every_width_is_alike_no_groups_are_looked_for() -> None:
    found = look()
    assert (found.rows, found.groups) == (65, ())
    assert found.keeping("on").label == "bitwise up to 65 rows"
    assert found.keeping("on").measured.endswith("--exact changes nothing here")


def test_costs_of_a_busy_moment_are_not_believed() -> None:
    turns = [
        [{1: one, 2: two, 4: four}] for one, two, four in ((10, 15, 16), (12, 18, 50), (10, 16, 16))
    ]
    assert steady(turns) == {1: 1.0, 2: 1.5}


def test_widths_must_agree_behind_every_text() -> None:
    assert common([[1, 2], [3, 4, 8]], [[1], [2], [3, 4], [8]]) == [(1,), (2,), (3, 4), (8,)]
    assert common([[1, 2, 4]], [[4, 8]]) == [(4,)]


FOUND = Exactness(
    rows=3,
    groups=(Group((1, 2, 3), ms=(1.0, 1.3, 1.6)), Group((4, 8, 16), trees=True, ms=(2, 2.2, 4))),
)


def test_the_group_of_the_least_price_is_kept() -> None:
    narrow, wide = FOUND.groups
    assert narrow.price == pytest.approx(1.3 / 1.5)
    assert wide.price == pytest.approx(2.2 / sum(1 / n for n in range(1, 9)))
    assert FOUND.keeping("on").kept == wide
    assert FOUND.keeping("off") == FOUND
    assert FOUND.keeping("on").label == "bitwise, constant widths 4, 8 and 16"
    dear = Exactness(rows=3, groups=(narrow, Group((4, 8), ms=(3.0, 6.0))))
    assert dear.keeping("on").label == "bitwise up to 3 rows"
    assert Exactness(why_not="no idea").keeping("on").kept == Group((1,))


def test_a_number_is_the_most_rows_of_a_pass() -> None:
    assert FOUND.keeping("8").kept == Group((4, 8), trees=True, ms=(2, 2.2))
    assert FOUND.keeping("4").label == "bitwise, constant width 4"
    assert FOUND.keeping("2").label == "bitwise up to 2 rows"
    with pytest.raises(UsageError, match="--exact 6") as refused:
        FOUND.keeping("6")
    assert refused.value.hint == "widths that agree here: 1 to 3; 4, 8 and 16"


# -- the option ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ((), "off"),
        (("--exact",), "on"),
        (("--exact", "8"), "8"),
        (("--exact=8",), "8"),
        (("--no-exact",), "off"),
        (("--exact", "--no-exact"), "off"),
    ],
)
def test_the_flag_takes_a_number_or_none(typed: tuple[str, ...], value: str) -> None:
    said: list[tuple[str, str]] = []

    @click.command(cls=GroupedCommand)
    @settings_options(only=("exact",))
    @click.argument("prompt")
    def command(prompt: str, **flags: Any) -> None:
        said.append((resolve(flags).engine_options().exact, prompt))

    result = CliRunner().invoke(command, [*typed, "Tell me"])
    assert result.exit_code == 0, result.output
    assert said == [(value, "Tell me")]


def test_files_may_say_it_as_a_switch() -> None:
    assert [check("exact", value) for value in (True, False, 8, "on")] == ["on", "off", "8", "on"]
    for wrong in ("1", "66", "yes", ""):
        with pytest.raises(UsageError, match="exact must be"):
            EngineOptions(exact=wrong)

"""The laws of a pool on the table model: order, books, refusals, and what would break them."""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool_machine import Alone, Machine
from table_model import FakePool, FakeTable

from specllama.arrays import HiddenNeed
from specllama.backend.base import Part
from specllama.backend.kernels import TILE
from specllama.cancel import Cancel
from specllama.errors import Cancelled, ContextFull, EngineError

V = 24
RUNS = int(os.environ.get("SPECLLAMA_POOL_RUNS", "60"))
TABLE = FakeTable(V, seed=3, order=6)


def pool(**options: object) -> FakePool:
    chosen = {"n_ctx": 160, "lanes": 4, "max_rows": 64, "max_leaves": 8, **options}
    return FakePool(TABLE, **chosen)  # type: ignore[arg-type]


def alone(*, tiles: bool = False, n_ctx: int = 160) -> Alone:
    return Alone(pool(lanes=1, tiles=tiles, n_ctx=n_ctx))


def play(machine: Machine, seed: int, steps: int) -> Machine:
    machine.play(seed, steps)
    return machine


@settings(max_examples=RUNS, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 60))
def test_every_row_is_that_of_its_lane_alone(seed: int, steps: int) -> None:
    assert play(Machine(pool(), alone(), range(1, V)), seed, steps).wrong == 0


@settings(max_examples=RUNS // 3, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 40))
def test_long_reads_among_others_are_those_of_a_lane_alone(seed: int, steps: int) -> None:
    machine = Machine(
        pool(n_ctx=600, tiles=True), alone(tiles=True, n_ctx=600), range(1, V), long=True
    )
    assert play(machine, seed, steps).wrong == 0


@settings(max_examples=RUNS // 3, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 60))
def test_a_pool_of_drafts_frees_its_cells(seed: int, steps: int) -> None:
    """Where order does not count: right rows, no ghosts, no compaction."""
    freeing = pool(in_order=False, by_order=False)
    machine = play(Machine(freeing, alone(), range(1, V)), seed, steps)
    assert (machine.wrong, freeing.ghosts) == (0, 0)


def test_a_pool_that_frees_where_order_counts_is_caught() -> None:
    """Negative control."""
    wrong = rows = 0
    for seed in range(6):
        machine = Machine(pool(in_order=False), alone(), range(1, V))
        play(machine, seed, 60)
        wrong, rows = wrong + machine.wrong, rows + machine.rows
    assert rows > 500
    assert wrong > rows / 20


def test_long_reads_that_ignore_where_cells_lie_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: read in tiles among others, in place."""
    monkeypatch.setattr(FakePool, "_read_apart", lambda self, piece: self._pass([piece], TILE))
    machine = Machine(
        pool(n_ctx=600, tiles=True), alone(tiles=True, n_ctx=600), range(1, V), long=True
    )
    assert play(machine, 1, 80).wrong > 0


@pytest.mark.parametrize(("n", "widths"), [
    (TILE - 1, [63]), (TILE, [64]), (TILE + 1, [64, 1]), (TILE + 14, [80, 1]), (TILE + 13, [76, 1]),
    (160, [160, 1]),
])  # fmt: skip
def test_a_nearly_full_group_of_rows_is_filled_and_given_up(n: int, widths: list[int]) -> None:
    """Products take 16 rows at once: 159 rows of a prompt of 160 tokens go as 160."""
    p = pool(tiles=True, n_ctx=200)
    a = p.open()
    text = [1 + i % 5 for i in range(n)]
    row = a.forward(text, outputs="last")[0].copy()
    assert p.fake.passes == widths
    assert (a.tokens, p.cells.held, p.cells.tail, a.n_past) == (text, n, n, n)
    assert a.read == ([(0, n - 1, TILE)] if n > TILE else [])
    expected = TABLE.row(text)
    if n > TILE:  # what tiles leave shows in it
        a.rollback(0)
        a.forward(text[:-1], outputs="none")
        expected = a.forward(text[-1:], outputs="last")[0]
    np.testing.assert_array_equal(row, expected)


def test_guesses_that_fill_a_pass_leave_no_states() -> None:
    p = pool(tiles=True, n_ctx=200)
    a = p.open()
    a.capture((1, 2, 3))
    a.forward([1 + i % 5 for i in range(159)], outputs="none")
    assert p.fake.passes == [160]
    assert (kept := a.hidden.rows(0, 159)) is not None
    assert len(kept) == 159
    assert a.hidden.rows(0, 160) is None


def test_no_guess_is_added_where_there_is_no_room_for_it() -> None:
    p = pool(tiles=True, n_ctx=159)
    a = p.open()
    a.forward([1] * 159, outputs="none")
    assert (p.fake.passes, len(a.tokens)) == ([159], 159)


# -- room ---------------------------------------------------------------------------------------


def test_a_lane_alone_leaves_no_ghosts_behind_chains() -> None:
    p = pool()
    lane = p.open()
    for _ in range(30):
        lane.forward([1, 2, 3, 4], outputs="all")
        lane.rollback(len(lane.tokens) - 2)
        assert (p.ghosts, p.cells.tail, lane.runs) == (0, len(lane.tokens), 1)


def test_rejects_behind_the_last_living_cell_are_freed() -> None:
    """Rows lie depth first, so what two lanes reject gathers at the end."""
    p = pool()
    a, b = p.open(), p.open()
    p.run([Part(a, [1, 2, 3]), Part(b, [4, 5, 6])])
    assert a.places[:3].tolist() == [0, 2, 4]
    assert b.places[:3].tolist() == [1, 3, 5]
    assert (a.runs, b.runs) == (3, 3)
    a.rollback(1)
    b.rollback(1)
    assert (p.ghosts, p.cells.room) == (0, p.cells.n - 2)
    p.run([Part(a, [1, 2, 3]), Part(b, [4])])
    a.rollback(1)
    assert p.ghosts == 1, "b's token lies behind a's first reject"
    b.rollback(1)
    assert p.ghosts == 0, "nothing living is behind it any more"


def test_room_is_made_where_it_is_needed() -> None:
    p = pool(n_ctx=64)
    a, b = p.open(), p.open()
    for _ in range(40):
        p.run([Part(a, [1, 2, 3]), Part(b, [1, 2])])
        a.rollback(len(a.tokens) - 3)
        if len(b.tokens) > 20:
            b.rollback(4)
    full = p.cells.n - len(b.tokens)
    for _ in range(full - len(a.tokens)):
        a.forward([1], outputs="none")
    with pytest.raises(ContextFull):
        a.forward([1], outputs="none")
    assert (p.ghosts, p.cells.room) == (0, 0)


def test_forks_share_cells_and_part_ways() -> None:
    p = pool()
    a = p.open()
    a.forward([1, 2, 3, 4, 5, 6], outputs="none")
    b, c = p.fork(a, 4), p.fork(a, 6)
    assert p.cells.held == 6
    p.run(parts := [Part(a, [7]), Part(b, [7]), Part(c, [8])])
    rows = [part.rows.copy() for part in parts]
    assert p.cells.held == 9
    fresh = pool(lanes=1).open()
    for text, row in (([1, 2, 3, 4, 5, 6, 7], rows[0]), ([1, 2, 3, 4, 7], rows[1])):
        fresh.rollback(0)
        np.testing.assert_array_equal(fresh.forward(text, outputs="last"), row)
    a.close()
    assert (b.tokens, c.tokens) == ([1, 2, 3, 4, 7], [1, 2, 3, 4, 5, 6, 8])
    b.close()
    c.close()
    p.settle()
    assert p.cells.room == p.cells.n


@pytest.mark.parametrize("widths", [(), (1, 8)])
def test_a_fork_knows_how_its_part_was_read(widths: tuple[int, ...]) -> None:
    """A step behind a tile is read alike by no fresh reading, except in passes of fixed widths."""
    p = pool(n_ctx=600, n_batch=600, tiles=True, widths=widths)
    a, n = p.open(), 2 * TILE
    a.forward([1] * n, outputs="none")
    a.forward([2], outputs="all")
    ((first, end, way),) = a.read
    assert (first, end) == (0, n)
    for keep in (n - 1, n, n + 1):
        b = p.fork(a, keep)
        assert b.read == [(0, min(keep, n), way)]
        fresh = [p.exact_prefix(held, keep, 3 * n) for held in (a, b)]
        assert fresh == [keep if widths else min(keep, n)] * 2
        b.close()


# -- refusals: what llama.cpp would abort on ------------------------------------------------------


def test_more_lanes_than_there_are() -> None:
    p = pool(lanes=2)
    p.open()
    p.open()
    with pytest.raises(EngineError, match="2 lanes"):
        p.open()


def test_bad_passes_change_nothing() -> None:
    p = pool(lanes=3, n_batch=32, max_rows=8, max_leaves=4)
    a, b, other = p.open(), p.open(), pool().open()
    p.run([Part(a, [1, 2]), Part(b, [3])])
    bad: list[tuple[list[Part], type[Exception], str]] = [
        ([Part(a, []), Part(b, [1])], ValueError, "at least one"),
        ([Part(a, [1]), Part(a, [2])], ValueError, "one part"),
        ([Part(a, [1]), Part(other, [2])], EngineError, "another pool"),
        ([Part(a, [1]), Part(b, [V])], EngineError, "vocabulary"),
        ([Part(a, [1]), Part(b, [2**40])], EngineError, "vocabulary"),
        ([Part(a, [1] * 5), Part(b, [1] * 4)], ValueError, "8 rows"),
        ([Part(a, [1] * 20, "none"), Part(b, [1] * 13, "none")], ValueError, "32 tokens"),
        ([Part(a, [1, 2], "all", [-1])], ValueError, "parents"),
        ([Part(a, [1, 2], "all", [0, 0])], ValueError, "precede"),
        ([Part(a, [1, 2, 3, 4, 5, 6], "all", [-1, 0, 0, 0, 0, 0])], EngineError, "4 leaves"),
        ([Part(x, [1, 2, 3, 4], "all", [-1, 0, 0, 0]) for x in (a, b)], EngineError, "branches"),
    ]
    for parts, kind, message in bad:
        with pytest.raises(kind, match=message):
            p.run(parts)
        assert (a.tokens, b.tokens, p.ghosts, p.cells.held) == ([1, 2], [3], 0, 3)
    a.forward([1, 2, 3], outputs="all", parents=[-1, 0, 0])
    for call in (lambda: p.fork(a, 1), lambda: p.park(a), lambda: a.forward([1], outputs="all")):
        with pytest.raises(EngineError, match="settled"):
            call()
    a.keep_path([0, 2])
    assert p.fork(a, 4).tokens == [1, 2, 1, 3]
    p.close()
    for call in (p.open, lambda: a.rollback(0), lambda: p.run([Part(a, [1])])):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_a_stopped_pass_changes_no_lane() -> None:
    stop = Cancel()
    p = pool(stop=stop, tiles=True, n_ctx=512)
    a, b = p.open(), p.open()
    p.run([Part(a, [1, 2, 3]), Part(b, [4, 5])])
    stop.set()
    long = [1 + i % 5 for i in range(TILE + 3)]
    for part in (Part(a, long, "last"), Part(a, [1, 2], "all", [-1, -1]), Part(a, [3])):
        with pytest.raises(Cancelled):
            p.run([part, Part(b, [9])])
    stop.clear()
    assert (a.tokens, b.tokens, p.cells.held) == ([1, 2, 3], [4, 5], 5)
    assert (a.n_past, b.n_past) == (3, 2)
    p.run([Part(a, long, "last"), Part(b, [9])])


# -- hidden states --------------------------------------------------------------------------------


@pytest.mark.parametrize("need", ["final_hidden", (1, 2, 3)])
def test_states_belong_to_their_lanes(need: HiddenNeed) -> None:
    p = pool()
    a, b, c = p.open(), p.open(), p.open()
    a.capture(need)
    b.capture((1, 2, 3))
    p.run(parts := [Part(a, [1, 2, 3]), Part(b, [4, 5]), Part(c, [6], "last")])
    rows = [part.rows for part in parts]
    for lane, mine in ((a, rows[0]), (b, rows[1])):
        states = lane.hidden.rows(0, len(lane.tokens))
        np.testing.assert_array_equal(states, mine[:, : states.shape[1]])
    assert c.hidden.rows(0, 1) is None
    again = p.resume(p.park(a))
    assert again.hidden.rows(0, 3) is not None
    assert again.need == need

"""What a running state costs to set back, and that every row is that of its text."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from running import RunningFakePool
from table_model import FakeTable

from specllama.backend.base import Blob, Outputs, Part
from specllama.backend.lane import CellLane
from specllama.backend.parts import PassPart
from specllama.backend.recurrent_pool import SPREAD, TAIL, Checkpoint, Checkpoints, RunningPool
from specllama.errors import Cancelled, EngineError
from specllama.models import running_state
from specllama.text_history import common_prefix

TABLE = FakeTable(64, order=6)


def opened(planes: int) -> tuple[RunningFakePool, CellLane]:
    pool = RunningFakePool(TABLE, planes=planes)
    return pool, pool.open()


def is_right(lane: CellLane) -> bool:
    """Whether the next row is that of the text."""
    return bool(np.array_equal(lane.forward([7], outputs="all")[0], TABLE.row(lane.tokens)))


def play(planes: int, seed: int, steps: int = 150) -> int:
    """Random passes and cuts: how many rows are not those of their text."""
    rng = random.Random(seed)
    pool, lane = opened(planes)
    wrong = 0
    parked: list[Blob] = []
    for _ in range(steps):
        if rng.random() < 0.05:  # another text comes, perhaps one that was here before
            parked.append(pool.park(lane))
            assert not lane.tokens
            if rng.random() < 0.7:
                blob = rng.choice(parked)
                pool.resume(blob, lane)
                assert list(lane.tokens) == list(blob.tokens)
                keep = rng.randrange(len(lane.tokens) + 1)
                assert pool.exact_prefix(lane, keep, keep + 9) in (
                    pool.exact_prefix(blob, keep, keep + 9),
                    keep,
                )
        if len(lane.tokens) > 3000:
            lane.rollback(rng.randrange(3000))
        past, kinds = len(lane.tokens), ("all", "all", "all", "last", "none")
        outputs: Outputs = rng.choice(kinds)  # type: ignore[assignment]
        n = rng.choice((1, 1, 2, 4, 6, 12, 30)) if outputs == "all" else rng.randrange(1, 200)
        rows = lane.forward([rng.randrange(1, 64) for _ in range(n)], outputs=outputs)
        text = lane.tokens
        for i, row in enumerate(rows):
            end = past + 1 + i if outputs == "all" else past + n
            wrong += not np.array_equal(row, TABLE.row(text[:end]))
        while rng.random() < 0.6:
            deep = rng.choice((1, 2, 3, n, 9, 40, 400))
            keep = max(len(lane.tokens) - deep, 0)
            assert 0 <= lane.reusable_prefix(keep) <= keep
            lane.rollback(keep)
            if rng.random() < 0.3:
                assert lane.n_past == keep
    return wrong


@pytest.mark.parametrize("planes", [0, 3, 8])
@pytest.mark.parametrize("seed", range(8))
def test_every_row_is_that_of_its_text(planes: int, seed: int) -> None:
    assert play(planes, seed) == 0


def play_together(planes: int, seed: int, steps: int = 70) -> tuple[int, RunningFakePool]:
    """Ragged passes of several lanes, cuts, parked and forked texts: rows that are wrong."""
    rng = random.Random(seed)
    pool = RunningFakePool(TABLE, planes=planes, lanes=4)
    lanes = [pool.open() for _ in range(4)]
    parked: list[Blob] = []
    wrong = 0
    for _ in range(steps):
        some = rng.sample(lanes, rng.randrange(1, 5))
        if rng.random() < 0.1:
            one, other = rng.sample(lanes, 2)
            parked.append(pool.park(one))
            if rng.random() < 0.5:
                keep = rng.randrange(len(other.tokens) + 1)
                pool.fork(other, keep, one)
                assert list(one.tokens) == list(other.tokens)[:keep]
            else:
                pool.resume(rng.choice(parked), one)
        reads = rng.random() < 0.2
        outputs: Outputs = "none" if reads else "all"
        parts = [
            Part(lane, [rng.randrange(1, 64) for _ in range(rng.choice((1, 1, 2, 3, 8)))], outputs)
            for lane in some
        ]
        past = [len(lane.tokens) for lane in some]
        pool.run(parts)
        for part, begin in zip(parts, past, strict=True):
            assert len(part.lane.tokens) == begin + len(part.tokens)
            for i, row in enumerate(part.rows):
                wrong += not np.array_equal(row, TABLE.row(part.lane.tokens[: begin + 1 + i]))
            if rng.random() < 0.6:
                part.lane.rollback(len(part.lane.tokens) - rng.randrange(len(part.tokens) + 1))
        if rng.random() < 0.1:
            lane = rng.choice(lanes)
            lane.rollback(rng.randrange(len(lane.tokens) + 1))
        if rng.random() < 0.2:
            assert all(lane.n_past == len(lane.tokens) for lane in lanes)
    return wrong, pool


@pytest.mark.parametrize("planes", [0, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_lanes_share_passes_and_nothing_else(planes: int, seed: int) -> None:
    wrong, pool = play_together(planes, seed)
    assert wrong == 0
    assert pool.fake.shared > 10


def test_planes_of_a_state_that_was_moved_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a pass of others may move a state, and its planes stay behind."""
    at_once = RunningPool._pass_at_once

    def keeps(self: RunningPool, pieces: Sequence[PassPart], way: int) -> None:
        before = {sequence: one.depth for sequence, one in self._of.items()}
        at_once(self, pieces, way)
        mine = {piece.lane.sequence for piece in pieces}
        for sequence in self._of.keys() - mine:
            self._of[sequence].depth = before[sequence]

    monkeypatch.setattr(RunningPool, "_pass_at_once", keeps)
    assert any(play_together(8, seed)[0] for seed in range(8))


def test_parts_are_made_alike_where_planes_take_the_rest_back() -> None:
    for planes, passes in ((4, [12]), (0, [1, 4, 1])):
        pool = RunningFakePool(TABLE, planes=planes, lanes=3)
        lanes = [pool.open() for _ in range(3)]
        parts = [Part(lane, [5] * n, "all") for lane, n in zip(lanes, (1, 4, 1), strict=True)]
        pool.run(parts)
        assert [len(part.rows) for part in parts] == [1, 4, 1]
        assert pool.fake.passes == passes
        assert [len(lane.tokens) for lane in lanes] == [1, 4, 1]
        assert all(is_right(lane) for lane in lanes)


def test_a_part_that_fails_leaves_the_other_texts() -> None:
    pool = RunningFakePool(TABLE, planes=2, lanes=3)
    lanes = [pool.open() for _ in range(3)]
    for n, lane in enumerate(lanes):
        lane.forward([3 + n] * 50, outputs="last")
    pool.fake.broken = EngineError("no")
    with pytest.raises(EngineError):
        pool.run([Part(lane, [1, 2], "all") for lane in lanes[:2]])
    for n, lane in enumerate(lanes):
        assert list(lane.tokens) == [3 + n] * 50
        assert is_right(lane)


def test_planes_that_were_never_written_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a short pass leaves the planes of an older one, and llama.cpp says so to
    nobody."""

    def forgotten(self: RunningPool, lane: CellLane, n: int, *, reading: bool) -> None:
        mine = self._of[lane.sequence]
        mine.depth, mine.goes_on, mine.guesses = self.cache.planes, reading, False

    monkeypatch.setattr(RunningPool, "_passed", forgotten)
    assert sum(play(8, seed) for seed in range(8)) > 0


def test_a_cut_within_the_planes_costs_nothing() -> None:
    pool, lane = opened(4)
    lane.forward(list(range(1, 31)), outputs="none")
    lane.forward([1, 2, 3, 4, 5], outputs="all")
    passes = len(pool.fake.passes)
    lane.rollback(31)
    assert lane.n_past == 31
    assert len(pool.fake.passes) == passes
    assert pool.fake.saved == pool.fake.restored == 0
    assert is_right(lane)


def test_two_cuts_before_a_pass_are_one() -> None:
    pool, lane = opened(4)
    lane.forward([1, 2, 3, 4, 5], outputs="all")
    lane.rollback(4)
    lane.rollback(2)
    assert is_right(lane)
    assert pool.fake.passes == [5, 1]


def test_a_second_cut_goes_back_to_a_checkpoint() -> None:
    pool, lane = opened(4)
    lane.forward(list(range(1, 21)), outputs="none")
    lane.forward([1, 2], outputs="last")  # leaves a checkpoint behind 20
    lane.forward([1, 2, 3, 4, 5], outputs="all")
    lane.rollback(25)
    assert lane.n_past == 25  # carried out
    assert lane.reusable_prefix(24) == 20
    lane.rollback(24)
    assert pool.fake.restored == 1
    assert pool.fake.passes[-1] == 4  # 20 to 24 again, at once
    assert is_right(lane)


def test_a_cut_deeper_than_the_planes_goes_back_to_a_checkpoint() -> None:
    pool, lane = opened(2)
    lane.forward([9] * 20, outputs="none")
    lane.forward([1, 2, 3, 4, 5], outputs="all")
    assert pool.fake.saved == 1  # the pass was wider than the planes go
    lane.rollback(21)
    assert pool.fake.restored == 1
    assert pool.fake.passes[-1] == 1
    assert is_right(lane)


def test_of_a_divided_pass_nothing_is_taken_back() -> None:
    pool, lane = opened(4)
    pool.fake.undivided = 8
    lane.forward([9] * 20, outputs="none")
    lane.forward([1] * 9, outputs="none")
    assert lane.reusable_prefix(28) == 0
    lane.rollback(28)
    assert pool.fake.passes[-1] == 28
    assert is_right(lane)


@pytest.mark.parametrize("planes", [0, 4])
def test_single_rows_leave_no_checkpoint(planes: int) -> None:
    pool, lane = opened(planes)
    for token in range(1, 20):
        lane.forward([token], outputs="all")
    assert pool.fake.saved == 0


def test_a_turn_goes_on_from_where_the_last_one_differs() -> None:
    pool, lane = opened(4)
    prompt, reply = [3] * 500, [5] * 40
    lane.forward(prompt[:256], outputs="none")
    lane.forward(prompt[256:], outputs="last")
    for token in reply:
        lane.forward([token], outputs="all")
    assert pool.checkpoints(lane).lengths == [500 - TAIL]
    assert lane.reusable_prefix(540) == 540  # nothing of it is cut
    assert lane.reusable_prefix(499) == 500 - TAIL  # the same prompt again
    lane.forward([4] * 50, outputs="last")
    # where the reply ended, and before the end of the new prompt
    assert pool.checkpoints(lane).lengths == [500 - TAIL, 540, 590 - TAIL]
    lane.forward([5], outputs="all")
    lane.forward([4] * 20, outputs="last")
    assert pool.checkpoints(lane).lengths == [500 - TAIL, 540, 590 - TAIL, 591]
    assert lane.reusable_prefix(595) == 591  # another message in place of the last
    lane.rollback(530)
    assert pool.checkpoints(lane).lengths == [500 - TAIL]
    assert is_right(lane)


@pytest.mark.parametrize("planes", [0, 2, 4])
def test_the_next_text_is_read_from_where_it_is_read_without_drafts(planes: int) -> None:
    _, lane = opened(planes)
    lane.forward([3] * 100, outputs="last")
    for _ in range(4):
        lane.forward([5], outputs="all")
    alone = [lane.reusable_prefix(keep) for keep in range(105)]
    lane.rollback(100)
    lane.forward([5] * 6, outputs="all")
    lane.rollback(104)
    assert [lane.reusable_prefix(keep) for keep in range(105)] == alone


def test_a_reply_ends_where_the_next_text_begins_to_be_read() -> None:
    pool, lane = opened(0)
    lane.forward([3] * 40, outputs="last")
    lane.forward([5], outputs="all")
    lane.forward([4] * 200, outputs="last")
    assert pool.checkpoints(lane).lengths == [40 - TAIL, 41, 241 - TAIL]


def test_a_long_text_leaves_some_on_its_way() -> None:
    pool, lane = opened(4)
    for _ in range(14):
        lane.forward([3] * 256, outputs="none")
    gaps = np.diff([0, *pool.checkpoints(lane).lengths])
    assert len(gaps) == 14 * 256 // SPREAD - (14 * 256 % SPREAD == 0)
    assert (gaps >= SPREAD).all()


@pytest.mark.parametrize("error", [Cancelled("stopped"), EngineError("no")])
def test_a_pass_that_fails_leaves_a_text_that_is_right(error: Exception) -> None:
    pool, lane = opened(4)
    lane.forward([3] * 50, outputs="last")
    lane.forward([5], outputs="all")
    pool.fake.broken = error
    with pytest.raises(type(error)):
        lane.forward([1, 2, 3], outputs="all")
    assert len(lane.tokens) == (50 - TAIL if isinstance(error, Cancelled) else 51)
    assert is_right(lane)


def test_a_hidden_state_comes_back_with_its_checkpoint() -> None:
    _, lane = opened(0)
    lane.capture("nextn")
    lane.forward([3, 4] * 25, outputs="last")
    at = 50 - TAIL
    right = lane.hidden.rows(at - 1, at).copy()
    lane.forward([5], outputs="all")
    lane.hidden.forget(51)  # whoever read them will not ask again
    lane.rollback(at)
    found = lane.hidden.rows(at - 1, at)
    assert found is not None
    assert np.array_equal(found, right)
    assert lane.hidden.first == at - 1
    lane.forward([6] * 2, outputs="none")
    assert lane.hidden.end == at + 2


def test_a_lane_that_closes_leaves_nothing() -> None:
    pool, lane = opened(4)
    lane.forward([3] * 50, outputs="last")
    lane.close()
    again = pool.open()
    assert again.reusable_prefix(0) == 0
    assert pool.checkpoints(again).lengths == []
    again.forward([4] * 3, outputs="all")
    assert is_right(again)


def test_checkpoints_are_few_and_spread_over_the_text() -> None:
    kept = Checkpoints()
    for n in range(100, 3300, 100):
        kept.add(Checkpoint(n, bytes(1000)))
    lengths = kept.lengths
    assert len(lengths) == running_state.CHECKPOINTS
    assert lengths[-2:] == [3100, 3200]
    assert max(np.diff([0, *lengths])) <= 900
    assert kept.n_bytes == 8000
    assert kept.before(50) is None
    assert kept.before(lengths[3] + 1).length == lengths[3]
    kept.cut(lengths[3])
    assert kept.lengths == lengths[:4]


def test_large_states_are_kept_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_state, "CHECKPOINT_BYTES", 3500)
    kept = Checkpoints()
    for n in (1, 2, 3, 4, 5):
        kept.add(Checkpoint(n, bytes(1000)))
    assert len(kept.lengths) == 3
    assert kept.lengths[-2:] == [4, 5]
    monkeypatch.setattr(running_state, "CHECKPOINT_BYTES", 10)
    kept.add(Checkpoint(6, bytes(1000)))
    assert kept.lengths == [5, 6]


def test_a_draft_model_goes_back_to_where_its_guesses_began() -> None:
    """It never reads again what it held of the text, but for a token or two now and then."""
    pool = RunningFakePool(TABLE, planes=0, max_rows=1)
    lane, rng = pool.open(), random.Random(1)
    text = [rng.randrange(1, 64) for _ in range(300)]
    again = read = 0
    for _ in range(40):
        kept = lane.reusable_prefix(min(common_prefix(lane.tokens, text), len(text) - 1))
        held = len(lane.tokens)
        lane.rollback(kept)
        assert lane.n_past == kept
        again += max(min(held, 300) - kept, 0)
        for i in range(kept, len(text), 200):
            last = i + 200 >= len(text)
            rows = lane.forward(text[i : i + 200], outputs="last" if last else "none")
        assert np.array_equal(rows[0], TABLE.row(text))
        read += len(text) - kept
        guesses = [rng.randrange(1, 64) for _ in range(4)]
        for i, guess in enumerate(guesses[:3]):
            row = lane.forward([guess], outputs="last")[0]
            assert np.array_equal(row, TABLE.row([*text, *guesses[: i + 1]]))
        text += [*guesses[: rng.randrange(5)], rng.randrange(1, 64)]
    assert again == 0
    assert read < len(text) + 80
    assert pool.fake.saved <= 44

"""Where cells are scarce: conversations are parked and come back, prompts go on from what others
hold, and each text is the one that it would be alone."""

import random
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, count
from typing import Any

import pytest
from engines import fake_info, loaded
from requests_made import asked
from table_model import FakePool, FakeTable, FakeVocab

from specllama.backend.base import Shared
from specllama.backend.kernels import TILE, WIDE
from specllama.engine import scheduler, seating
from specllama.engine.engine import Engine
from specllama.engine.slot import Slot
from specllama.errors import EngineError, PromptTooLong, UsageError
from specllama.events import Finished, Notice, PrefillProgress, Started
from specllama.settings.params import GenerateParams
from specllama.speculative.drafting.method import Kit

V = 24
N_CTX = 300
TABLE = FakeTable(V, seed=3, sharpness=2.0, eog_bias=-4.0)
DRAFT = FakeTable(V, seed=4, sharpness=2.0, of=TABLE, agreement=0.7)


def engine_of(
    slots: int, *, tiles: bool = False, wide: int = TILE, kv_ram: int = 1 << 30
) -> Engine:
    pool = FakePool(TABLE, n_ctx=N_CTX, lanes=slots, tiles=tiles, wide=wide)
    beside = FakePool(DRAFT, n_ctx=N_CTX, lanes=slots, in_order=False, by_order=False)

    def slot() -> Slot:
        lane = pool.open()
        return Slot(lane, Kit(lane, beside.open()).all())

    first, *more = [slot() for _ in range(slots)]
    parts = loaded(first.target, FakeVocab(V), info=fake_info(N_CTX, V), more=more)
    return Engine(replace(parts, slots=(first, *more), kv_ram=kv_ram))


def params(seed: int, *, method: str = "none", most: int = 24) -> GenerateParams:
    return asked(method, 0.8, free=True, seed=seed, max_tokens=most)


def ends(engine: Engine) -> dict[int, Finished]:
    """The last words of all that are running."""
    said = [one for events in iter(engine.step, []) for one in events]
    assert not [event for _, event in said if isinstance(event, Exception)]
    return {id: event for id, event in said if isinstance(event, Finished)}


def alone(
    prompt: list[int], asked: GenerateParams, *, tiles: bool = False, wide: int = TILE
) -> tuple[int, ...]:
    *_, last = engine_of(1, tiles=tiles, wide=wide).generate(prompt, asked)
    return last.token_ids


@pytest.mark.parametrize("method", ["none", "draft", "tree", "lookahead"])
def test_who_finds_no_cells_is_parked_and_goes_on(method: str) -> None:
    """Three conversations of 200 tokens in 300 cells: none is cut short."""
    engine = engine_of(3)
    asked = [params(seed, method=method, most=190) for seed in range(3)]
    prompts = [[1 + i, 2, 3] for i in range(3)]
    ids = [engine.submit(p, a) for p, a in zip(prompts, asked, strict=True)]
    found = ends(engine)
    assert engine._scheduler.preemptions > 0
    for id, prompt, one in zip(ids, prompts, asked, strict=True):
        assert found[id].reason == "length"
        assert found[id].token_ids == alone(prompt, one)


def crowded(lanes: int) -> Engine:
    """Two conversations are written, 0 and 1, and 1 waits for cells."""
    engine = engine_of(lanes)
    for seed in range(2):
        engine.submit([1 + seed] * 130, params(seed, most=100))
    while not engine._scheduler.crowded:
        assert engine.free
        assert engine.step()
    return engine


def test_while_one_waits_for_cells_no_later_one_begins() -> None:
    engine = crowded(3)
    assert engine.free  # it takes as many requests as it has lanes
    third = engine.submit([7, 8, 9], params(2, most=20))  # there is room for so little
    assert not engine.free
    before: set[int] = set()
    while len(engine._seats.free) == 1:
        before |= {id for id, _ in engine.step()}
    assert before == {0}, "the later one took its seat when the first was done"
    found = ends(engine)
    assert found[third].token_ids == alone([7, 8, 9], params(2, most=20))
    assert found[1].token_ids == alone([2] * 130, params(1, most=100))
    assert engine.free


def test_a_later_one_can_be_cancelled_dropped_or_refused_before_it_has_a_seat() -> None:
    engine = crowded(5)
    cancelled, dropped, refused = (
        engine.submit([7, 8, 9], params(2, method=method)) for method in ("none", "none", "eagle3")
    )
    assert not engine.free
    engine.cancel(cancelled)
    engine.drop(dropped)
    assert engine.free
    assert engine._seats.free == [*engine._slots[2:]]
    said = {id: event for events in iter(engine.step, []) for id, event in events}
    assert isinstance(said[cancelled], Finished)
    assert said[cancelled].reason == "cancelled"
    assert dropped not in said
    assert isinstance(said[refused], UsageError)
    assert all(isinstance(said[id], Finished) for id in range(2))


def test_a_prompt_that_finds_no_room_waits_unread() -> None:
    """300 cells: 200 are held when one of 130 tokens comes, and another that is cancelled."""
    engine = engine_of(3)
    first = engine.submit([1] * 130, params(0, most=100))
    while not engine.target.tokens or len(engine.target.tokens) < 180:
        engine.step()
    second = engine.submit([2] * 130, params(1, most=20))
    assert engine._scheduler.crowded
    said = engine.step()
    assert {id for id, _ in said} == {first}
    engine.cancel(second)
    said += [one for events in iter(engine.step, []) for one in events]
    last = {id: event for id, event in said if isinstance(event, Finished)}
    assert last[second].reason == "cancelled"
    assert not last[second].token_ids
    assert engine._scheduler.preemptions == 0

    first = engine.submit([1] * 130, params(0, most=60))
    second = engine.submit([2] * 190, params(1, most=20))
    assert engine._scheduler.crowded
    found = ends(engine)
    assert found[second].token_ids == alone([2] * 190, params(1, most=20))
    assert found[first].token_ids == alone([1] * 130, params(0, most=60))


@pytest.mark.parametrize("ahead", range(4))
def test_one_that_is_parked_waits_for_room_for_its_next_pass(
    monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """A prompt finds just room, and the other writes on before it is read, in one pass: it would
    be brought back for its few cells and be parked for that pass, again and again."""
    engine = engine_of(2)
    monkeypatch.setattr(engine._seats, "part", lambda left: 512)
    first = engine.submit([1] * 110, params(0, most=100))
    while engine._scheduler._target.room > 180:
        engine.step()
    prompt = [2] * (engine._scheduler._target.room - ahead)
    second = engine.submit(prompt, params(1, most=20))
    found = ends(engine)
    assert 0 < engine._scheduler.preemptions < 3
    assert found[first].token_ids == alone([1] * 110, params(0, most=100))
    assert found[second].token_ids == alone(prompt, params(1, most=20))


def test_one_that_is_parked_can_be_cancelled() -> None:
    engine = engine_of(2)
    first, second = (engine.submit([1 + i] * 130, params(i, most=160)) for i in range(2))
    said: list[tuple[int, Any]] = []
    while not engine._scheduler.crowded:
        said += engine.step()
    engine.cancel(second)
    said += [one for events in iter(engine.step, []) for one in events]
    last = {id: event for id, event in said if isinstance(event, Finished)}
    assert last[second].reason == "cancelled"
    assert last[first].token_ids == alone([1] * 130, params(0, most=160))


@pytest.mark.parametrize("end", ["written", "cancelled"])
def test_one_without_room_for_its_prompt_gives_up_what_it_holds_of_it(end: str) -> None:
    """The other's reply would end where the cells do, as if its context were full."""
    engine = engine_of(2)
    head = [1 + i % 7 for i in range(110)]
    engine.submit(head, params(0, most=1))
    ends(engine)
    first = engine.submit([2] * 150, params(1, most=100))
    while engine._scheduler._target.room > 30:
        engine.step()
    second = engine.submit([*head, *[3] * 70], params(2, most=20))
    said: list[tuple[int, Any]] = []
    while not engine._scheduler.preemptions:
        said += engine.step()
        assert len(engine._scheduler) == 2
    if end == "cancelled":
        engine.cancel(second)
    said += [one for events in iter(engine.step, []) for one in events]
    last = {id: event for id, event in said if isinstance(event, Finished)}
    assert last[first].reason == "length"
    assert last[first].token_ids == alone([2] * 150, params(1, most=100))
    written = alone([*head, *[3] * 70], params(2, most=20))
    cancelled = end == "cancelled"
    assert last[second].reason == ("cancelled" if cancelled else "length")
    assert last[second].token_ids == (() if cancelled else written)


def test_one_that_is_parked_waits_for_nobody_s_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which each pass takes a second: what is drafted while it is parked holds it up
    no more than what is drafted between two passes beside it."""
    waited: list[float] = []

    def shared(*figures: Any) -> Shared:
        waited.append(figures[-1])
        return Shared(*figures)

    monkeypatch.setattr(scheduler, "perf_counter", count().__next__)
    monkeypatch.setattr(scheduler, "Shared", shared)
    engine = engine_of(4)
    for seed, most in enumerate((40, 40, 90, 90)):
        engine.submit([1 + seed] * 40, params(seed, most=most, method="draft"))
    beside = 0.0
    while engine.step():
        if engine._scheduler.crowded:
            beside = beside or max(waited)
    assert engine._scheduler.preemptions == 1
    assert 0 < max(waited) <= beside


def test_idle_texts_make_room_and_come_back_unread() -> None:
    engine = engine_of(2)
    rng = random.Random(1)
    prompts = [[rng.randrange(1, V) for _ in range(130)] for _ in range(4)]
    for prompt in prompts:
        engine.submit(prompt, params(1))
        ends(engine)
    for prompt in prompts:
        events = list(engine.generate(prompt, params(2)))
        assert isinstance(events[0], Started)
        assert events[0].cached_n == len(prompt) - 1
        assert isinstance(events[-1], Finished)
        assert events[-1].token_ids == alone(prompt, params(2))
    assert engine._seats.n_bytes > 0


def test_a_text_that_cannot_be_moved_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(slot: Slot, *, move: bool) -> None:
        raise EngineError("it stays")

    monkeypatch.setattr(Slot, "outside", refused)
    engine, rng = engine_of(2), random.Random(1)
    one, two, three = ([rng.randrange(1, V) for _ in range(60)] for _ in range(3))
    for prompt in (one, two, [*two[:40], *three]):
        assert list(engine.generate(prompt, params(2)))[-1].token_ids == alone(prompt, params(2))
        assert any(slot.target.tokens[: len(prompt)] == prompt for slot in engine._slots)


def test_without_memory_idle_texts_are_forgotten() -> None:
    engine = engine_of(2, kv_ram=0)
    for i in range(4):
        list(engine.generate([1 + i] * 130, params(1)))
    assert next(iter(engine.generate([1] * 130, params(1)))).cached_n == 0
    assert engine._seats.n_bytes == 0


@pytest.mark.parametrize(("seconds", "copies"), [(1e-7, 4), (0.5, 1)])
def test_a_gpu_copies_a_text_only_where_it_does_not_read_it_again_sooner(
    seconds: float, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = count()
    monkeypatch.setattr(seating, "perf_counter", lambda: next(clock) * seconds)
    engine, rng = engine_of(1), random.Random(1)
    pool = engine.target.pool
    pool.kernels = replace(pool.kernels, on_cpu=False)
    prompts = [[rng.randrange(1, V) for _ in range(130)] for _ in range(5)]
    for prompt in prompts:
        assert list(engine.generate(prompt, params(2)))[-1].token_ids == alone(prompt, params(2))
    assert next(clock) == 2 * copies, "the first one tells"


def test_where_memory_runs_out_parked_texts_are_forgotten() -> None:
    engine = engine_of(2)
    free = [8 << 30]
    engine._seats._free_memory = lambda: free[0]
    for i in range(4):
        list(engine.generate([1 + i] * 130, params(1)))
    assert engine._seats.n_bytes > 0
    free[0] = 1 << 20
    list(engine.generate([6] * 130, params(1)))
    assert engine._seats.n_bytes == 0


def test_a_prompt_goes_on_from_that_of_a_busy_lane() -> None:
    engine = engine_of(3)
    head = random.Random(2).choices(range(1, V), k=100)
    first = engine.submit([*head, 1, 2], params(1, most=60))
    for _ in range(10):
        engine.step()
    second = engine.submit([*head, 3, 4], params(2, most=60))
    said = [one for events in iter(engine.step, []) for one in events]
    started = {id: event for id, event in said if isinstance(event, Started)}
    found = {id: event for id, event in said if isinstance(event, Finished)}
    assert started[second].cached_n == len(head)
    assert found[first].token_ids == alone([*head, 1, 2], params(1, most=60))
    assert found[second].token_ids == alone([*head, 3, 4], params(2, most=60))


def test_a_prompt_that_is_too_long_takes_nothing_from_idle_lanes() -> None:
    engine = engine_of(2)
    for i in (1, 2):
        list(engine.generate([i] * 100, params(1)))
    held = [list(slot.target.tokens) for slot in engine._slots]
    with pytest.raises(PromptTooLong):
        engine.submit([3] * (N_CTX + 1), params(1))
    assert [list(slot.target.tokens) for slot in engine._slots] == held
    assert engine.free


def test_a_request_that_nothing_drafts_for_takes_nothing_from_idle_lanes() -> None:
    engine = engine_of(2)
    for i in (1, 2):
        list(engine.generate([i] * 100, params(1)))
    held = [list(slot.target.tokens) for slot in engine._slots]
    with pytest.raises(UsageError, match="eagle3"):
        engine.submit([3] * 100, params(1, method="eagle3"))
    assert [list(slot.target.tokens) for slot in engine._slots] == held
    assert len(engine._seats.free) == 2


def test_a_seat_that_cannot_be_made_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(need: str) -> None:
        raise EngineError("not today")

    engine = engine_of(1)
    with monkeypatch.context() as patch:
        patch.setattr(engine.target, "capture", capture)
        with pytest.raises(EngineError, match="not today"):
            engine.submit([1] * 100, params(1))
    *_, last = engine.generate([1] * 100, params(1))
    assert last.token_ids == alone([1] * 100, params(1))


def test_a_drafter_is_asked_before_a_prefix_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that knows less of the text than the lane holds has the rest read again, and the lane is
    cut to where a fresh reading goes on."""
    engine = engine_of(1, tiles=True)
    text = [3 + i % 20 for i in range(150)]
    list(engine.generate(text, params(0, most=1)))
    assert cached(engine, text) == 149
    monkeypatch.setattr(engine.drafters["none"], "reusable", lambda ids, known: 100)
    id = engine.submit(text, params(1))
    assert len(engine.target.tokens) == 150 - 1 - TILE  # which is read in tiles
    engine.drop(id)
    assert cached(engine, text) == 150 - 1 - TILE


def test_a_request_says_how_much_is_read_again_for_its_drafter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(1)
    text = [3 + i % 20 for i in range(150)]
    list(engine.generate(text, params(0, most=1)))
    monkeypatch.setattr(engine.drafters["none"], "reusable", lambda ids, known: 100)
    events = engine.generate([*text[:140], 1, 2], params(1))
    said = [event.message for event in events if isinstance(event, Notice)]
    assert said == ["reading 40 tokens again: none needs the target's hidden states"]


@pytest.mark.parametrize("kv_ram", [0, 1 << 30])
@pytest.mark.parametrize("slots", [1, 3])
def test_a_prompt_goes_on_from_texts_of_its_own_scope_only(slots: int, kv_ram: int) -> None:
    """Also where it is parked, and as far as a draft model has read it."""
    engine = engine_of(slots, kv_ram=kv_ram)
    text = random.Random(2).choices(range(1, V), k=100)

    def cached(scope: str) -> int:
        started, *_ = engine.generate(text, params(1, method="draft").replace(scope=scope))
        assert started.proposer == "draft"
        return started.cached_n

    assert cached("one") == 0
    assert cached("one") == 99
    assert cached("two") == 0
    assert cached("two") == 99
    assert cached("") == 0
    assert cached("one") == (99 if kv_ram else 0)
    for i in range(4):
        list(engine.generate([1 + i] * 130, params(1)))
    assert cached("three") == 0


def test_an_engine_is_for_one_thread_at_a_time() -> None:
    engine = engine_of(2)
    said: list[object] = []

    def other() -> None:
        for use in (lambda: list(engine.generate([4, 5], params(2))), engine.step):
            try:
                said.append(use())
            except EngineError as error:
                said.append(error)

    first = engine.generate([1, 2, 3], params(1))
    assert isinstance(next(first), Started)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert [type(one) for one in said] == [EngineError, EngineError]
    assert "another thread" in str(said[0])
    *_, last = first
    assert last.token_ids == alone([1, 2, 3], params(1))
    said.clear()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert isinstance(said[0], list)


def test_an_engine_is_closed_from_any_thread_when_its_pass_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its memory must not go while a pass is in it."""
    engine = engine_of(1)
    order: list[str] = []
    step, close = engine._scheduler.step, engine._seats.close
    closing = threading.Thread(target=engine.close)

    def slow() -> Any:
        closing.start()
        closing.join(0.05)
        assert engine._loaded.stop.is_set()
        order.append("pass")
        return step()

    monkeypatch.setattr(engine._seats, "close", lambda: (order.append("close"), close()))
    events = engine.generate([1, 2, 3], params(1))
    monkeypatch.setattr(engine._scheduler, "step", slow)
    next(events)
    closing.join()
    assert order == ["pass", "close"]
    with pytest.raises(EngineError, match="closed"):
        next(events)
    with pytest.raises(EngineError, match="closed"):
        engine.step()
    engine.close()
    assert order == ["pass", "close"]


def read_by_draft(engine: Engine, ids: list[int], asked: GenerateParams) -> int:
    """Tokens that the draft model evaluates for this request, others not counted."""
    pool: Any = engine._slots[0].beside[0].pool
    before = sum(pool.fake.passes)
    engine.submit(ids, asked)
    ends(engine)
    return sum(pool.fake.passes) - before


def test_a_draft_model_does_not_read_a_shared_beginning_again() -> None:
    """Of a text that is idle in another lane, of one that is parked, and of one that is written by
    a method that has nothing of it."""
    head = random.Random(2).choices(range(1, V), k=100)
    fresh = read_by_draft(engine_of(3), [*head, 1], params(1, method="draft"))
    assert fresh > 100
    engine = engine_of(3)
    for method, tail in (("draft", 1), ("none", 2), ("tree", 3), ("draft", 1)):
        read = read_by_draft(engine, [*head, tail], params(1, method=method))
        if tail > 2:
            assert 0 < read < len(head) // 2
    assert 0 < read <= fresh - len(head)
    for i in range(4, 8):  # parks all of them
        list(engine.generate([i] * 130, params(1, method="draft")))
    assert read_by_draft(engine, [*head, 1], params(1, method="draft")) <= fresh - len(head)
    engine.reset()
    assert read_by_draft(engine, [*head, 1], params(1, method="draft")) == fresh


def test_a_fork_of_a_busy_lane_drafts_at_once() -> None:
    engine = engine_of(3)
    head = random.Random(2).choices(range(1, V), k=100)
    engine.submit([*head, 1, 2], params(1, method="draft", most=60))
    for _ in range(20):
        engine.step()
    second = engine.submit([*head, 3, 4], params(2, method="draft", most=60))
    drafts = [slot.beside[0] for slot in engine._slots]
    assert sorted(lane.tokens[:100] == head for lane in drafts) == [False, True, True]
    assert ends(engine)[second].token_ids == alone([*head, 3, 4], params(2, most=60))


def random_clock(seed: int) -> Callable[[], float]:
    """Between two looks at it passes a microsecond, or up to ten thousand of them."""
    rng = random.Random(seed)
    return accumulate(iter(lambda: 10 ** rng.uniform(-6, -2), None)).__next__


@pytest.mark.parametrize(("tiles", "wide"), [(False, TILE), (True, TILE), (True, WIDE)])
@pytest.mark.parametrize("seed", range(3))
def test_no_text_depends_on_who_was_here_before(
    monkeypatch: pytest.MonkeyPatch, tiles: bool, wide: int, seed: int
) -> None:
    """Prompts that share beginnings, at random, in a pool that is too small for them, while passes
    take times at random."""
    rng, clock = random.Random(seed), random_clock(seed)
    for name, module in list(sys.modules.items()):
        if name.startswith("specllama.") and hasattr(module, "perf_counter"):
            monkeypatch.setattr(module, "perf_counter", clock)
    engine = engine_of(3, tiles=tiles, wide=wide, kv_ram=rng.choice((0, 20_000, 1 << 30)))
    heads = [[rng.randrange(1, V) for _ in range(n)] for n in (30, 130)]
    texts: dict[int, tuple[list[int], GenerateParams]] = {}
    found: dict[int, Finished] = {}
    cached = 0
    for _ in range(40):
        while engine.free and rng.random() < 0.8:
            head = rng.choice(heads)
            tail = [rng.randrange(1, V) for _ in range(rng.choice((1, 5, 70)))]
            prompt = [*head[: rng.randrange(len(head) // 2, len(head))], *tail]
            asked = params(rng.randrange(3), method=rng.choice(("none", "draft", "mixed")), most=40)
            texts[engine.submit(prompt, asked)] = prompt, asked
        for _ in range(rng.randrange(30)):
            for id, event in engine.step():
                assert not isinstance(event, Exception), event
                cached += isinstance(event, Started) and event.cached_n
                if isinstance(event, Finished):
                    found[id] = event
        if texts and rng.random() < 0.1:
            engine.cancel(rng.choice(list(texts)))
    found.update(ends(engine))
    assert set(found) == set(texts)
    assert cached > 100
    for id, (prompt, asked) in texts.items():
        end = found[id]
        n = len(end.token_ids) if end.reason == "cancelled" else None
        assert end.token_ids == alone(prompt, asked, tiles=tiles, wide=wide)[:n], id


def passes(engine: Engine) -> list[int]:
    pool: Any = engine.target.pool
    return list(pool.fake.passes)


@pytest.mark.parametrize("wide", [TILE, WIDE])
@pytest.mark.parametrize(("n", "turns"), [(5, 1), (30, 1), (63, 1), (150, 1), (30, 2), (150, 2)])
def test_who_tries_again_reads_nothing_again(n: int, turns: int, wide: int) -> None:
    """By the same seed it is the same text, by another one the text of who tried that first."""
    head, more = [3 + i * i % 20 for i in range(n)], [4 + i % 17 for i in range(25)]
    for seed in range(16):
        engine, other = (engine_of(1, tiles=True, wide=wide) for _ in range(2))
        text, again = head, params(seed + 1, method="draft" if seed % 2 else "none")
        for turn in range(turns - 1):
            for one in (engine, other):
                *_, last = one.generate(text, params(turn))
            text = [*text, *last.token_ids, *more]
        list(engine.generate(text, params(seed)))
        before, first = len(passes(engine)), list(other.generate(text, again))[-1]
        started, *_, last = engine.generate(text, again)
        assert started.cached_n == len(text) - 1
        assert len(passes(engine)) - before == last.rounds - 1  # the first row was there
        assert last.token_ids == first.token_ids


@pytest.mark.parametrize("wide", [TILE, WIDE])
def test_an_edited_question_goes_on_from_the_reply_before_it(wide: int) -> None:
    head, asked = [3 + i * i % 20 for i in range(40)], [[5] * 20, [6] * 30]
    engine, other = (engine_of(2, tiles=True, wide=wide) for _ in range(2))
    for one in (engine, other):
        *_, last = one.generate(head, params(0))
    said = [*head, *last.token_ids]
    list(engine.generate([*said, *asked[0]], params(1)))
    found, expected = (list(one.generate([*said, *asked[1]], params(2))) for one in (engine, other))
    assert isinstance(found[0], Started)
    assert found[0].cached_n >= len(said) - 1  # its last token was in a pass of what followed
    assert found[-1].token_ids == expected[-1].token_ids  # type: ignore[union-attr]


@pytest.mark.parametrize("wide", [TILE, WIDE])
def test_several_replies_to_one_prompt_read_it_once(wide: int) -> None:
    text = [3 + i % 20 for i in range(150)]
    engine = engine_of(3, tiles=True, wide=wide)
    list(engine.generate(text, params(0)))
    read = sum(passes(engine))
    ids = [engine.submit(text, params(seed)) for seed in (1, 2)]
    found = ends(engine)
    assert sum(passes(engine)) - read == 2 * 23  # a token each
    for id, seed in zip(ids, (1, 2), strict=True):
        assert found[id].token_ids == alone(text, params(seed), tiles=True, wide=wide)


@pytest.mark.parametrize(("n", "read"), [(6, [6]), (14, [14]), (30, [30]), (89, [89])])
def test_a_prompt_is_read_in_one_pass_where_its_row_comes_with_it(n: int, read: list[int]) -> None:
    engine = engine_of(1, tiles=True, wide=WIDE)
    list(engine.generate([3 + i % 20 for i in range(n)], params(0, most=1)))
    assert passes(engine) == read
    engine = engine_of(1, tiles=True)
    list(engine.generate([3 + i % 20 for i in range(n)], params(0, most=1)))
    assert passes(engine) == ([n] if n < TILE else [n - 1, 1])


def test_who_waits_for_a_long_prompt_hears_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the first moment, or from the first tile on where nothing was read before."""
    monkeypatch.setattr(seating, "CHUNK", 128)
    engine = engine_of(1, tiles=True)
    text = [3 + i % 20 for i in range(280)]
    asked = params(0, most=1)
    events = [e for e in engine.generate(text, asked) if isinstance(e, PrefillProgress)]
    assert [e.done for e in events] == [0, 64, 192, 280]
    assert [e.left_ms is None for e in events] == [True, False, False, False]
    engine._seats.pace.token_s = 0.02
    text[90] += 1
    events = [e for e in engine.generate(text, asked) if isinstance(e, PrefillProgress)]
    assert [e.done for e in events] == [90, 215, 280]  # the last part has a tile, too
    assert {(e.total, e.cached) for e in events} == {(280, 90)}
    assert events[0].left_ms == pytest.approx((280 - 90) * 20)
    assert events[-1].left_ms == 0


def cached(engine: Engine, prompt: list[int]) -> int:
    return next(e.cached_n for e in engine.generate(prompt, params(2)) if isinstance(e, Started))


def test_only_a_whole_conversation_is_taken_as_it_was_written() -> None:
    """Of a prompt that was read and not answered, of a lane that was cut to what another prompt
    shares that went before reading, and of a part of a reply, no more is taken than what a fresh
    reading would have left."""
    text = [3 + i % 20 for i in range(200)]
    engine = engine_of(2, tiles=True)
    list(engine.generate(text[:120], params(0, most=1)))
    assert cached(engine, text[:180]) == 180 - 1 - TILE  # the last of 120 was read apart

    engine = engine_of(2, tiles=True)
    *_, last = engine.generate(text[:120], params(0, most=8))
    assert isinstance(last, Finished)
    id = engine.submit([*text[:11], 2, *text[50:150]], params(1))
    assert isinstance(engine.step()[0][1], Started)
    engine.drop(id)
    assert any(len(slot.target.tokens) == 11 for slot in engine._slots)
    assert cached(engine, text[:12]) == 0  # so short a text is not read in tiles
    engine.reset()
    *_, last = engine.generate(text[:120], params(0, most=100))
    assert cached(engine, [*text[:120], *last.token_ids[:90], 1, 2]) == 119
    engine.reset()
    *_, last = engine.generate(text[:120], params(0, most=8))
    assert cached(engine, [*text[:120], *last.token_ids, 1, 2]) == 120 + 8 - 1


@pytest.mark.parametrize("method", ["none", "draft"])
@pytest.mark.parametrize("first", [10, 70, 130])
@pytest.mark.parametrize("slots", [1, 2])
def test_a_conversation_behind_another_is_that_of_a_new_engine(
    slots: int, first: int, method: str
) -> None:
    head = random.Random(5).choices(range(1, V), k=100)

    def dialogue(engine: Engine, method: str) -> list[list[int]]:
        turns, replies = [*head, 1, 2], []
        for n in (4, 80, 4):
            *_, last = engine.generate(turns, params(1, method=method))
            replies.append(list(last.token_ids))
            turns += [*last.token_ids, *head[:n]]
        return replies

    engine = engine_of(slots, tiles=True, kv_ram=0)
    list(engine.generate(head[:first], params(3, method=method)))  # another's, short or long
    found = dialogue(engine, method)
    assert found == dialogue(engine_of(1, tiles=True), "none")
    assert tuple(found[0]) == alone([*head, 1, 2], params(1), tiles=True)


def with_verdict(engine: Engine, exact_rows: int) -> Engine:
    """The same once it is known which of its passes are exact; 0: before."""
    pool: Any = engine.target.pool
    pool.kernels = replace(pool.kernels, exact_rows=exact_rows, exact_trees=exact_rows > 1)
    engine._loaded.info = replace(engine.info, exact_rows=exact_rows)
    return engine


@pytest.mark.parametrize("first", [10, 70, 130])
def test_what_is_taken_from_the_cache_does_not_wait_for_a_verdict(first: int) -> None:
    text = [3 + i % 20 for i in range(200)]
    found = set()
    for exact_rows in (0, 1, 3, 65):
        engine = with_verdict(engine_of(1, tiles=True), exact_rows)
        *_, last = engine.generate(text[:first], params(0))
        own_turn = [*text[:first], *last.token_ids, 1, 2]
        found.add((cached(engine, own_turn), cached(engine, text[:140]), cached(engine, text)))
    assert len(found) == 1


def test_before_it_is_known_which_passes_are_exact_nobody_shares_one() -> None:
    prompts = [[1 + i, 2, 3] for i in range(3)]
    for exact_rows, shared in ((0, 1), (65, 3)):
        engine = with_verdict(engine_of(3), exact_rows)
        engine.target.pool.fake.passes.clear()  # type: ignore[union-attr]
        asked = [params(seed) for seed in range(3)]
        ids = [engine.submit(p, a) for p, a in zip(prompts, asked, strict=True)]
        found = ends(engine)
        written = engine.target.pool.fake.passes[10:-10]  # type: ignore[union-attr]
        assert set(written) == {shared}, "the prompts are read, and all write"
        for id, prompt, one in zip(ids, prompts, asked, strict=True):
            assert found[id].token_ids == alone(prompt, one)


@pytest.mark.parametrize("exact_rows", [1, 65])
def test_a_reply_behind_what_was_read_otherwise_is_marked_where_passes_round(
    exact_rows: int,
) -> None:
    """With one lane, too; the same prompt again is read in the parts that it was read in."""
    engine = engine_of(1)
    pool: Any = engine.target.pool
    pool.kernels = replace(pool.kernels, exact_rows=exact_rows)
    text = [3 + i % 20 for i in range(100)]
    list(engine.generate(text, params(1)))
    assert not engine.inexact
    list(engine.generate(text, params(1)))
    assert not engine.inexact
    list(engine.generate([*text, 1, 2], params(1)))
    assert engine.inexact is (exact_rows == 1)


def test_replies_to_one_text_copy_from_each_other_and_stay_what_they_are() -> None:
    """Of one key: texts of another are not even looked at."""
    prompt, saved = [1, 2, 3, 4], {}
    for scopes in (("", "", "", ""), ("key 1", "key 2", "key 3", "key 4")):
        engine = engine_of(4)
        asked = [params(seed, method="suffix", most=40) for seed in range(4)]
        ids = [
            engine.submit(prompt, one.replace(scope=scope))
            for one, scope in zip(asked, scopes, strict=True)
        ]
        for _ in range(8):
            engine.step()
        texts = [len(engine._seats.beside(slot)) for slot, _ in engine._seats._taken.values()]
        assert texts == [3 if len(set(scopes)) == 1 else 0] * 4
        found = ends(engine)
        for id, one in zip(ids, asked, strict=True):
            assert found[id].token_ids == alone(prompt, one)
        saved[scopes] = sum(found[id].rounds for id in ids)
    assert saved["", "", "", ""] < saved["key 1", "key 2", "key 3", "key 4"]


def test_a_lane_that_changes_keys_shows_nothing_of_the_key_before() -> None:
    engine = engine_of(2)
    list(engine.generate([5, 6, 7, 8], params(1).replace(scope="key 1")))
    list(engine.generate([9, 6, 7, 8], params(1).replace(scope="key 1")))
    for seed in range(2):
        engine.submit([1, 2, 3], params(seed).replace(scope="key 2"))
    for slot, _ in engine._seats._taken.values():
        assert all(5 not in text and 9 not in text for text in engine._seats.beside(slot))

"""Texts that are read while they are typed: the reply is that of a text that came at once."""

import random
from dataclasses import replace
from time import perf_counter
from typing import Any

import pytest
from engines import fake_info, loaded
from requests_made import asked
from table_model import FakeCache, FakePool, FakeTable, FakeVocab

from specllama.backend.kernels import TILE, Kernels
from specllama.cancel import Cancel
from specllama.engine.engine import Engine
from specllama.engine.slot import Slot
from specllama.events import PrefillProgress, RoundDone, Started
from specllama.settings.params import GenerateParams
from specllama.speculative.drafting.method import Kit

V, N_CTX = 24, 900
TABLE = FakeTable(V, seed=3, sharpness=2.0, eog_bias=-4.0)
DRAFT = FakeTable(V, seed=4, sharpness=2.0, of=TABLE, agreement=0.7)
ENDING = [1, 2, 3]  # what a template writes behind a message


class Tilted(FakeCache):
    """Where a cell is computed otherwise, later logits differ, and not all by as much."""

    def _row(self, text: Any, position: int) -> Any:
        tokens, positions, displaced = text
        row = super()._row((tokens, positions, 0 * displaced), position).copy()
        row[::2] += 1e-3 * (int((displaced[positions <= position] % 8191).sum()) % 97)
        return row


def engine_of(*, rounds: bool = False) -> Engine:
    """With tiles; ``rounds``: and rows that depend on the parts they are read in."""
    pool = FakePool(TABLE, n_ctx=N_CTX, lanes=1, tiles=True, by_four=rounds, n_batch=128)
    pool.fake.__class__ = Tilted
    beside = FakePool(DRAFT, n_ctx=N_CTX, lanes=1, in_order=False, by_order=False)
    lane = pool.open()
    slot = Slot(lane, Kit(lane, beside.open()).all())
    info = fake_info(N_CTX, V, exact_rows=pool.kernels.exact_rows)
    return Engine(replace(loaded(lane, FakeVocab(V), info=info), slots=(slot,), kv_ram=0))


def request(seed: int, method: str = "draft", temperature: float = 0.8) -> GenerateParams:
    return asked(method, temperature, free=True, seed=seed, max_tokens=12, chances=1)


def read(engine: Engine, typed: list[int], params: GenerateParams) -> tuple[int, int]:
    """Read ahead what is typed; from where and up to where."""
    engine.begin(replace(engine.prepare([*typed, *ENDING], params), stable=len(typed)))
    said = [event for events in iter(engine.step, []) for _, event in events]
    started, finished = said[0], said[-1]
    assert not finished.token_ids
    return started.cached_n, started.prompt_n


def written(engine: Engine, prompt: list[int], params: GenerateParams) -> tuple[object, ...]:
    """The reply, its marks and its logits."""
    events = list(engine.generate(prompt, params))
    last = events[-1]
    rounds = [event for event in events if isinstance(event, RoundDone)]
    return last.token_ids, [(done.near_tie, done.chances) for done in rounds]


@pytest.mark.parametrize("rounds", [False, True], ids=["tiles", "parts"])
@pytest.mark.parametrize("seed", range(12))
def test_a_reply_behind_what_was_typed_is_that_of_a_text_that_came_at_once(
    seed: int, rounds: bool
) -> None:
    """Conversations of three turns, words that are taken back, another chat in between."""
    rng = random.Random(seed)
    with engine_of(rounds=rounds) as ahead, engine_of(rounds=rounds) as once:
        text: list[int] = []
        for turn in range(3):
            message = [rng.randrange(4, V) for _ in range(rng.choice((8, 50, 62, 70, 150, 260)))]
            params = request(turn, rng.choice(("none", "draft")), rng.choice((0.0, 0.8)))
            at = 0
            while at < len(message):
                at = min(at + rng.choice((1, 3, 20, 70)), len(message))
                typed = [*message[:at], *rng.choice(([], [], [5] * rng.randrange(200)))]
                read(ahead, text + typed, params)
                if rng.random() < 0.1:
                    read(ahead, [9] * rng.choice((20, 100)), params)
                if rng.random() < 0.2:
                    at = max(0, at - rng.choice((2, 40)))
            prompt = [*text, *message, *ENDING]
            found = written(ahead, prompt, params)
            assert found == written(once, prompt, params)
            text = [*prompt, *found[0]]  # type: ignore[misc]


def test_a_message_is_read_before_it_is_sent() -> None:
    message = [4 + i % 20 for i in range(300)]
    with engine_of() as engine:
        first = read(engine, message[:200], request(0))
        more = read(engine, message, request(0))
        assert first == (0, 200)
        assert more == (200, 300)
        events = list(engine.generate([*message, *ENDING], request(0)))
        assert isinstance(events[0], Started)
        # the last tile is read again: a fresh reading has no shorter one
        assert events[0].cached_n == 300 + len(ENDING) - 1 - TILE


@pytest.mark.parametrize(
    ("typed", "seconds", "cancelled"),
    [(283, 0, True), (283, 70, False), (350, 40, True), (350, 70, False)],
)
def test_who_sends_a_message_does_not_wait_for_what_is_read_in_vain(
    monkeypatch: pytest.MonkeyPatch, typed: int, seconds: int, cancelled: bool
) -> None:
    """A token takes a second, and the message reads its last 64 tokens again."""
    message = [4 + i % 20 for i in range(typed)]
    with engine_of() as engine:
        read(engine, message[:200], request(0))
        engine._seats.pace.token_s = 1.0
        now = perf_counter()
        monkeypatch.setattr("specllama.engine.engine.perf_counter", lambda: now)
        stop = Cancel()
        ready = engine.prepare([*message, *ENDING], request(0))
        engine.begin(replace(ready, stable=typed), cancel=stop)
        now += seconds
        engine.prepare([*message, *ENDING], request(0))
        assert stop.is_set() == cancelled


def test_whole_parts_only_where_parts_round() -> None:
    message = [4 + i % 20 for i in range(300)]
    with engine_of(rounds=True) as engine:
        assert read(engine, message[:190], request(0)) == (0, 0)  # 128 and one not known yet
        assert read(engine, message, request(0)) == (0, 128)
        events = list(engine.generate([*message, *ENDING], request(0)))
        assert isinstance(events[0], Started)
        assert events[0].cached_n == 128


def test_short_messages_are_read_word_by_word_but_not_for_a_tile_they_will_be_part_of() -> None:
    message = [4 + i % 20 for i in range(70)]
    with engine_of() as engine:
        assert read(engine, message[:10], request(0)) == (0, 10)
        assert read(engine, message[:12], request(0)) == (10, 12)
        assert read(engine, message[:11], request(0)) == (11, 11)
        # with its ending it has a tile's length, itself it has not
        assert read(engine, message[: TILE - 1], request(0)) == (12, 12)


def test_what_is_asked_ends_it_between_two_parts_and_goes_on_from_there() -> None:
    message = [4 + i % 20 for i in range(400)]
    with engine_of() as engine, engine_of() as other:
        reading = engine.begin(replace(engine.prepare([*message, *ENDING], request(0)), stable=400))
        said = engine.step() + engine.step()
        assert isinstance(said[-1][1], PrefillProgress)
        assert engine.free
        prompt = [*message[:300], *ENDING]
        params = request(1)
        asked_for = engine.submit(prompt, params)
        said = [one for events in iter(engine.step, []) for one in events]
        assert {id for id, _ in said} == {asked_for}
        assert reading not in engine._scheduler
        started, last = said[0][1], said[-1][1]
        assert started.cached_n == 128
        assert last.token_ids == written(other, prompt, params)[0]


def test_a_request_with_another_text_ends_it_at_once() -> None:
    message, cancel = [4 + i % 20 for i in range(400)], Cancel()
    with engine_of() as engine:
        ready = replace(engine.prepare([*message, *ENDING], request(0)), stable=400)
        engine.begin(ready, cancel=cancel)
        engine.step()
        engine.prepare([*message, 7, *ENDING], request(1))
        assert not cancel.is_set()
        engine.prepare([*message[:50], 7, *ENDING], request(1))
        assert cancel.is_set()


def test_the_conversation_before_comes_back_as_it_was_written() -> None:
    """A message of a new chat was typed and given up: the old one goes on from its reply."""
    message = [4 + i % 20 for i in range(100)]
    with engine_of() as engine, engine_of() as other:
        first = written(engine, message, request(0))
        assert first == written(other, message, request(0))
        assert read(engine, [9] * 200, request(0)) == (0, 200)
        again = [*message, *first[0], 5, 6, *ENDING]  # type: ignore[misc]
        events = list(engine.generate(again, request(1)))
        assert isinstance(events[0], Started)
        assert events[0].cached_n == len(message) + 11  # the last token was never read
        assert events[-1].token_ids == written(other, again, request(1))[0]


def test_exact_prefix_behind_what_was_written() -> None:
    read = [(0, 100, TILE), (150, 250, TILE)]
    kernels = Kernels(tiles=True)
    for keep, n, begin, found in (
        (250, 400, 150, 250),
        (250, 300, 150, 300 - 1 - TILE),
        (250, 200, 150, 150),  # too short for tiles behind 150
        (170, 260, 150, 170),
        (150, 400, 150, 150),
        (250, 400, 0, 100),
    ):
        assert kernels.exact_prefix(read, keep, n, begin) == found


@pytest.mark.parametrize("chunk", [64, 100, 128, 256, 512])  # others that write want short ones
def test_parts_leave_nothing_that_is_too_short_for_a_tile(chunk: int) -> None:
    plan = FakePool(FakeTable(8), n_batch=256).plan
    for left in range(1, 700):
        at, sizes = left, []
        while at > 0:
            sizes.append(min(plan.part(at, chunk), at))
            at -= sizes[-1]
        assert sum(sizes) == left
        assert left < TILE or min(sizes) >= TILE


def test_words_that_are_complete() -> None:
    from specllama.engine.prompting import _ended

    for text, ended in (
        ("", ""),
        ("hel", ""),
        ("hello wor", "hello"),
        ("hello world ", "hello world"),
        ("a b\n\n", "a b"),
        ("x" * 100, "x" * 76),
    ):
        assert text[: _ended(text)] == ended

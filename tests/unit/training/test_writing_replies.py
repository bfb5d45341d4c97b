"""Replies that a table writes, several at once, and their features."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
from engines import engine_over
from requests_made import finish
from table_model import FakePool, FakeTable, FakeVocab, fake_model

from specllama.arrays import FINAL
from specllama.backend.base import Opened, OpenedPair
from specllama.cancel import Cancel
from specllama.interface import Message
from specllama.settings.params import GenerateParams, SamplingParams
from specllama.training.corpus import Sample
from specllama.training.features import (
    KEPT,
    PARTS,
    TOP,
    Features,
    Teacher,
    read_again,
    read_laws,
)
from specllama.training.questions import Exercise
from specllama.training.writing import LEAST_CUT, Writer

V = 96
TABLE = FakeTable(V, seed=3, sharpness=2.0, eog_bias=2.0)
LONGEST = 40


ENDLESS = FakeTable(V, seed=3, sharpness=2.0, eog_bias=-20.0)


def teacher(
    lanes: int = 3, n_ctx: int = 1200, stop: Cancel | None = None, table: FakeTable = TABLE
) -> Teacher:
    pool = FakePool(table, n_ctx=n_ctx, lanes=lanes, max_rows=64, n_batch=64, stop=stop)
    opened = OpenedPair(Opened(pool, FakeVocab(V), fake_model(n_ctx, V)))
    return Teacher(opened, (1, 2, 3), lanes)


def exercises(n: int = 12, long: int = 0) -> list[Exercise]:
    words = ["the", "rain", "in", "spain", "falls", "on", "the", "plain", "and", "the", "hills"]
    return [
        Exercise(
            f"{i:06}", "prose", i % 5 == 0,
            (Message("user", " ".join(words[i % 5 :]) + " x" * (long // 2)),), i + 7,
            0.8 if i % 3 else 0.0,
        )
        for i in range(n)
    ]  # fmt: skip


def never() -> bool:
    return False


def write(some: list[Exercise], **parts: int) -> dict[str, tuple[Sample, Features]]:
    found = Writer(teacher(**parts), LONGEST).write(some, never)
    return {sample.id: (sample, features) for sample, features in found}


def test_a_reply_is_the_text_of_the_engine_with_its_seed() -> None:
    found = write(exercises())
    assert len(found) == 12
    engine = engine_over(FakePool(TABLE, n_ctx=1200, lanes=1).open(), FakeVocab(V))
    for one in exercises():
        params = GenerateParams(
            sampling=SamplingParams(temperature=one.temperature),
            seed=one.seed, max_tokens=LONGEST, proposer="none",
        )  # fmt: skip
        told = finish(engine, list(one.messages), params)
        sample = found[one.id][0]
        assert sample.reply == told.token_ids
        assert (sample.held_out, sample.seed, sample.kind) == (one.held_out, one.seed, "prose")
        assert sample.temperature == one.temperature


@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_neither_texts_nor_features_depend_on_the_number_of_lanes(lanes: int) -> None:
    some, other = write(exercises(), lanes=3), write(exercises(), lanes=lanes)
    assert some.keys() == other.keys()
    for sample, features in some.values():
        assert other[sample.id][0] == sample
        assert alike(features, other[sample.id][1])


def alike(a: Features, b: Features) -> bool:
    return (a.reply_from, a.id) == (b.reply_from, b.id) and all(
        np.array_equal(getattr(a, part), getattr(b, part)) for part in PARTS
    )


@pytest.mark.parametrize("rows", [None, 1, 7])
@pytest.mark.parametrize("long", [0, KEPT + 90])
def test_a_reply_that_is_read_again_has_the_features_that_writing_left(
    rows: int | None, long: int
) -> None:
    found = write(exercises(6, long), lanes=2)
    samples = [sample for sample, _ in found.values()]
    again = list(read_again(teacher(), samples, rows))
    assert [one.id for one in again] == list(found)
    assert all(alike(one, found[one.id][1]) for one in again)


def test_features_are_the_states_and_the_laws_of_the_table() -> None:
    (sample, features), *_ = write(exercises(3, KEPT + 50), lanes=1).values()
    text = [*sample.prompt, *sample.reply]
    first = len(sample.prompt) - KEPT
    assert features.tokens.tolist() == text[first:]
    assert features.reply_from == KEPT
    assert features.inputs.dtype == features.final.dtype == features.top_p.dtype == np.float16
    for at, place in enumerate(range(first, len(text))):
        row = TABLE.row(text[: place + 1])
        state = np.concatenate((features.inputs[at], features.final[at]))
        assert state.tolist() == row[:8].astype(np.float16).tolist()
        law = np.exp(row.astype(np.float64) - row.max())
        best = np.argsort(-row, kind="stable")[:TOP]
        assert features.top_ids[at].tolist() == best.tolist()
        assert features.top_p[at] == pytest.approx(law[best] / law.sum(), rel=2e-3, abs=1e-6)


def test_states_that_no_half_holds_are_cut() -> None:
    one = teacher()
    lane = one.open_lane()
    assert lane.need == (1, 2, 3, FINAL)  # type: ignore[attr-defined]
    lane.forward([1, 2], outputs="all")
    lane.hidden.rows(0, 2)[0, 0] = 1e6  # type: ignore[index]
    from specllama.training.features import Gathering

    gathering = Gathering(lane, 0, 4)
    gathering.take(np.zeros((2, V), np.float32))
    found = gathering.features(Sample("0", "code", False, (1,), (2,)))
    assert np.isfinite(found.inputs).all()


def test_equal_chances_come_in_the_order_of_ids_and_few_words_leave_room() -> None:
    ids, chances = read_laws(np.zeros((1, 200), np.float32))
    assert ids[0].tolist() == list(range(TOP))
    assert chances[0, 0] == np.float16(1 / 200)
    ids, chances = read_laws(np.zeros((2, 10), np.float32))
    assert chances[1, 10:].tolist() == [0.0] * (TOP - 10)
    assert chances[1, :10].sum() == pytest.approx(1.0, rel=1e-3)


def test_writing_stops_when_it_is_asked_to_and_the_lanes_are_free_again() -> None:
    one, asked = teacher(), 0

    def until() -> bool:
        nonlocal asked
        asked += 1
        return asked > 30

    found = list(Writer(one, LONGEST).write(exercises(100), until))
    assert 0 < len(found) < 30
    lanes = [one.open_lane() for _ in range(one.lanes)]
    assert len(lanes) == 3


@pytest.mark.parametrize("way", ["asked", "cancelled"])
def test_what_was_written_of_a_reply_is_kept_when_the_writing_ends(way: str) -> None:
    whole = {s.id: s for s, _ in Writer(teacher(table=ENDLESS), 200).write(exercises(), never)}
    stop, passes = Cancel(), 0

    def until() -> bool:
        nonlocal passes
        passes += 1
        if passes > LEAST_CUT + 20 and way == "cancelled":
            stop.set()
        return passes > LEAST_CUT + 20 and way == "asked"

    found = list(Writer(teacher(stop=stop, table=ENDLESS), 200).write(exercises(), until))
    cut = [(s, f) for s, f in found if s != whole[s.id]]
    assert cut
    for sample, features in cut:
        n = len(sample.reply)
        assert LEAST_CUT <= n < len(whole[sample.id].reply)
        assert sample.reply == whole[sample.id].reply[:n]
        assert features.tokens.tolist() == [*sample.prompt, *sample.reply]
        assert all(len(getattr(features, part)) == len(features.tokens) for part in PARTS)
        [again] = read_again(teacher(table=ENDLESS), [sample])
        assert alike(features, again)


def test_a_caller_that_leaves_frees_the_lanes_too() -> None:
    one = teacher()
    writing = Writer(one, LONGEST).write(exercises(), never)
    next(writing)
    assert isinstance(writing, Iterator)
    writing.close()  # type: ignore[attr-defined]
    assert [one.open_lane() for _ in range(one.lanes)]


def test_a_cancel_ends_the_writing() -> None:
    stop = Cancel()
    writing = Writer(teacher(stop=stop), LONGEST).write(exercises(), never)
    assert next(writing)
    stop.set()
    assert list(writing) == []


def test_a_prompt_without_room_is_passed_over() -> None:
    long = exercises(2, 2000)
    found = list(Writer(teacher(n_ctx=300), LONGEST).write([*long, *exercises(3)], never))
    assert len(found) == 3
    sample = Sample("9", "code", False, (1,) * 500, (2,))
    assert list(read_again(teacher(n_ctx=300), [sample])) == []


def test_long_prompts_wait_for_room_in_a_pass() -> None:
    one = teacher(lanes=5)
    found = list(islice(Writer(one, LONGEST).write(exercises(5, 120), never), 5))
    assert len(found) == 5
    assert max(one.pool.fake.passes) <= one.rows == 64  # type: ignore[attr-defined]

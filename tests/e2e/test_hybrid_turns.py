"""Models with a running state in llama.cpp, of random weights: with earlier states, and without."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import measured
from ggufs import write_llama, write_mamba
from ggufs_nextn import write_nextn
from requests_made import asked, finish

from specllama.backend.recurrent_pool import TAIL, RunningPool
from specllama.bench.prompts import BenchPrompt
from specllama.bench.proof import prove
from specllama.engine.engine import Engine
from specllama.events import Finished
from specllama.models import memory, running_state
from specllama.models.gguf import read_header
from specllama.settings.params import EngineOptions
from specllama.speculative import round

OPTIONS = EngineOptions(n_ctx=512, threads=1, check_memory=False)
FIRST = [10 + i % 7 for i in range(140)]


@pytest.fixture(scope="module", params=["qwen35", "qwen3next", "mamba"])
def engine(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path: Path = tmp_path_factory.mktemp("hybrid") / f"{request.param}.gguf"
    if request.param == "mamba":
        write_mamba(path)
    else:
        write_nextn(path, request.param)
    with measured(path, None, OPTIONS) as loaded:
        yield loaded


def pool(engine: Engine) -> RunningPool:
    found: Any = engine.target.pool
    assert isinstance(found, RunningPool)
    return found


def written(
    engine: Engine, prompt: list[int], proposer: str, temperature: float, **more: Any
) -> Finished:
    options = {"seed": 7, "max_tokens": 40, **more}
    done = finish(engine, prompt, asked(proposer, temperature, **options))
    assert engine.target.n_past == len(engine.target.tokens)
    return done


def passes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each pass from here on has."""
    seen: list[int] = []
    cache: Any = pool(engine).cache
    decode = cache.decode

    def counted(**options: Any) -> None:
        seen.append(cache.batch.n)
        decode(**options)

    monkeypatch.setattr(cache, "decode", counted)
    return seen


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft_max", [3, 8, 20])
def test_drafted_texts_are_those_of_plain_decoding(
    engine: Engine, temperature: float, draft_max: int
) -> None:
    """Also in a second turn that goes back into the first reply; drafts within the planes, and
    deeper ones."""
    second = [*FIRST, 9]
    for prompt in (FIRST, second):
        plain = written(engine, prompt, "none", temperature)
        if prompt is FIRST:
            second[len(FIRST) :] = [*plain.token_ids[:20], 11, 12, 13]
        drafted = 0
        for proposer in ("ngram", "suffix"):
            done = written(engine, prompt, proposer, temperature, draft_max=draft_max)
            assert done.token_ids == plain.token_ids
            drafted += done.draft_n


def test_a_rejection_reads_nothing_again_where_planes_are(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.reset()
    seen = passes(engine, monkeypatch)
    widths = (5, 3, 5, 2)
    for n in widths:
        lane = engine.target
        lane.forward([20 + n] * n, outputs="all")
        lane.rollback(len(lane.tokens) - n + 1)
    again = 0 if pool(engine).cache.planes else len(widths)
    assert sum(seen) == sum(widths) + again


@pytest.mark.parametrize("proposer", ["none", "ngram"])
def test_later_turns_read_what_is_new(
    engine: Engine, proposer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.reset()
    first = written(engine, FIRST, proposer, 0.8)
    assert first.cached_n == 0
    held = len(FIRST) + len(first.token_ids) - 1
    # another turn
    second = [*FIRST, *first.token_ids, *[11, 12, 13] * 20]
    seen = passes(engine, monkeypatch)
    done = written(engine, second, "none", 0.8, max_tokens=1)
    assert done.cached_n == held
    assert sum(seen) == len(second) - held
    # its last message is edited
    seen.clear()
    edited = [*second[: len(FIRST) + len(first.token_ids)], *[15] * 9]
    done = written(engine, edited, "none", 0.8, max_tokens=1)
    assert done.cached_n == held
    assert sum(seen) == len(edited) - held
    # the reply is written otherwise in the history than it was, as without its thought
    seen.clear()
    cut = [*FIRST[:-3], *first.token_ids[10:], *[14] * 10]
    done = written(engine, cut, "none", 0.8, max_tokens=1)
    assert sum(seen) == len(cut) - done.cached_n <= len(cut) - len(FIRST) + 64
    # undone, and the first reply written again
    seen.clear()
    again = written(engine, FIRST, proposer, 0.8)
    assert again.token_ids == first.token_ids
    assert again.cached_n == len(FIRST) - TAIL


@pytest.mark.parametrize("arch", ["qwen35", "qwen3next", "nemotron_h_moe"])
def test_a_head_reads_on_from_a_checkpoint(arch: str, tmp_path: Path) -> None:
    """The hidden state behind it is kept, too: nothing more is read again for the head."""
    with measured(write_nextn(tmp_path / "head.gguf", arch), None, OPTIONS) as engine:
        for temperature in (0.0, 0.8):
            engine.reset()
            plain = written(engine, FIRST, "none", temperature)
            cut = [*FIRST[:-3], *plain.token_ids[10:], *[14] * 10]
            after = written(engine, cut, "none", temperature)
            engine.reset()
            assert written(engine, FIRST, "mtp", temperature).token_ids == plain.token_ids
            done = written(engine, cut, "mtp", temperature)
            assert done.token_ids == after.token_ids
            assert done.cached_n == after.cached_n == len(FIRST) - TAIL
            assert written(engine, FIRST, "mtp", temperature).token_ids == plain.token_ids


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_it_drafts_for_others_and_for_itself(
    engine: Engine, temperature: float, tmp_path: Path
) -> None:
    """Its guesses are undone by a checkpoint; what it read of the text is not read again."""
    own = Path(engine.info.target.path)
    other = write_llama(tmp_path / "other.gguf")
    for target in (own, other):
        with measured(target, own, OPTIONS) as pair:
            plain = written(pair, FIRST, "none", temperature)
            done = written(pair, FIRST, "draft", temperature)
            assert done.token_ids == plain.token_ids
            assert done.draft_n > 0
            if target is own:
                assert done.acceptance_rate is not None
                assert done.acceptance_rate > 0.8
            second = [*FIRST, *plain.token_ids, 11, 12, 13]
            plain = written(pair, second, "none", temperature)
            assert written(pair, second, "draft", temperature).token_ids == plain.token_ids
    with measured(other, own, dataclasses.replace(OPTIONS, parallel=2)) as pair:
        assert pair.info.lanes == 2


def test_what_the_header_says_of_the_memory(engine: Engine) -> None:
    header = read_header(Path(engine.info.target.path))
    state = len(_saved(engine))
    assert running_state.state_bytes(header) == pytest.approx(state, rel=0.2, abs=4096)
    planes = pool(engine).cache.planes
    assert (running_state.rollback(header) == "planes") is (planes > 0)
    one, many = (memory.kv_bytes(header, 256, max_rows=rows) for rows in (1, 65))
    assert many - one == planes * running_state.state_bytes(header)
    estimate = memory.estimate_model(header, n_ctx=256)
    assert estimate.checkpoints >= 2 * running_state.state_bytes(header)


def test_what_goes_on_from_a_running_state_is_marked(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not built up as a fresh reading would have: any close call may be another's. The same
    prompt goes on from what such a reading left."""
    monkeypatch.setattr(round, "NEAR_TIE", math.inf)
    engine.reset()
    first = written(engine, FIRST, "none", 0.0)
    again = written(engine, FIRST, "none", 0.0)
    assert (first.near_ties, again.near_ties) == (0, 0)
    assert again.cached_n > 0
    turn = [*FIRST, *first.token_ids, *[11, 12, 13] * 20]
    second = written(engine, turn, "none", 0.0)
    assert second.cached_n > len(FIRST)
    assert second.near_ties == second.rounds
    engine.reset()
    assert written(engine, turn, "none", 0.0).near_ties == 0


def test_a_proof_explains_what_goes_on_from_a_running_state(engine: Engine) -> None:
    """Behind others it is not promised to be exact, so it is not compared as if it were."""
    one = [BenchPrompt("own", "own", text="a long text of some words " * 4)]
    cases = list(prove(engine, one, proposers=("ngram",), temperatures=(0.0,), warm=True))
    assert [case.way for case in cases] == ["cold", "behind", "behind", "turns"]
    assert not any(case.bitwise for case in cases if case.way == "turns")
    assert all(case.ok for case in cases)


def _saved(engine: Engine) -> Any:
    lane: Any = engine.target
    lane.forward([5], outputs="all")
    return pool(engine).cache.save_running(lane.sequence)

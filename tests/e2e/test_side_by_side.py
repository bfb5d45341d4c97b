"""Conversations beside each other on the bundled pair: each writes what it writes alone."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from dflash_files import write_dflash

from specllama.bench.prompts import load_prompts
from specllama.engine import scheduler
from specllama.engine.engine import Engine
from specllama.events import Finished, RoundDone
from specllama.models.refs import resolve
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams

pytestmark = pytest.mark.e2e

RUNS = int(os.environ.get("SPECLLAMA_SEQUENCES", "10"))
METHODS = (
    "mixed", "draft", "ngram", "suffix", "tree", "merged", "eagle3", "dflash", "medusa", "none",
)  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def options(home: None, tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    """With a block drafter of random weights, beside the heads that ship."""
    path = tmp_path_factory.mktemp("drafter") / "dspark.gguf"
    write_dflash(path, resolve("tiny-target"), kind="dspark", layers=(1, 3))
    return EngineOptions(threads=1, repack="off", heads=(str(path),))


@pytest.fixture(scope="module")
def alone(options: EngineOptions) -> Iterator[Engine]:
    with Engine.load("tiny", None, replace(options, n_ctx=1024)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def three(options: EngineOptions) -> Iterator[Engine]:
    with Engine.load("tiny", None, replace(options, n_ctx=4096, parallel=3)) as loaded:
        yield loaded


def asked(method: str, seed: int, temperature: float) -> GenerateParams:
    return GenerateParams(
        proposer=method,
        seed=seed,
        window="fixed",
        draft_max=4,
        max_tokens=24,
        sampling=SamplingParams(temperature=temperature),
    )


def submit(engine: Engine, prompt: str, params: GenerateParams) -> int:
    """Begin where nothing is cached: what a short prompt left was not read in tiles."""
    for slot in engine._seats.free:
        slot.reset()
    return engine.submit(prompt, params)


def test_blocks_of_several_lengths_are_drafted_side_by_side(three: Engine) -> None:
    """DSpark's graph ends the process where a pass holds blocks of two lengths."""
    for longest in (2, 3, 4):
        params = asked("dflash", longest, 0.0).replace(draft_max=longest)
        submit(three, load_prompts()[longest].content, params)
    drafted = 0
    while len(three._scheduler):
        for _, event in three.step():
            assert not isinstance(event, Exception), event
            drafted += event.draft_n if isinstance(event, Finished) else 0
    assert drafted > 0


@pytest.mark.parametrize("rows", [65, 7, 2], ids=["plenty", "scarce", "not one each"])
def test_no_text_depends_on_its_neighbours(
    alone: Engine, three: Engine, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Drafts, rejects, stops, cancelled and dropped conversations at random moments."""
    rng = random.Random(0)
    pool = three.target.pool
    widest = scheduler._widest
    monkeypatch.setattr(scheduler, "_widest", lambda of: rows if of is pool else widest(of))
    prompts = [prompt.content for prompt in load_prompts()[::11]]
    said: list[tuple[int, int, float, Finished]] = []
    together = cut = 0
    for _ in range(RUNS if rows == 65 else RUNS // 3 + 1):
        running: dict[int, tuple[int, int, float]] = {}
        left = 6
        while left or running:
            while left and three.free:
                which, seed = rng.randrange(len(prompts)), rng.randrange(3)
                temperature = rng.choice((0.0, 0.9))
                params = asked(rng.choice(METHODS), seed, temperature)
                running[submit(three, prompts[which], params)] = which, seed, temperature
                left -= 1
            together = max(together, len(running))
            for id, event in three.step():
                assert not isinstance(event, Exception), event
                cut += isinstance(event, RoundDone) and "others share" in event.window_reason
                if isinstance(event, Finished):
                    said.append((*running.pop(id), event))
            if running and rng.random() < 0.02:
                three.cancel(rng.choice(list(running)))
            elif running and rng.random() < 0.02:
                id = rng.choice(list(running))
                three.drop(id)
                del running[id]
    assert together == 3
    assert len(said) > 12
    assert sum(event.draft_n for *_, event in said) > 10
    assert cut > 10 or rows == 65
    texts: dict[tuple[int, int, float], tuple[int, ...]] = {}
    for which, seed, temperature, event in said:
        key = which, seed, temperature
        if key not in texts:
            alone.reset()
            *_, last = alone.generate(prompts[which], asked("none", seed, temperature))
            assert isinstance(last, Finished)
            texts[key] = last.token_ids
        n = len(event.token_ids) if event.reason == "cancelled" else None
        assert event.token_ids == texts[key][:n], key

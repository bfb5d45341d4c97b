"""What going back costs on a model with a running state.

    SPECLLAMA_BENCH_HYBRIDS=1 pytest -s tests/lab/bench/test_hybrid_rounds.py

Two random models of 450 M and 570 M parameters are written and quantized first (minutes, 2.5 GB of
disk for a while): one of which llama.cpp keeps earlier states (as Qwen3.5), one of which it does
not (as Qwen3-Next). Rounds whose drafts are accepted whole, in part or not at all take turns; the
medians count, and the lowest times are printed beside. SPECLLAMA_BENCH_THREADS (2) and _ROUNDS (40)
change what is done.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import Any

import ggufs_nextn
import pytest

from specllama.engine.engine import Engine
from specllama.events import Finished
from specllama.models.quantization import prepare, run
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams

THREADS = int(os.environ.get("SPECLLAMA_BENCH_THREADS", "2"))
ROUNDS = int(os.environ.get("SPECLLAMA_BENCH_ROUNDS", "40"))
WANTED = os.environ.get("SPECLLAMA_BENCH_HYBRIDS")
ROWS = 5
SIZES = {"HEADS": 8, "HEAD": 256, "STATE": 128, "GROUPS": 16, "TIME_RANK": 16}
KINDS = {
    "qwen35": {"HIDDEN": 3072},  # planes
    "qwen3next": {"EXPERT": 512, "EXPERTS": 8},  # checkpoints
}

pytestmark = [
    pytest.mark.timeout(0),
    pytest.mark.skipif(not WANTED, reason="takes minutes"),
]


@pytest.fixture(scope="module", params=list(KINDS))
def engine(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp(request.param)
    whole, small = folder / "f32.gguf", folder / f"{request.param}.gguf"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**SIZES, **KINDS[request.param]}.items():
            patch.setattr(ggufs_nextn, name, value)
        ggufs_nextn.write_nextn(whole, request.param, width=1024, blocks=24, nextn=0)
    run(prepare(whole, small, "q4_0", pure=True))
    whole.unlink()
    with Engine.load(small, None, EngineOptions(n_ctx=4096, threads=THREADS)) as loaded:
        yield loaded
    small.unlink()


def has_planes(engine: Engine) -> bool:
    pool: Any = engine.target.pool
    return bool(pool.cache.planes)


def test_a_rejection_costs_little(engine: Engine) -> None:
    """A round of five rows of which three are kept, against one that keeps all."""
    engine.reset()
    lane = engine.target
    lane.forward(list(range(10, 138)), outputs="none")
    took: dict[int, list[float]] = {ROWS: [], ROWS - 1: [], 3: [], 1: []}
    plain: list[float] = []
    for i in range(ROUNDS):
        for keep, times in took.items():
            past, begin = len(lane.tokens), perf_counter()
            lane.forward([20 + i] * ROWS, outputs="all")
            if keep < ROWS:
                lane.rollback(past + keep)
            times.append((perf_counter() - begin) * 1e3)
        begin = perf_counter()
        lane.forward([9], outputs="all")
        plain.append((perf_counter() - begin) * 1e3)
    whole = median(took[ROWS])
    print(f"\nplain step {median(plain):.1f} ms (least {min(plain):.1f})")
    for keep, times in took.items():
        least = min(times) / min(took[ROWS])
        print(f"{keep} of {ROWS} rows kept: {median(times):.1f} ms, {median(times) / whole:.2f} of"
              f" a round that keeps all (least times {least:.2f})")  # fmt: skip
    if has_planes(engine):
        assert median(took[3]) <= 1.15 * whole


def test_a_second_turn_reads_what_is_new(engine: Engine) -> None:
    """Of a conversation of 2,000 tokens; also where the history leaves a thought out."""
    engine.reset()
    first = [10 + i % 250 for i in range(1900)]
    reply = ask(engine, first, 100)
    assert reply.cached_n == 0
    for name, prompt, new in (
        ("another turn", [*first, *reply.token_ids, *range(30, 80)], 50),
        ("without the thought", [*first[:-3], *reply.token_ids[60:], *range(30, 80)], 90),
        ("undone", [*first], 1),
    ):
        done = ask(engine, prompt, 1)
        read = done.prompt_n - done.cached_n
        print(f"\n{name}: {read} of {done.prompt_n} tokens read, {new} of them new")
        assert read <= new + 64


def ask(engine: Engine, prompt: list[int], n: int) -> Finished:
    params = GenerateParams(
        sampling=SamplingParams(temperature=0.8), seed=7, max_tokens=n, proposer="ngram",
        ignore_eos=True, window="fixed", draft_max=4,
    )  # fmt: skip
    *_, done = engine.generate(prompt, params)
    assert isinstance(done, Finished)
    return done

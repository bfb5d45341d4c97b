"""Reading prompts and decoding behind them, against llama-bench of the same build.

    SPECLLAMA_LLAMA_BENCH=…/llama-bench SPECLLAMA_BENCH_MODEL=target.gguf \
        pytest -s -m bench tests/bench/test_reading_speed.py

Both programs take turns, so that what else the machine does falls on both; every turn gives one
ratio, and the median counts. More in the environment: SPECLLAMA_BENCH_THREADS (2), _ROUNDS (3),
_LENGTHS ("512 2048 8192"), _DEPTHS ("0 1024 4096"), _TOKENS (32, written behind each depth).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter

import pytest

from specllama.engine.engine import Engine
from specllama.params import EngineOptions

ENV = {
    name.removeprefix("SPECLLAMA_"): value
    for name, value in os.environ.items()
    if name.startswith("SPECLLAMA_")
}  # before a fixture takes them away
BENCH, MODEL = ENV.get("LLAMA_BENCH"), ENV.get("BENCH_MODEL")
THREADS = int(ENV.get("BENCH_THREADS", "2"))
ROUNDS = int(ENV.get("BENCH_ROUNDS", "3"))
LENGTHS = [int(n) for n in ENV.get("BENCH_LENGTHS", "512 2048 8192").split()]
DEPTHS = [int(n) for n in ENV.get("BENCH_DEPTHS", "0 1024 4096").split()]
TOKENS = int(ENV.get("BENCH_TOKENS", "32"))
ENOUGH = 0.97  # of llama-bench

pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(0),
    pytest.mark.skipif(not (BENCH and MODEL), reason="needs llama-bench and a model"),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    n_ctx = max([*LENGTHS, *(d + TOKENS + 1 for d in DEPTHS)]) + 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(tmp_path_factory.mktemp("home")))
        options = EngineOptions(
            n_ctx=n_ctx, threads=THREADS, gpu_layers="0", draft_gpu_layers="0", check_memory=False
        )
        with Engine.load(Path(str(MODEL)), None, options) as engine:
            yield engine


def llama_bench(*flags: str, keys: str) -> float:
    """Tokens per second over a cache with K of type ``keys`` and V of f16."""
    done = subprocess.run(
        [
            str(BENCH), "-m", str(MODEL), "-t", str(THREADS), "-ngl", "0", "-fa", "1", "-r", "1",
            "-b", "512", "-ub", "512", "-ctk", keys, "-ctv", "f16", "-o", "json", *flags,
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return float(json.loads(done.stdout)[0]["avg_ts"])


def text(engine: Engine, n: int) -> list[int]:
    return [300 + 7919 * i % (engine.vocab.n_tokens - 600) for i in range(n)]


def reading(engine: Engine, n: int) -> float:
    """Tokens per second of reading ``n`` tokens into an empty cache, up to the first row."""
    tokens, chunk = text(engine, n), engine.target.n_batch
    engine.reset()
    engine.target.forward(tokens[:chunk], outputs="none")  # llama-bench warms up before each turn
    engine.reset()
    begin = perf_counter()
    for i in range(0, n, chunk):
        part = tokens[i : i + chunk]
        engine.target.forward(part, outputs="last" if i + chunk >= n else "none")
    return n / (perf_counter() - begin)


def decoding(engine: Engine, depth: int) -> float:
    """Tokens per second of single steps behind ``depth`` tokens."""
    target = engine.target
    if target.n_past < depth:
        engine.reset()
        reading(engine, depth)
    target.rollback(depth)
    target.forward(text(engine, 1), outputs="all")
    target.rollback(depth)
    begin = perf_counter()
    for token in text(engine, TOKENS):
        target.forward([token], outputs="all")
    return TOKENS / (perf_counter() - begin)


def compare(what: str, arms: dict[str, Callable[[], float]], rivals: set[str]) -> float:
    """Let all arms take turns; prints every speed.

    Returns the median share of the first arm's speed in that of the fastest rival of its turn.
    """
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    shares: list[float] = []
    ours = next(iter(arms))
    for _ in range(ROUNDS):
        for name, run in arms.items():
            speeds[name].append(run())
        shares.append(speeds[ours][-1] / max(speeds[name][-1] for name in rivals))
    cells = [f"{name} {median(v):.1f} ({min(v):.1f} to {max(v):.1f})" for name, v in speeds.items()]
    print(f"{what}: {', '.join(cells)} tok/s; share {median(shares):.2f}", flush=True)
    return median(shares)


@pytest.mark.parametrize("n", LENGTHS)
def test_reading(engine: Engine, n: int) -> None:
    flags = ("-p", str(n), "-n", "0")
    arms = {
        "specllama": lambda: reading(engine, n),
        "llama-bench f16/f16": lambda: llama_bench(*flags, keys="f16"),
        "llama-bench bf16/f16": lambda: llama_bench(*flags, keys="bf16"),
    }
    assert compare(f"reading {n}", arms, {"llama-bench f16/f16"}) >= ENOUGH


@pytest.mark.parametrize("depth", DEPTHS)
def test_decoding(engine: Engine, depth: int) -> None:
    flags = ("-p", "0", "-n", str(TOKENS), "-d", str(depth))
    arms = {
        "specllama": lambda: decoding(engine, depth),
        "llama-bench f16/f16": lambda: llama_bench(*flags, keys="f16"),
        "llama-bench bf16/f16": lambda: llama_bench(*flags, keys="bf16"),
    }
    assert compare(f"decoding at {depth}", arms, set(arms) - {"specllama"}) >= ENOUGH

"""Reading prompts and decoding behind them, as specllama and as llama.cpp would do it.

    SPECLLAMA_BENCH_MODEL=target.gguf pytest -s tests/lab/bench/test_reading_speed.py

All arms are contexts of one process over the same weights, with the same number of threads, and
take turns pass by pass (reading: 512 tokens by 512), so that what else the machine does falls on
all alike; every turn gives a ratio, and the median counts. llama.cpp's arms choose attention and
kernels for themselves. More in the environment: SPECLLAMA_BENCH_THREADS (2), _LENGTHS ("512 2048
8192"), _READ (16384, tokens that each length reads in all; 4096 and less three times at least),
_DEPTHS ("0 1024 4096"), _TOKENS (64, written behind each depth).

Where SPECLLAMA_LLAMA_BENCH names llama-bench, its figures are printed beside. They are of other
moments, and no bar.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import pytest

from specllama.backend.lane import CellLane
from specllama.backend.llama import LlamaModel
from specllama.backend.llama_pool import open_pool
from specllama.settings.params import EngineOptions

ENV = {
    name.removeprefix("SPECLLAMA_"): value
    for name, value in os.environ.items()
    if name.startswith("SPECLLAMA_")
}  # before a fixture takes them away
BENCH, MODEL = ENV.get("LLAMA_BENCH"), ENV.get("BENCH_MODEL")
THREADS = int(ENV.get("BENCH_THREADS", "2"))
LENGTHS = [int(n) for n in ENV.get("BENCH_LENGTHS", "512 2048 8192").split()]
READ = int(ENV.get("BENCH_READ", "16384"))
DEPTHS = [int(n) for n in ENV.get("BENCH_DEPTHS", "0 1024 4096").split()]
TOKENS = int(ENV.get("BENCH_TOKENS", "64"))
OURS, PLAIN, APART = "specllama", "llama.cpp f16/f16", "llama.cpp bf16/f16"
ENOUGH = 0.97  # of llama.cpp
CHUNK = 512  # tokens of a turn of reading: a pass of llama.cpp's default

pytestmark = [
    pytest.mark.timeout(0),
    pytest.mark.skipif(not MODEL, reason="needs a model"),
]

Arms = dict[str, CellLane]


@pytest.fixture(scope="module")
def arms() -> Iterator[Arms]:
    model = LlamaModel(Path(str(MODEL)), gpu_layers="0")
    n_ctx = max([*LENGTHS, *(d + TOKENS for d in DEPTHS)]) + 8

    def context(keys: str, n_batch: int | None, any_width: bool) -> CellLane:
        options = EngineOptions(kv_type_k=keys, kv_type_v="f16", n_batch=n_batch)
        pool = open_pool(
            model,
            n_ctx=n_ctx,
            max_rows=16,
            threads=THREADS,
            options=options.resolved(on_gpu=False),
            flash="on",
            any_width=any_width,
        )
        return pool.open()

    yield {
        OURS: context("f16", None, any_width=True),
        PLAIN: context("f16", CHUNK, any_width=False),
        APART: context("bf16", CHUNK, any_width=False),
    }
    model.close()


def text(arms: Arms, n: int) -> list[int]:
    return [300 + 7919 * i % (arms[OURS].n_vocab - 600) for i in range(n)]


def turns(arms: Arms) -> list[tuple[str, CellLane]]:
    """The arms in a new order."""
    return random.sample(list(arms.items()), len(arms))


def read(context: CellLane, tokens: list[int], *, row: bool) -> float:
    """Seconds of reading ``tokens``, with ``row`` up to the row behind them."""
    begin = perf_counter()
    for i in range(0, len(tokens), context.n_batch):
        part = tokens[i : i + context.n_batch]
        last = row and i + len(part) == len(tokens)
        context.forward(part, outputs="last" if last else "none")
    return perf_counter() - begin


def warm_up(arms: Arms, n: int) -> None:
    """Leave every arm with an empty cache, and its buffers and cells in memory."""
    for context in arms.values():
        context.rollback(0)
        read(context, text(arms, n), row=True)
        context.rollback(0)


def spread(values: list[float]) -> str:
    low, high = (quantiles(values, n=4)[i] for i in (0, 2)) if len(values) > 1 else values * 2
    return f"{median(values):.3f} (quarters {low:.3f} to {high:.3f})"


def share(what: str, tokens: int, seconds: dict[str, list[float]], rivals: list[str]) -> float:
    """Print all speeds; the median share of ours in the speed of the faster rival."""
    for name, times in seconds.items():
        share = [other / our for other, our in zip(times, seconds[OURS], strict=True)]
        ours = "" if name == OURS else f"; specllama has {spread(share)} of it"
        print(f"{what}: {name} {tokens * len(times) / sum(times):.1f} tok/s{ours}", flush=True)
    best = min(rivals, key=lambda name: median(seconds[name]))
    pairs = zip(seconds[best], seconds[OURS], strict=True)
    return median(other / our for other, our in pairs)


def beside(what: str, *flags: str) -> None:
    """Print what llama-bench says, where there is one."""
    flags = (*flags, "-ngl", "0", "-fa", "1", "-r", "1", "-b", "512", "-ub", "512", "-o", "json")
    for keys in ("f16", "bf16") if BENCH else ():
        done = subprocess.run(
            [str(BENCH), "-m", str(MODEL), "-t", str(THREADS), "-ctk", keys, "-ctv", "f16", *flags],
            check=True,
            capture_output=True,
        )
        speed = json.loads(done.stdout)[0]["avg_ts"]
        print(f"{what}: llama-bench {keys}/f16 {speed:.1f} tok/s", flush=True)


@pytest.mark.parametrize("n", LENGTHS)
def test_reading(arms: Arms, n: int) -> None:
    tokens = text(arms, n)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(max(READ // n, 3 if n <= 4096 else 1)):
        warm_up(arms, min(n, CHUNK))
        for i in range(0, n, CHUNK):
            part = tokens[i : i + CHUNK]
            for name, context in turns(arms):
                seconds[name].append(read(context, part, row=i + CHUNK >= n))
    ours = share(f"reading {n}", min(n, CHUNK), seconds, [PLAIN])
    beside(f"reading {n}", "-p", str(n), "-n", "0")
    assert ours >= ENOUGH


@pytest.mark.parametrize("depth", DEPTHS)
def test_decoding(arms: Arms, depth: int) -> None:
    for context in arms.values():
        context.rollback(0)
        read(context, text(arms, depth), row=False)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for step, token in enumerate(text(arms, TOKENS)):
        for name, context in turns(arms):
            begin = perf_counter()
            context.forward([token], outputs="all")
            if step >= 4:  # warm
                seconds[name].append(perf_counter() - begin)
    ours = share(f"decoding at {depth}", 1, seconds, [PLAIN, APART])
    beside(f"decoding at {depth}", "-p", "0", "-n", str(TOKENS), "-d", str(depth))
    assert ours >= ENOUGH

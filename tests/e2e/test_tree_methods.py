"""Trees on real files leave a cache like one that never drafted."""

from __future__ import annotations

import os
import random
from contextlib import closing

import numpy as np
import pytest

from specllama.backend.lane import CellLane
from specllama.backend.llama_pool import open_pool
from specllama.backend.tree_layout import Layout
from specllama.bench.prompts import BenchPrompt
from specllama.engine.engine import Engine
from specllama.settings.params import EngineOptions

pytestmark = pytest.mark.e2e

N_TREES = int(os.environ.get("SPECLLAMA_FUZZ_TREES", "60"))


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_the_cache_after_trees_is_that_of_a_fresh_context(
    tiny: Engine, prompts: list[BenchPrompt], shape: str
) -> None:
    """Random drafts and accepted paths; the next row must be that of a cache that never drafted.

    Passes of no more rows than the exactness class covers agree bit for bit.
    """
    tiny.reset()
    target = tiny.target
    assert isinstance(target, CellLane)
    exact = tiny.info.exact_rows > 1
    ids = tiny.encode(prompts[0].content)[0][:60]
    rng = random.Random(0)
    most = tiny.info.exact_rows if exact else 10
    worst = 0.0
    with closing(_plain_context(target, on_gpu=tiny.info.device == "GPU")) as plain:
        text = list(ids)
        for context in (target, plain):
            context.forward(text, outputs="none")
        for i in range(N_TREES):
            tokens = [rng.choice(ids) for _ in range(rng.randint(2, most))]
            parents = _parents(rng, len(tokens), shape, target.max_leaves)
            target.forward(tokens, outputs="all", parents=parents)
            path = _path(rng, parents)
            target.keep_path(path)
            text += [tokens[node] for node in path]
            assert target.tokens == text
            probe = rng.choice(ids)
            row = target.forward([probe], outputs="last")[0].copy()
            target.rollback(len(text))

            if i % 64 == 0:  # nothing is left of any earlier round
                plain.rollback(0)
                plain.forward(text[: len(ids)], outputs="none")
            for token in text[len(plain.tokens) :]:
                plain.forward([token], outputs="none")
            expected = plain.forward([probe], outputs="last")[0]
            if exact:
                assert np.array_equal(row, expected), f"round {i}"
            worst = max(worst, float(np.abs(row - expected).max() / expected.std()))
            assert worst < 0.2, f"round {i}"
            plain.rollback(len(text))
            if len(text) > 200:
                del text[rng.randint(len(ids), 100) :]
                for context in (target, plain):
                    context.rollback(len(text))
    print(f"{N_TREES} of shape {shape}: largest difference {worst:.1e} standard deviations")
    tiny.reset()


def _plain_context(target: CellLane, *, on_gpu: bool) -> CellLane:
    """A cache of the same model and settings that only takes chains."""
    options = EngineOptions().resolved(on_gpu=on_gpu)
    return open_pool(
        target.pool.model,
        n_ctx=512,
        max_rows=1,
        threads=target.pool.kernels.threads,
        options=options,
        flash=target.pool.kernels.flash,
    ).open()


def _parents(rng: random.Random, n: int, shape: str, max_leaves: int) -> list[int]:
    while True:
        near = 1 if shape == "chain" else 3
        parents = [-1, *(rng.randrange(max(0, i - near), i) for i in range(1, n))]
        if Layout().grown(parents).n_leaves <= max_leaves:
            return parents


def _path(rng: random.Random, parents: list[int]) -> list[int]:
    """From the root to any node, or nothing."""
    node, path = rng.randrange(-1, len(parents)), []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]

"""Trees, suffix copies and lookahead on real files: same seed, same text, and what is accepted."""

from __future__ import annotations

import random

import numpy as np
import pytest

from specllama.backend.llama import LlamaContext
from specllama.engine import Engine
from specllama.prompts import Prompt, load_prompts
from specllama.proof import prove
from specllama.spec.tree import layout

pytestmark = pytest.mark.e2e

METHODS = ("tree", "merged", "suffix", "lookahead")


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return load_prompts()


@pytest.mark.parametrize("proposer", METHODS)
def test_the_text_is_that_of_plain_decoding_up_to_near_ties(
    tiny: Engine, prompts: list[Prompt], proposer: str
) -> None:
    """Several rows in one pass may round otherwise than one row: such places are near-ties."""
    cases = list(
        prove(
            tiny,
            prompts[::40][:5],
            proposers=(proposer,),
            temperatures=(0.0, 1.0),
            draft_max=(6,),
            max_tokens=32,
        )
    )
    assert [c for c in cases if not c.ok] == []
    assert all(c.law_holds for c in cases)


def test_exact_passes_are_chains_and_change_nothing(tiny: Engine, prompts: list[Prompt]) -> None:
    cases = list(
        prove(
            tiny,
            prompts[:2],
            proposers=("tree", "suffix"),
            temperatures=(0.0,),
            draft_max=(6,),
            max_tokens=32,
            exact=True,
        )
    )
    assert [c for c in cases if not c.ok] == []


def test_the_cache_after_trees_is_that_of_a_fresh_context(
    tiny: Engine, prompts: list[Prompt]
) -> None:
    """Random trees and accepted paths on the bundled target."""
    tiny.reset()
    target = tiny.target
    assert isinstance(target, LlamaContext)
    ids = tiny.encode(prompts[0].content)[0][:60]
    rng = random.Random(0)
    text = list(ids)
    target.forward(text, outputs="none")
    checks: list[tuple[list[int], np.ndarray]] = []
    for _ in range(40):
        n = rng.randint(2, 10)
        parents = [-1, *(rng.randrange(max(0, i - 3), i) for i in range(1, n))]
        if layout(parents).n_leaves > target.max_leaves:
            continue
        tokens = [rng.choice(ids) for _ in range(n)]
        target.forward(tokens, outputs="all", parents=parents)
        node, path = rng.randrange(n), []
        while node >= 0:
            path.append(node)
            node = parents[node]
        target.keep_path(path[::-1])
        text += [tokens[i] for i in path[::-1]]
        assert target.tokens == text
        row = target.forward([ids[0]], outputs="last")[0].copy()
        target.rollback(len(text))
        checks.append(([*text, ids[0]], row))
        if len(text) > 200:
            del text[rng.randint(40, 100) :]
            target.rollback(len(text))
    assert len(checks) > 20
    for tokens, row in checks[::2]:
        target.rollback(0)
        expected = target.forward(tokens, outputs="last")[0]
        assert np.abs(row - expected).max() < 0.2 * expected.std()
    tiny.reset()

"""Tree passes on llama.cpp: the rows of a chain, the right cache afterwards, refusals.

Bits: with flash attention on and one thread a query visits its cells one by one, so rows of a tree
equal single-row decoding exactly. Without flash attention a pass of several rows and a pass of one
use other kernels, for chains and trees alike: in a few rows of a hundred an activation rounds the
other way and the logits move by up to a tenth of their spread. F32 weights never round alike.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ggufs import write_llama, write_mamba

from specllama.backend.base import Part
from specllama.backend.lane import CellLane
from specllama.backend.llama import LlamaModel
from specllama.backend.llama_pool import open_pool
from specllama.backend.tree_layout import Layout
from specllama.errors import Cancelled, ContextFull, EngineError
from specllama.settings.params import EngineOptions

OPTIONS = EngineOptions(n_ctx=256)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LlamaModel]]:
    folder = tmp_path_factory.mktemp("models")
    loaded = {
        quant: LlamaModel(
            write_llama(folder / f"{quant}.gguf", quant=quant, heads=4, heads_kv=2),
            pre="gpt-2",
            repack=False,  # else some processors compute wide passes otherwise
        )
        for quant in ("Q4_0", "Q8_0", "F32")
    }
    yield loaded
    for model in loaded.values():
        model.close()


def context(model: LlamaModel, leaves: int = 1, flash: str = "off") -> CellLane:
    return open_pool(
        model, n_ctx=256, max_rows=33, threads=1, options=OPTIONS, flash=flash, max_leaves=leaves
    ).open()


def tree(rng: random.Random, n: int, leaves: int) -> list[int]:
    """Parents of a random tree of ``n`` nodes under one root, with few enough leaves."""
    while True:
        parents = [-1, *(rng.randrange(max(0, i - 4), i) for i in range(1, n))]
        if Layout().grown(parents).n_leaves <= leaves:
            return parents


def paths(parents: list[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for i, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), i])
    return found


def some(rng: random.Random, n: int, n_vocab: int) -> list[int]:
    return [rng.randrange(3, n_vocab) for _ in range(n)]


@pytest.mark.parametrize("quant", ["Q4_0", "Q8_0", "F32"])
@pytest.mark.parametrize("flash", ["off", "on"])
def test_a_tree_capable_context_computes_chains_bit_for_bit_as_a_plain_one(
    models: dict[str, LlamaModel], quant: str, flash: str
) -> None:
    model, rng = models[quant], random.Random(1)
    plain, capable = context(model, flash=flash), context(model, 8, flash)
    for n in (40, 1, 2, 5, 8, 1, 16, 1):
        tokens = some(rng, n, plain.n_vocab)
        a = plain.forward(tokens, outputs="all" if n < 33 else "last").copy()
        assert np.array_equal(a, capable.forward(tokens, outputs="all" if n < 33 else "last"))


@pytest.mark.parametrize(
    ("quant", "flash", "tolerance"),
    [("Q4_0", "on", 0.0), ("Q8_0", "on", 0.0), ("Q4_0", "off", 0.2), ("Q8_0", "off", 0.2),
     ("F32", "off", 2e-3)],
)  # fmt: skip
def test_tree_rows_are_the_rows_of_their_own_chains(
    models: dict[str, LlamaModel], quant: str, flash: str, tolerance: float
) -> None:
    model, rng = models[quant], random.Random(2)
    one, many = context(model, flash=flash), context(model, 8, flash)
    prefix = some(rng, 50, one.n_vocab)
    one.forward(prefix, outputs="none")
    many.forward(prefix, outputs="none")
    for _ in range(20):
        parents = tree(rng, rng.randint(2, 12), 8)
        tokens = some(rng, len(parents), one.n_vocab)
        rows = many.forward(tokens, outputs="all", parents=parents).copy()
        for path in paths(parents):
            one.rollback(len(prefix))
            for node in path:
                row = one.forward([tokens[node]], outputs="last")[0]
            assert np.abs(row - rows[path[-1]]).max() <= tolerance * row.std()
        many.rollback(len(prefix))


def test_a_tree_that_grows_pass_by_pass_has_the_same_rows_and_any_path_can_stay(
    models: dict[str, LlamaModel],
) -> None:
    """Two conversations grow theirs in the same passes; a line that was read becomes a tree."""
    model, rng = models["Q4_0"], random.Random(4)
    one = context(model, flash="on")
    pool = open_pool(
        model, n_ctx=256, max_rows=33, threads=1, options=OPTIONS, flash="on", max_leaves=16,
        lanes=2, any_width=False,
    )  # fmt: skip
    lanes = [pool.open(), pool.open()]
    texts = [some(rng, 20 + i, one.n_vocab) for i in range(2)]
    for lane, text in zip(lanes, texts, strict=True):
        lane.forward(text, outputs="none")
    for _ in range(12):
        grown = []
        for lane in lanes:
            line = rng.randrange(3)
            tokens = some(rng, line, one.n_vocab)
            for token in tokens:
                lane.forward([token], outputs="last")
            lane.reopen(line)
            grown.append((tokens, list(range(-1, line - 1))))
        for _ in range(3):
            parts = []
            for lane, (tokens, parents) in zip(lanes, grown, strict=True):
                known, more = len(tokens), rng.randint(1, 3)
                tokens += some(rng, more, one.n_vocab)
                parents += [rng.randrange(-1, i) if i else -1 for i in range(known, known + more)]
                parts.append(Part(lane, tokens[known:], "all", parents[known:]))
            pool.run(parts)
            rows = [part.rows.copy() for part in parts]
            for part, row, text, (tokens, parents) in zip(parts, rows, texts, grown, strict=True):
                known = len(tokens) - len(part.tokens)
                for node in range(known, len(tokens)):
                    one.rollback(0)
                    path = [tokens[i] for i in Layout().grown(parents).above(node)]
                    expected = one.forward([*text, *path], outputs="last")[0]
                    assert np.abs(row[node - known] - expected).max() <= 0.2 * expected.std()
        for i, (lane, (tokens, parents)) in enumerate(zip(lanes, grown, strict=True)):
            path = Layout().grown(parents).above(rng.randrange(-1, len(parents)))
            lane.keep_path(path)
            texts[i] = [*texts[i], *(tokens[node] for node in path)][:40]
            lane.rollback(len(texts[i]))
            assert (lane.tokens, lane.n_past) == (texts[i], len(texts[i]))
    assert pool.free_leaves == 15


@pytest.mark.parametrize("quant", ["F32", "Q4_0"])
def test_after_keep_path_the_cache_is_that_of_a_fresh_context(
    models: dict[str, LlamaModel], quant: str
) -> None:
    """Random trees, accepted paths, chains and rollbacks in between."""
    model, rng = models[quant], random.Random(3)
    used, fresh = context(model, 8), context(model)
    tolerance = 2e-3 if quant == "F32" else 0.2
    text = some(rng, 5, used.n_vocab)
    used.forward(text, outputs="none")
    for _ in range(60):
        if len(text) > 120:
            text = text[: rng.randint(1, 60)]
            used.rollback(len(text))
        parents = tree(rng, rng.randint(2, 10), 8)
        tokens = some(rng, len(parents), used.n_vocab)
        used.forward(tokens, outputs="all", parents=parents)
        if rng.random() < 0.1:
            used.rollback(len(text))  # the pass is given up
        else:
            path = rng.choice([[], *paths(parents)])
            used.keep_path(path)
            text += [tokens[node] for node in path]
        assert used.tokens == text
        assert used.n_past == len(text)
        probe = some(rng, 1, used.n_vocab)
        row = used.forward(probe, outputs="last")[0].copy()
        fresh.rollback(0)
        expected = fresh.forward([*text, *probe], outputs="last")[0]
        assert np.abs(row - expected).max() <= tolerance * expected.std()
        used.rollback(len(text))


def test_several_roots_may_hang_on_the_cached_prefix(models: dict[str, LlamaModel]) -> None:
    one, many = context(models["F32"]), context(models["F32"], 4)
    for c in (one, many):
        c.forward([5, 6, 7], outputs="none")
    rows = many.forward([8, 9, 10], outputs="all", parents=[-1, -1, 1]).copy()
    many.keep_path([1, 2])
    assert many.tokens == [5, 6, 7, 9, 10]
    expected = one.forward([9, 10], outputs="all")
    assert np.allclose(rows[1:], expected, atol=2e-3 * expected.std())


def test_what_llama_would_abort_on_is_refused_and_changes_nothing(
    models: dict[str, LlamaModel],
) -> None:
    c = context(models["Q8_0"], 2)
    c.forward([3, 4], outputs="none")
    with pytest.raises(EngineError, match="at most 2 leaves"):
        c.forward([5, 6, 7, 8], outputs="all", parents=[-1, 0, 0, 0])
    with pytest.raises(ValueError, match="precede"):
        c.forward([5, 6], outputs="all", parents=[-1, 1])
    with pytest.raises(ValueError, match="parents"):
        c.forward([5, 6], outputs="all", parents=[-1])
    with pytest.raises(EngineError, match="no tree"):
        c.keep_path([])
    with pytest.raises(EngineError, match="vocabulary"):
        c.forward([5, c.n_vocab], outputs="all", parents=[-1, -1])
    c.rollback(0)
    c.forward([3] * 250, outputs="none")
    with pytest.raises(ContextFull):
        c.forward([5] * 7, outputs="all", parents=[-1, 0, 1, 2, 3, 4, 4])
    c.rollback(2)
    c.forward([5, 6, 7], outputs="all", parents=[-1, 0, 0])
    with pytest.raises(EngineError, match="settled"):
        c.forward([9], outputs="last")
    for path in ([1], [0, 1, 2], [3], [-1]):
        with pytest.raises(ValueError, match="path"):
            c.keep_path(path)
    c.keep_path([0, 2])
    assert c.tokens == [3, 3, 5, 7]
    assert c.n_past == 4


def test_an_unsettled_tree_can_be_rolled_back(models: dict[str, LlamaModel]) -> None:
    c = context(models["Q8_0"], 4)
    c.forward([3, 4], outputs="none")
    c.forward([5, 6, 7], outputs="all", parents=[-1, 0, 0])
    c.rollback(2)
    assert (c.tokens, c.n_past) == ([3, 4], 2)
    c.forward([5, 6, 7], outputs="all", parents=[-1, 0, 0])
    c.rollback(0)
    assert (c.tokens, c.n_past) == ([], 0)


def test_an_aborted_tree_pass_leaves_the_cache_as_it_was(models: dict[str, LlamaModel]) -> None:
    c = context(models["F32"], 4)
    c.forward([3, 4], outputs="none")
    models["F32"].stop.set()
    with pytest.raises(Cancelled):
        c.forward([5, 6, 7], outputs="all", parents=[-1, 0, 0])
    models["F32"].stop.clear()
    assert (c.tokens, c.n_past) == ([3, 4], 2)
    c.forward([5, 6, 7], outputs="all", parents=[-1, 0, 0])
    c.keep_path([0, 1])
    assert c.n_past == 4


def test_models_that_keep_a_running_state_take_chains_only(tmp_path: Path) -> None:
    model = LlamaModel(write_mamba(tmp_path / "mamba.gguf"), pre="gpt-2")
    c = context(model, 8)
    assert c.max_leaves == 1
    with pytest.raises(EngineError, match="tree"):
        c.forward([5, 6, 7], outputs="all", parents=[-1, 0, 0])
    model.close()

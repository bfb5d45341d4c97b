"""EAGLE-3 heads through llama.cpp: the same numbers as NumPy, wrong files refused, states captured.

Weights are random: nothing here depends on what a head has learnt.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eagle_files import NumpyHead, write_eagle3
from ggufs import bpe_tokens, write_llama

from specllama.arrays import HiddenNeed, Rows
from specllama.backend import capture
from specllama.backend.eagle3_context import EagleContext
from specllama.backend.lane import CellLane
from specllama.backend.llama import LlamaModel
from specllama.backend.llama_pool import open_pool
from specllama.engine.engine import Engine
from specllama.errors import BadGguf, CannotLoad, PairIncompatible, SpecllamaError
from specllama.events import Finished, RoundDone
from specllama.models.eagle3_file import read_facts
from specllama.models.gguf import read_header
from specllama.models.tensors import read_tensor
from specllama.params import EngineOptions, GenerateParams, SamplingParams
from specllama.speculative.drafting.eagle3 import EagleDrafter

OPTIONS = EngineOptions(threads=1, check_memory=False).resolved(on_gpu=False)
VOCAB = len(bpe_tokens()[0])
KINDS: dict[str, dict[str, Any]] = {
    "borrows": {},
    "draft vocabulary": {"draft_ids": sorted(range(3, VOCAB, 2)), "own_embedding": True},
    "own matrices": {
        "own_embedding": True,
        "own_output": True,
        "width": 32,
        "norm_before_residual": True,
    },
}


@pytest.fixture(scope="module")
def target_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("eagle") / "target.gguf", blocks=4)


@pytest.fixture
def target(target_file: Path) -> Iterator[CellLane]:
    model = LlamaModel(target_file)
    yield open_pool(
        model,
        n_ctx=256,
        max_rows=32,
        threads=1,
        options=OPTIONS,
        flash=OPTIONS.flash_attn,
        max_leaves=8,
    ).open()
    model.close()


def open_head(path: Path, target: CellLane) -> EagleContext:
    facts = read_facts(read_header(path))
    target.pool.offer_layers(facts.layers)
    target.capture("layer_inputs")
    return EagleContext(LlamaModel(path, head=True), target.pool, target, facts, threads=1)


def texts(seed: int, n: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, VOCAB, n)]


# -- the same numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_numpy(
    target: CellLane, target_file: Path, tmp_path: Path, kind: str
) -> None:
    """Known text with the target's states, then a guessed branch on the head's own, then another.

    F16 keys and values of the head's cache are the difference that is left.
    """
    path = write_eagle3(tmp_path / "head.gguf", **KINDS[kind])
    head, reference = open_head(path, target), NumpyHead(path, target_file)
    text = texts(1, 40)
    target.forward(text[:-1], outputs="none")
    features = target.hidden.rows(0, 39)
    assert features is not None
    fused = reference.fuse(features)
    head.fuse()
    row = head.forward(text, outputs="last")
    logits, own = reference.run(text[1:], fused)
    same(row[0], logits[-1])
    for branch in ([7, 9, 200], [7, 11], [30, 31, 32, 33]):
        head.rollback(len(text))
        states, tokens = fused, text[1:]
        for token in branch:
            states = np.concatenate((states, own[-1:]))
            tokens = [*tokens, token]
            row = head.forward([token], outputs="last")
            logits, own = reference.run(tokens, states)
            same(row[0], logits[-1])
        _, own = reference.run(text[1:], fused)
    head.close()


def same(got: Rows, wanted: Rows) -> None:
    said = np.isfinite(wanted)
    assert (np.isfinite(got) == said).all()
    assert np.abs(got[said] - wanted[said]).max() < 3e-2
    assert wanted[said].std() > 0.5  # the test is about numbers that differ


def test_a_branch_read_at_once_gives_the_same_as_step_by_step(
    target: CellLane, tmp_path: Path
) -> None:
    head = open_head(write_eagle3(tmp_path / "head.gguf"), target)
    text = texts(2, 20)
    target.forward(text[:-1], outputs="none")
    head.fuse()
    head.forward(text, outputs="last")
    steps = [head.forward([t], outputs="last")[0].copy() for t in (5, 6, 7)]
    head.rollback(len(text))
    assert np.abs(head.forward([5, 6, 7], outputs="last")[0] - steps[-1]).max() < 1e-4
    head.close()


def test_after_any_rounds_the_cache_is_that_of_a_fresh_head(
    target: CellLane, tmp_path: Path
) -> None:
    """Drafts with own states, rejected and accepted, edits and deep rollbacks, by chance."""
    path = write_eagle3(tmp_path / "head.gguf")
    head = open_head(path, target)
    rng = random.Random(3)
    text = texts(3, 12)
    target.forward(text[:-1], outputs="none")
    for turn in range(120):
        head.fuse()
        head.rollback(min(head.settled, len(head.tokens)))
        agreed = min(len(head.tokens), len(text) - 1)
        while head.tokens[:agreed] != text[:agreed]:
            agreed -= 1
        head.rollback(agreed)
        row = head.forward(text[agreed:], outputs="last")[0].copy()
        if turn % 8 == 0:
            whole, got = LlamaFresh(target, text, path), row
            assert np.abs(whole.row - got).max() < 3e-2
        drafted = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(5))]
        for token in drafted:
            head.forward([token], outputs="last")
        target.forward([text[-1], *drafted], outputs="all")
        kept = rng.randrange(len(drafted) + 1)
        target.rollback(len(text) + kept)
        text = [*text, *drafted[:kept], rng.randrange(3, VOCAB)]
        if rng.random() < 0.15 or len(text) > 200:
            text = [*text[: rng.randrange(2, 12)], rng.randrange(3, VOCAB)]
            target.rollback(len(text) - 1)
        assert head.n_past == len(head.tokens)
    head.close()


class LlamaFresh:
    """The head's answer to a text that a new target context has just read."""

    def __init__(self, like: CellLane, text: list[int], head: Path) -> None:
        target = open_pool(
            like.pool.model,
            n_ctx=256,
            max_rows=32,
            threads=1,
            options=OPTIONS,
            flash=OPTIONS.flash_attn,
        ).open()
        context = open_head(head, target)
        target.forward(text[:-1], outputs="none")
        context.fuse()
        self.row = context.forward(text, outputs="last")[0].copy()
        context.close()
        target.close()


# -- captured states ----------------------------------------------------------------------------


@pytest.mark.parametrize("need", ["final_hidden", "layer_inputs"])
def test_taking_states_out_changes_no_bit_of_the_logits(target: CellLane, need: HiddenNeed) -> None:
    target.pool.offer_layers((1, 2, 3))

    def passes() -> list[Rows]:
        target.rollback(0)
        target.forward(texts(4, 50), outputs="none")
        found = [target.forward(texts(n, n), outputs="all").copy() for n in (1, 1, 7, 3, 16, 2)]
        found.append(target.forward([5, 6, 7], outputs="all", parents=[-1, 0, 0]).copy())
        target.keep_path([0, 2])
        return [*found, target.forward([9], outputs="all").copy()]

    plain = passes()
    target.capture(need)
    taken = passes()
    target.capture("nothing")
    for a, b, c in zip(plain, taken, passes(), strict=True):
        assert (a == b).all()
        assert (a == c).all()


def test_states_belong_to_their_positions(target: CellLane, target_file: Path) -> None:
    """Through a chain, a tree and rollbacks: the input of layer 0 is the token's embedding."""
    table = read_tensor(read_header(target_file), "token_embd.weight")
    target.pool.offer_layers((0, 1, 2))
    target.capture("layer_inputs")
    target.forward(texts(5, 20), outputs="none")
    target.forward([4, 5, 6, 7, 8], outputs="all", parents=[-1, 0, 0, 2, 1])
    target.keep_path([0, 2, 3])
    target.forward([9, 10], outputs="all")
    target.rollback(24)
    rows = target.hidden.rows(0, 24)
    assert target.tokens[20:] == [4, 6, 7, 9]
    assert rows is not None
    assert np.array_equal(rows[:, : table.shape[1]], table[target.tokens])
    target.hidden.forget(10)
    assert target.hidden.rows(9, 12) is None
    assert target.hidden.rows(10, 25) is None
    kept = target.hidden.rows(10, 24)
    assert kept is not None
    assert np.array_equal(kept[:, : table.shape[1]], table[target.tokens[10:]])


def test_final_states_give_the_logits(target: CellLane, target_file: Path) -> None:
    output = read_tensor(read_header(target_file), "output.weight")
    target.capture("final_hidden")
    target.forward(texts(6, 20), outputs="none")
    rows = target.forward([5, 6, 7, 8], outputs="all", parents=[-1, 0, 1, 0]).copy()
    target.keep_path([0, 3])
    states = target.hidden.rows(20, 22)
    assert states is not None
    assert np.abs(states @ output.T - rows[[0, 3]]).max() < 1e-3


# -- wrong files --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"target_width": 128}, "hidden states of width 128"),
        ({"layers": (1, 2, 4)}, "input of layer 4"),
        ({"tokens": bpe_tokens()[0][:-1]}, f"knows {VOCAB - 1} tokens"),
        ({"tokens": [t + "x" for t in bpe_tokens()[0]]}, "tokens have another text"),
        ({"width": 32}, "borrows matrices of width 32"),
    ],
)
def test_a_head_of_another_target_is_refused(
    target_file: Path, tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    path = write_eagle3(tmp_path / "head.gguf", **wrong)
    error = refused(target_file, path)
    assert isinstance(error, PairIncompatible)
    assert error.exit_code == 4
    assert "head.gguf" in error.message
    assert message in error.message
    assert error.hint


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": (1, 2)},
        {"layers": (-1, 2, 3)},
        {"keys": {"eagle3.block_count": 2}},
        {"keys": {"eagle3.attention.value_length": 16}},
        {"keys": {"eagle3.target_hidden_size": 0}},
        {"keys": {"eagle3.target_hidden_size": None}},
        {"keys": {"eagle3.attention.head_count": 0}},
        {"draft_ids": [3, 4, VOCAB]},
        {"draft_ids": [3, 4, -1]},
        {"draft_ids": [3, 4, 4]},
        {"draft_ids": [3, 4, 5], "leave_out": ("output.weight",)},
        {"leave_out": ("fc.weight",)},
        {"leave_out": ("blk.0.attn_k.weight",)},
        {"draft_ids": [3, 4, 5], "leave_out": ("d2t",)},
    ],
)
def test_a_damaged_head_is_an_error_and_no_crash(
    target_file: Path, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    error = refused(target_file, write_eagle3(tmp_path / "head.gguf", **wrong))
    assert isinstance(error, BadGguf | PairIncompatible | CannotLoad)
    assert error.exit_code in (4, 5)


def test_a_cut_head_is_refused(target_file: Path, tmp_path: Path) -> None:
    path = write_eagle3(tmp_path / "head.gguf", draft_ids=[3, 4, 5])
    path.write_bytes(path.read_bytes()[:-2048])
    assert refused(target_file, path).exit_code == 5


def test_a_model_is_no_head(target_file: Path) -> None:
    error = refused(target_file, target_file)
    assert isinstance(error, PairIncompatible)
    assert "no drafting head" in error.message


def test_two_heads_of_a_kind_are_refused(target_file: Path, tmp_path: Path) -> None:
    path = write_eagle3(tmp_path / "head.gguf")
    assert refused(target_file, path, path).exit_code == 4


def test_a_target_without_the_hook_is_refused(
    target_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "LAYER_INPUT_ARCHITECTURES", frozenset({"qwen3"}))
    error = refused(target_file, write_eagle3(tmp_path / "head.gguf"))
    assert isinstance(error, PairIncompatible)
    assert "layer inputs of llama models" in error.message


def refused(target: Path, *heads: Path) -> SpecllamaError:
    options = EngineOptions(threads=1, heads=tuple(str(head) for head in heads))
    with pytest.raises(SpecllamaError) as caught:
        Engine.load(target, None, options)
    return caught.value


# -- whole replies ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(target_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = write_eagle3(tmp_path_factory.mktemp("head") / "head.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(tmp_path_factory.mktemp("home")))
        with Engine.load(target_file, None, EngineOptions(threads=1, heads=(str(path),))) as engine:
            yield engine


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_one_text_per_seed_with_the_head_and_without(engine: Engine, temperature: float) -> None:
    """F32 targets round wide passes otherwise, by far less than the leads of these texts."""
    params = GenerateParams(
        sampling=SamplingParams(temperature=temperature, min_p=0.0, top_k=0),
        max_tokens=40,
        seed=7,
        proposer="eagle3",
        draft_max=6,
        window="fixed",
        ignore_eos=True,
    )
    plain = finish(engine, params.replace(speculate=False))
    drafted = finish(engine, params)
    assert drafted.token_ids == plain.token_ids
    assert drafted.proposer == "eagle3"
    assert drafted.draft_n > 0


def test_a_tree_is_drafted_where_the_target_takes_one(engine: Engine) -> None:
    params = GenerateParams(
        sampling=SamplingParams(temperature=1.0, min_p=0.0, top_k=0),
        max_tokens=40, seed=7, proposer="eagle3", draft_max=8, window="fixed", ignore_eos=True,
    )  # fmt: skip
    events = list(engine.generate(texts(8, 30), params))
    rounds = [e for e in events if isinstance(e, RoundDone)]
    assert any(e.parents != tuple(range(-1, len(e.parents) - 1)) for e in rounds)
    proposer = engine.drafter("eagle3")
    assert isinstance(proposer, EagleDrafter)
    # another method in between: what the head knows of the text is out of date, and it copes
    list(engine.generate(texts(9, 20), params.replace(proposer="ngram")))
    again = finish(engine, params)
    assert again.token_ids == next(e for e in events if isinstance(e, Finished)).token_ids


def finish(engine: Engine, params: GenerateParams) -> Finished:
    events = list(engine.generate(texts(8, 30), params))
    return next(e for e in events if isinstance(e, Finished))

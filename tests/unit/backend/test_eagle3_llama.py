"""EAGLE-3 heads through llama.cpp: the same numbers as NumPy, wrong files refused, states captured.

Weights are random: nothing here depends on what a head has learnt.
"""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp as ll
import numpy as np
import pytest
from eagle_files import NumpyHead, write_eagle3
from ggufs import bpe_tokens, write_llama
from head_lanes import VOCAB, begin_at, encode, feed, grow, refused, same, texts
from requests_made import asked, finish

from specllama.arrays import HiddenNeed, Rows
from specllama.backend import capture, threads
from specllama.backend.heads.head_pool import HeadLane, HeadPool
from specllama.backend.heads.llama_heads import eagle_pool
from specllama.backend.lane import CellLane
from specllama.backend.llama import LlamaModel
from specllama.backend.threads import ThreadChoice
from specllama.engine.engine import Engine
from specllama.errors import BadGguf, CannotLoad, PairIncompatible
from specllama.events import Finished, RoundDone, Started
from specllama.models.eagle3_file import read_facts
from specllama.models.gguf import read_header
from specllama.models.tensors import read_tensor
from specllama.settings.params import EngineOptions, GenerateParams
from specllama.speculative.drafting.eagle3 import EagleDrafter

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


def open_head(path: Path, target: CellLane, lanes: int = 1) -> HeadPool:
    facts = read_facts(read_header(path))
    target.capture(facts.layers)
    return eagle_pool(LlamaModel(path, head=True), target.pool, facts, threads=1, lanes=lanes)


def fused(head: HeadLane, target: CellLane, text: list[int]) -> Rows:
    """The head's states behind every token of ``text``, which the target has just read."""
    features = target.hidden.rows(0, len(text))
    assert features is not None
    return encode(head, features)


def test_its_threads_are_those_that_are_faster_now(
    target: CellLane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = open_head(write_eagle3(tmp_path / "head.gguf"), target)
    head.threads.use(2)
    head.threads.most, head.threads.choice = 2, ThreadChoice(2)
    clock, used = itertools.count(), list[int]()

    def seconds() -> float:
        """A neighbor holds one of two cores: both together take four times as long."""
        count = int(ll.llama_n_threads(head.handle))
        used.append(count)
        return next(clock) * (1.0, 4.0)[count - 1]

    monkeypatch.setattr(threads, "perf_counter", seconds)
    lane, text = head.open(), texts(1, 40)
    target.forward(text, outputs="none")
    left = fused(lane, target, text)
    for i in range(39):
        feed(lane, text[i + 1 : i + 2], left[i : i + 1])
    assert used[0] == 2
    assert set(used[-20:]) == {1}


# -- the same numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_numpy(
    target: CellLane, target_file: Path, tmp_path: Path, kind: str
) -> None:
    """Known text with the target's states, then a guessed branch on the head's own, then another.

    F16 keys and values of the head's cache are the difference that is left.
    """
    path = write_eagle3(tmp_path / "head.gguf", **KINDS[kind])
    context, reference = open_head(path, target), NumpyHead(path, target_file)
    head = context.open()
    text = texts(1, 40)
    target.forward(text[:-1], outputs="none")
    features = target.hidden.rows(0, 39)
    assert features is not None
    states = reference.fuse(features)
    assert np.abs(encode(head, features) - states).max() < 1e-2
    begin_at(head, 1)
    row, state = feed(head, text[1:], encode(head, features))
    logits, own = reference.run(text[1:], states)
    same(row, logits[-1])
    for branch in ([7, 9, 200], [7, 11], [30, 31, 32, 33]):
        head.rollback(len(text))
        beside, tokens, ahead = states, text[1:], state
        for token in branch:
            beside = np.concatenate((beside, own[-1:]))
            tokens = [*tokens, token]
            row, ahead = feed(head, [token], ahead[None])
            logits, own = reference.run(tokens, beside)
            same(row, logits[-1])
        _, own = reference.run(text[1:], states)
    context.close()


@pytest.mark.parametrize("n", [3, 16, 17, 40])
def test_pairs_read_at_once_give_the_same_as_step_by_step(
    target: CellLane, tmp_path: Path, n: int
) -> None:
    context = open_head(write_eagle3(tmp_path / "head.gguf"), target)
    head = context.open()
    text = texts(2, n)
    target.forward(text, outputs="none")
    states = fused(head, target, text)
    steps = [feed(head, [t], states[i : i + 1]) for i, t in enumerate(text)]
    row, state = steps[-1][0].copy(), steps[-1][1]
    begin_at(head, 0)
    again, behind = feed(head, text, states)
    assert np.abs(again - row).max() < 1e-3
    assert np.abs(behind - state).max() < 1e-3
    assert head.n_past == head.end == n
    context.close()


def test_a_tree_has_the_rows_of_its_chains_and_leaves_nothing_behind(
    target: CellLane, tmp_path: Path
) -> None:
    context = open_head(write_eagle3(tmp_path / "head.gguf"), target, lanes=2)
    alone = open_head(write_eagle3(tmp_path / "alone.gguf"), target).open()
    rng, noise, lanes = random.Random(5), np.random.default_rng(5), [context.open() for _ in "ab"]
    for turn in range(24):
        lane, n = lanes[turn % 2], rng.randint(1, 30)
        text = [rng.randrange(3, VOCAB) for _ in range(n)]
        states = noise.normal(size=(n, context.graph.reads)).astype(np.float32)
        begin_at(lane, 0)
        _, state = feed(lane, text, states)
        behind, nodes = {(): state}, {(): -1}
        for _ in range(3):
            fed = [
                (*rng.choice([*behind]), rng.randrange(3, VOCAB)) for _ in range(rng.randint(1, 3))
            ]
            fed = [path for path in dict.fromkeys(fed) if path not in nodes]
            nodes |= {path: node for node, path in enumerate(fed, len(nodes) - 1)}
            own = np.stack([behind[path[:-1]] for path in fed])
            if len(context._branches) < 3:
                break  # another's tree has them
            rows, after = grow(
                lane, [path[-1] for path in fed], own, [nodes[path[:-1]] for path in fed]
            )
            for path, row, state in zip(fed, rows, after, strict=True):
                known = np.stack([behind[path[:i]] for i in range(len(path))])
                begin_at(alone, 0)
                expected, ahead = feed(alone, [*text, *path], np.concatenate((states, known)))
                assert np.abs(row - expected).max() < 3e-2
                assert np.abs(state - ahead).max() < 3e-2
                behind[path] = state
        if turn % 3:
            lane.rollback(rng.randint(0, n))
            assert lane.n_past == lane.end
    for lane in lanes:
        begin_at(lane, 0)
    assert len(context._branches) == 7
    context.close()


# -- captured states ----------------------------------------------------------------------------


@pytest.mark.parametrize("need", ["final_hidden", (1, 2, 3)])
def test_taking_states_out_changes_no_bit_of_the_logits(target: CellLane, need: HiddenNeed) -> None:
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
    target.capture((0, 1, 2))
    target.forward(texts(5, 20), outputs="none")
    target.forward([4, 5, 6, 7, 8], outputs="all", parents=[-1, 0, 0, 2, 1])
    target.keep_path([0, 2, 3])
    target.forward([9, 10], outputs="all")
    target.rollback(24)
    rows = target.hidden.rows(0, 24)
    assert target.tokens[20:] == [4, 6, 7, 9]
    assert np.array_equal(rows[:, : table.shape[1]], table[target.tokens])
    target.hidden.forget(10)
    assert target.hidden.rows(9, 12) is None
    assert target.hidden.rows(10, 25) is None
    kept = target.hidden.rows(10, 24)
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
    error = refused(target_file, write_eagle3(tmp_path / "head.gguf", **wrong))
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


# -- whole replies ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(target_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = write_eagle3(tmp_path_factory.mktemp("head") / "head.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(tmp_path_factory.mktemp("home")))
        with Engine.load(target_file, None, EngineOptions(threads=1, heads=(str(path),))) as engine:
            yield engine


def test_a_tree_is_drafted_where_the_target_takes_one(engine: Engine) -> None:
    params = request(1.0, draft_max=8)
    events = list(engine.generate(texts(8, 30), params))
    rounds = [e for e in events if isinstance(e, RoundDone)]
    assert any(e.parents != tuple(range(-1, len(e.parents) - 1)) for e in rounds)
    assert isinstance(engine.drafters["eagle3"], EagleDrafter)
    # another method in between: what the head knows of the text is out of date, and it copes
    list(engine.generate(texts(9, 20), params.replace(proposer="ngram")))
    again = written(engine, params)
    assert again.token_ids == next(e for e in events if isinstance(e, Finished)).token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_of_the_last_state_drafts_for_an_architecture_that_gives_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    monkeypatch.setenv("SPECLLAMA_HOME", str(tmp_path / "home"))
    target = write_llama(tmp_path / "target.gguf", blocks=4, architecture="qwen2")
    path = write_eagle3(tmp_path / "head.gguf", layers=(4, 4, 4))
    drafts, prompt, known = request(temperature, draft_max=4), texts(8, 30), 0
    with Engine.load(target, None, EngineOptions(threads=1, heads=(str(path),))) as engine:
        for turn in range(3):
            events = list(engine.generate(prompt, drafts))
            started, done = events[0], events[-1]
            assert isinstance(started, Started)
            assert isinstance(done, Finished)
            assert any(e.drafted for e in events if isinstance(e, RoundDone))
            assert started.cached_n >= known, "nothing is read again for its states"
            plain = finish(engine, prompt, drafts.replace(proposer="none"))
            assert plain.token_ids == done.token_ids
            prompt = [*prompt, *done.token_ids, *texts(9 + turn, 5)]
            known = len(prompt) - 6


def written(engine: Engine, params: GenerateParams) -> Finished:
    return finish(engine, texts(8, 30), params)


def request(temperature: float, draft_max: int) -> GenerateParams:
    params = asked("eagle3", temperature, free=True, max_tokens=40, seed=7, draft_max=draft_max)
    return params.choose("top_p", 0.95)

"""DFlash, DFlash2 and DSpark drafters through llama.cpp: the same numbers as NumPy, wrong files
refused, one text per seed.

Weights are random: nothing here depends on what a drafter has learnt.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_files import CANDIDATES, NumpyDrafter, write_dflash
from eagle_files import write_eagle3
from ggufs import bpe_tokens
from head_lanes import VOCAB, begin_at, read, refused, same, texts
from requests_made import asked, finish

from specllama.arrays import Rows
from specllama.backend.base import Part
from specllama.backend.heads.head_pool import HeadLane
from specllama.backend.heads.llama_heads import DflashPool, MarkovRows
from specllama.backend.lane import CellLane
from specllama.backend.llama import LlamaModel
from specllama.engine.engine import Engine
from specllama.errors import (
    BadGguf,
    CannotLoad,
    ContextFull,
    EngineError,
    PairIncompatible,
    UnsupportedModel,
)
from specllama.events import Finished
from specllama.models import tensors
from specllama.models.dflash_file import read_facts
from specllama.models.gguf import read_header
from specllama.settings.params import EngineOptions, GenerateParams
from specllama.speculative.drafting.dflash import Block, Markov, Places

KINDS: dict[str, dict[str, Any]] = {
    "borrows": {},
    "own matrices": {"own_embedding": True, "own_output": True},
    "own embedding": {"own_embedding": True},
    "draft vocabulary": {"draft_ids": sorted(range(3, VOCAB, 2))},
    "scaled and capped": {
        "keys": {"dflash.logit_scale": 0.5, "dflash.final_logit_softcapping": 3.0}
    },
    "few tokens, capped": {
        "draft_ids": sorted(range(3, VOCAB, 2)),
        "keys": {"dflash.final_logit_softcapping": 2.0},
    },
    "values of keys": {"shared_kv": True},
    "causal": {"keys": {"dflash.attention.causal": True, "dflash.embedding_scale": 0.5}},
    "anchored with a Markov head": {"kind": "dspark"},
    "a Markov head behind the masks": {
        "kind": "dspark",
        "keys": {"dflash.sample_from_anchor": False},
    },
    "a Markov head over few tokens": {"kind": "dspark", "draft_ids": sorted(range(3, VOCAB, 2))},
    "a Markov head alone": {"kind": "dspark", "confidence": False},
    "a selector": {"kind": "dflash2"},
    "several rotations": {"keys": {"dflash.rope.dimension_sections": [8, 0, 0, 0]}},
}


def open_drafter(path: Path, target: CellLane, lanes: int = 1) -> DflashPool:
    header = read_header(path)
    facts = read_facts(header)
    target.capture(facts.layers)
    model, markov = LlamaModel(path, head=True), None
    if facts.kind == "dspark":
        markov = MarkovRows(header)
    return DflashPool(model, target.pool, facts, threads=1, lanes=lanes, markov=markov)


def fill(lane: HeadLane, token: int, n: int) -> Block:
    """A block of guesses, of which nothing stays."""
    places = places_of(lane)
    block = places.tokens(token, n)
    part = Part(lane, block, "all", range(-1, len(block) - 1))
    lane.pool.run([part])
    lane.keep_path(())
    return places.block(part, VOCAB, markov_of(lane))


def markov_of(lane: HeadLane) -> Markov | None:
    pool: Any = lane.pool
    markov: Markov | None = pool.markov
    return markov


def places_of(lane: HeadLane) -> Places:
    pool: Any = lane.pool
    facts = pool.facts
    return Places(facts.guesses, facts.mask, facts.anchored, facts.candidates, facts.confident,
                  facts.scale, facts.cap)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_numpy(
    target: CellLane, target_file: Path, tmp_path: Path, kind: str
) -> None:
    """Over more than a batch of states, in blocks of every width, after going back, in a second
    text. F16 keys and values of the drafter's cache are the difference that is left."""
    path = write_dflash(tmp_path / "drafter.gguf", target_file, **KINDS[kind])
    context, reference = open_drafter(path, target), NumpyDrafter(path, target_file)
    lane = context.open()
    for text, lengths in ((texts(1, 150), (150, 140, 33, 1)), (texts(2, 40), (40, 7))):
        target.rollback(0)
        target.forward(text, outputs="none")
        features = target.hidden.rows(0, len(text)).copy()
        begin_at(lane, 0)
        read(lane, features)
        for known in lengths:
            lane.rollback(known)
            for n in (1, 5, 3):
                check(fill(lane, 7 + n, n), reference, features[:known], 7 + n, n)
                assert lane.n_past == lane.end == known
    context.close()


def check(block: Block, reference: NumpyDrafter, known: Rows, token: int, n: int) -> None:
    """A block against the same weights in NumPy: behind its own best guesses, and behind others."""
    first = 0 if reference.anchored else 1
    wanted = reference.block(known, token, n + first)
    path: list[int] = []
    for place in range(n):
        before = path[-1] if path else token
        row = block.row(path)
        if reference.kind == "dflash":
            same(row, reference.capped(wanted.logits[place + first]))
        elif reference.kind == "dspark":
            same(row, reference.follow(wanted, place + first, before))
            if block.told is not None:
                sure = reference.sure(wanted, place + first, before)
                assert block.sure(path) == pytest.approx(sure, abs=1e-2)
            if place + 1 < n:
                other = int(np.argsort(row)[-2])
                behind = reference.follow(wanted, place + 1 + first, other)
                same(block.row([*path, other]), behind)
                if block.told is not None:
                    sure = reference.sure(wanted, place + 1 + first, other)
                    assert block.sure([*path, other]) == pytest.approx(sure, abs=1e-2)
        else:
            assert block.candidates is not None
            best, logits = block.candidates, wanted.logits[first:]
            assert logits[place][best[place]].min() > np.sort(logits[place])[-CANDIDATES] - 0.1
            same(row, reference.select(wanted, place + first, before, best[place]), 0.1, 0.2)
            if place + 1 < n:
                other = int(np.argsort(row)[-2])
                behind = reference.select(wanted, place + 1 + first, other, best[place + 1])
                same(block.row([*path, other]), behind, 0.1, 0.2)
        path.append(int(np.argmax(row)))


def test_lanes_leave_no_trace_in_each_other(
    target: CellLane, target_file: Path, tmp_path: Path
) -> None:
    """States, blocks and rejects in three lanes, by chance: each as a lane that is alone."""
    path = write_dflash(tmp_path / "drafter.gguf", target_file)
    shared, alone = open_drafter(path, target, lanes=3), open_drafter(path, target)
    lanes, fresh = [shared.open() for _ in range(3)], alone.open()
    rng, noise = random.Random(3), np.random.default_rng(4)
    with pytest.raises(EngineError, match="lanes"):
        shared.open()
    held: list[Rows] = [np.empty((0, shared.graph.reads), np.float32)] * 3
    for turn in range(120):
        which = rng.randrange(3)
        lane, n = lanes[which], rng.choice((1, 2, 5, 20))
        keep = rng.randrange(lane.end + 1) if rng.random() < 0.5 else lane.end
        keep = 0 if keep + n > 200 else keep
        lane.rollback(keep)
        states = noise.normal(size=(n, shared.graph.reads)).astype(np.float32)
        held[which] = np.concatenate((held[which][:keep], states))
        read(lane, states)
        rows = fill(lane, turn, 4).rows.copy()
        assert lane.n_past == lane.end == len(held[which])
        if turn % 8 == 0:
            begin_at(fresh, 0)
            read(fresh, held[which])
            assert np.abs(fill(fresh, turn, 4).rows - rows).max() < 3e-2
    shared.close()
    alone.close()


def test_a_block_beyond_the_cache_is_refused_and_leaves_no_trace(
    target: CellLane, target_file: Path, tmp_path: Path
) -> None:
    context = open_drafter(write_dflash(tmp_path / "drafter.gguf", target_file), target)
    lane = context.open()
    with pytest.raises(ValueError, match="at most"):
        fill(lane, 5, lane.n_batch + 2)
    with pytest.raises(EngineError, match="vocabulary"):
        fill(lane, VOCAB, 2)
    states = np.ones((lane.n_batch, lane.width), np.float32)
    while lane.end + lane.n_batch <= lane.n_ctx:
        read(lane, states)
    with pytest.raises(ContextFull):
        read(lane, states)
    read(lane, states[: lane.n_ctx - lane.end])
    with pytest.raises(ContextFull):
        fill(lane, 5, 1)
    assert lane.n_past == lane.end == lane.n_ctx
    context.close()


def test_a_markov_head_in_other_types_is_done_without(
    target_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp follows its likeliest guesses whatever types it is stored in."""
    path = write_dflash(tmp_path / "drafter.gguf", target_file, kind="dspark")
    monkeypatch.setattr(tensors, "_DECODERS", {})
    with Engine.load(target_file, None, EngineOptions(threads=1, heads=(str(path),))) as engine:
        assert markov_of(lane_of(engine)) is None
        drafted = written(engine, request(0.8))
        assert drafted.draft_n > 40
        assert drafted.token_ids == written(engine, request(0.8, speculate=False)).token_ids


def lane_of(engine: Engine) -> HeadLane:
    drafter = engine.drafters["dflash"]
    assert isinstance(drafter._lane, HeadLane)
    return drafter._lane


# -- wrong files --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"width": 128}, "hidden states of width 128"),
        ({"layers": (1, 4)}, "input of layer 4"),
        ({"tokens": bpe_tokens()[0][:-1]}, f"knows {VOCAB - 1} tokens"),
        ({"tokens": [t + "x" for t in bpe_tokens()[0]]}, "tokens have another text"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    target_file: Path, tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    error = refused(target_file, write_dflash(tmp_path / "drafter.gguf", target_file, **wrong))
    assert isinstance(error, PairIncompatible)
    assert error.exit_code == 4
    assert "drafter.gguf" in error.message
    assert message in error.message
    assert error.hint


@pytest.mark.parametrize(
    "wrong",
    [
        {"keys": {"dflash.target_layers": ["1", "2"]}},
        {"layers": (-1, 2)},
        {"keys": {"dflash.target_layers": None}},
        {"keys": {"dflash.target_layers": 2}},
        {"keys": {"dflash.block_size": 1}},
        {"keys": {"dflash.block_size": 100_000}},
        {"keys": {"dflash.attention.value_length": 8}},
        {"keys": {"dflash.attention.head_count": 0}},
        {"keys": {"dflash.hidden_activation": "relu"}},
        {"keys": {"dflash.rope.dimension_count": 0}},
        {"keys": {"dflash.rope.dimension_sections": [99, 0, 0, 0]}},
        {"keys": {"dflash.hyper_connection.count": 4}},
        {"keys": {"tokenizer.ggml.mask_token_id": None}},
        {"keys": {"tokenizer.ggml.mask_token_id": VOCAB}},
        {"draft_ids": [3, 4, VOCAB]},
        {"draft_ids": [3, 4, 4]},
        {"draft_ids": [3, 4, 5], "leave_out": ("output.weight",)},
        {"draft_ids": [3, 4, 5], "leave_out": ("d2t",)},
        {"leave_out": ("fc.weight",)},
        {"leave_out": ("blk.1.attn_k.weight",)},
        {"kind": "dspark", "keys": {"dflash.block_size": None}},
        {"kind": "dspark", "leave_out": ("markov_w2.weight",)},
        {"kind": "dflash2", "keys": {"dflash.block_size": None}},
        {"kind": "dflash2", "keys": {"dflash.conv_kernel_size": None}},
        {"kind": "dflash2", "keys": {"dflash.conv_group_size": 0}},
        {"kind": "dflash2", "keys": {"dflash.conv_group_size": 7}},
        {"kind": "dflash2", "keys": {"dflash.selector_rank": 0}},
        {"kind": "dflash2", "keys": {"dflash.selector_top_k": 8}},
        {"kind": "dflash2", "keys": {"dflash.selector_top_k": 0}},
        {"kind": "dflash2", "leave_out": ("blk.0.ffn_conv_base",)},
        {"kind": "dflash2", "leave_out": ("selector_predecessor.weight",)},
    ],
    ids=str,
)
def test_a_damaged_drafter_is_an_error_and_no_crash(
    target_file: Path, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    error = refused(target_file, write_dflash(tmp_path / "drafter.gguf", target_file, **wrong))
    assert isinstance(error, BadGguf | PairIncompatible | CannotLoad | UnsupportedModel)
    assert error.exit_code in (3, 4, 5)


# -- whole replies ------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["dflash", "dflash2", "dspark"])
def engine(
    request: pytest.FixtureRequest, target_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """A drafter beside an EAGLE-3 head, which reads other layers."""
    folder = tmp_path_factory.mktemp("heads")
    heads = (
        write_dflash(folder / "drafter.gguf", target_file, kind=request.param),
        write_eagle3(folder / "head.gguf"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(tmp_path_factory.mktemp("home")))
        # the rows of an F32 target differ with the width of a pass, on some processors by enough
        options = EngineOptions(threads=1, heads=tuple(map(str, heads)), exact="on")
        with Engine.load(target_file, None, options) as engine:
            yield engine


def request(temperature: float, **more: Any) -> GenerateParams:
    options = {"max_tokens": 40, "seed": 7, "draft_max": 5, "proposer": "dflash", **more}
    return asked(temperature=temperature, free=True, **options)


def written(engine: Engine, params: GenerateParams, text: Sequence[int] = ()) -> Finished:
    return finish(engine, text or texts(8, 30), params)


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
def test_one_text_per_seed_with_the_drafter_and_without(engine: Engine, temperature: float) -> None:
    params = request(temperature)
    plain = written(engine, params.replace(speculate=False))
    drafted = written(engine, params)
    assert drafted.token_ids == plain.token_ids
    assert drafted.proposer == "dflash"
    assert drafted.draft_n > 40
    # a second turn, and one after another head has drafted
    longer = [*texts(8, 30), *drafted.token_ids[:20], *texts(9, 200)]
    again = written(engine, params, longer)
    assert again.token_ids == written(engine, params.replace(speculate=False), longer).token_ids
    assert again.draft_n > 40
    assert written(engine, params.replace(proposer="eagle3"), longer).token_ids == again.token_ids
    assert written(engine, params, longer).draft_n_accepted == again.draft_n_accepted


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_other_rules_draft_too(engine: Engine, rule: str) -> None:
    params = request(1.0, verify=rule)
    done = written(engine, params)
    assert (done.draft_n, done.token_ids) == (
        (again := written(engine, params)).draft_n, again.token_ids
    )  # fmt: skip
    assert done.draft_n > 40
    assert len(done.token_ids) == done.draft_n_accepted + done.rounds - done.cut


def test_it_reads_on_where_it_stopped(engine: Engine) -> None:
    """The drafter keeps what it read: a second turn asks the target for new tokens only."""
    first = written(engine, request(0.0))
    longer = [*texts(8, 30), *first.token_ids, *texts(10, 20)]
    assert written(engine, request(0.0), longer).cached_n >= len(longer) - 21

"""Prompts are read in tiles, rows are judged one by one: what holds between the two."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp as ll
import numpy as np
import pytest
from requests_made import asked, finish

from specllama.arrays import HiddenNeed, Row
from specllama.backend import llama_pool, pass_plan, symbols
from specllama.backend.kernels import WIDE
from specllama.backend.lane import CellLane
from specllama.backend.llama import LlamaModel
from specllama.backend.llama_pool import open_pool
from specllama.backend.symbols import can_switch
from specllama.backend.threads import ThreadChoice
from specllama.cancel import Cancel
from specllama.engine.engine import Engine
from specllama.errors import CannotLoad
from specllama.events import Finished, PrefillProgress
from specllama.models.quantization import prepare, run
from specllama.models.refs import bundled
from specllama.settings.params import EngineOptions, GenerateParams

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not can_switch(), reason="this libllama has no switch for attention"),
]

OPTIONS = EngineOptions(threads=2).resolved(on_gpu=False)


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaModel]:
    # as stored, rows of all widths are computed alike on any processor
    loaded = LlamaModel(bundled("tiny-target"), gpu_layers="0", repack=False)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def k_quants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "k.gguf"
    run(prepare(bundled("tiny-target"), path, "q4_k_m", requantize=True, threads=1))
    return path


def context(model: LlamaModel, **changes: object) -> CellLane:
    options = OPTIONS
    if changes:
        options = EngineOptions(threads=2, **changes).resolved(on_gpu=False)  # type: ignore[arg-type]
    return open_pool(
        model, n_ctx=2048, max_rows=64, threads=2, options=options, flash="on", max_leaves=4
    ).open()


def text(n: int, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(300, 4000, n)]


def read(c: CellLane, tokens: Sequence[int]) -> Row:
    """As a request reads a prompt; the row behind it."""
    chunk = c.n_batch
    last = (len(tokens) - 1) // chunk * chunk
    for i in range(0, last, chunk):
        c.forward(tokens[i : i + chunk], outputs="none")
    row: Row = c.forward(tokens[last:], outputs="last")[0].copy()
    return row


@pytest.mark.parametrize("n", [600, 1500])
def test_rows_behind_a_long_prompt_do_not_depend_on_the_width_of_their_pass(
    model: LlamaModel, n: int
) -> None:
    c = context(model)
    assert c.pool.kernels.any_width
    read(c, text(n))
    tail = text(64, seed=2)
    alone = np.stack([c.forward([t], outputs="all")[0].copy() for t in tail])
    for width in (2, 3, 7, 8, 16, 33, 64):
        c.rollback(n)
        assert np.array_equal(c.forward(tail[:width], outputs="all"), alone[:width]), width


@pytest.mark.parametrize("n", [63, 64, 65, 600, 1024, 1025])
def test_a_prompt_leaves_the_row_that_reading_its_last_token_again_gives(
    model: LlamaModel, n: int
) -> None:
    """So a request whose prompt is cached begins with the bits of the one that read it."""
    c = context(model)
    first = read(c, text(n))
    c.rollback(n - 1)
    assert np.array_equal(c.forward(text(n)[-1:], outputs="last")[0], first)


def test_long_prompts_are_read_in_tiles(model: LlamaModel) -> None:
    """They differ by rounding from what single steps make of them, and from nothing else."""
    c = context(model)
    tiled = read(c, text(200))
    c.rollback(0)
    for token in text(200):
        row = c.forward([token], outputs="last")[0]
    assert 0 < np.abs(row - tiled).max() < 0.5


def test_a_tiled_prompt_does_not_depend_on_how_it_was_cut(model: LlamaModel) -> None:
    c = context(model)
    rows = []
    for cuts in ([256, 512, 576], [64, 320, 500, 576], [100, 300, 510, 576]):
        c.rollback(0)
        for i, end in zip([0, *cuts], cuts, strict=False):
            c.forward(text(576)[i:end], outputs="none")
        rows.append(c.forward([5], outputs="last")[0].copy())
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])


@pytest.mark.parametrize(("n", "cuts"), [(7, [3]), (30, [8, 22]), (63, [8, 55]), (200, [64, 130])])
def test_a_prompt_of_k_quants_does_not_depend_on_how_it_was_cut(
    k_quants: Path, n: int, cuts: list[int]
) -> None:
    """As far as its parts are as long as such a text wants. Its row comes with the last of them."""
    model = LlamaModel(k_quants, gpu_layers="0", repack=False)
    try:
        c = context(model)
        assert c.pool.kernels.wide == WIDE
        passes: list[int] = []
        decode = c.pool.cache.decode

        def counted(*, tiled: bool) -> None:
            passes.append(c.pool.cache.batch.n)
            decode(tiled=tiled)

        c.pool.cache.decode = counted
        row = c.forward(text(n), outputs="last")[0].copy()
        assert len(passes) == 1
        cells = c.pool.cache.state(c.sequence)
        for cut in cuts:
            c.rollback(0)
            c.forward(text(n)[:cut], outputs="none")
            assert np.array_equal(c.forward(text(n)[cut:], outputs="last")[0], row)
            assert c.pool.cache.state(c.sequence) == cells
    finally:
        model.close()


@pytest.mark.parametrize("n", [6, 30, 150])
def test_a_prompt_of_k_quants_gives_the_same_text_afresh_and_again(k_quants: Path, n: int) -> None:
    """Also behind a text that begins alike, and is read in another way."""
    options = EngineOptions(n_ctx=1024, threads=2, repack="off")
    with Engine.load(k_quants, None, options) as engine:
        for seed in range(12):
            prompt = text(n, seed=seed)
            engine.reset()
            first = reply(engine, prompt, "none", seed=seed)
            again = reply(engine, prompt, "ngram", seed=seed)
            assert (again.cached_n, again.token_ids) == (n - 1, first.token_ids)
            engine.reset()
            other = [*prompt[: n - 2], *text(5 if n > 30 else 90, seed=99)]
            reply(engine, other, "none", seed=seed)
            assert reply(engine, prompt, "none", seed=seed).token_ids == first.token_ids


@pytest.mark.parametrize("n", [78, 159])
def test_guesses_that_fill_a_pass_leave_no_trace(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """A prompt leaves the cells, bit for bit, that it leaves without them."""
    c = context(model)
    filled = read(c, text(n))
    cells = c.pool.cache.state(c.sequence)
    monkeypatch.setattr(pass_plan, "LACKING", 0)
    c.rollback(0)
    assert np.array_equal(read(c, text(n)), filled)
    assert c.pool.cache.state(c.sequence) == cells


@pytest.mark.parametrize("types", [("bf16", "f16"), ("q8_0", "f16"), ("q8_0", "q8_0")])
def test_caches_that_are_never_tiled_need_no_switch(
    model: LlamaModel, types: tuple[str, str]
) -> None:
    c = context(model, kv_type_k=types[0], kv_type_v=types[1])
    assert c.pool.kernels.any_width
    read(c, text(600))
    alone = [c.forward([t], outputs="all")[0].copy() for t in text(4, seed=2)]
    c.rollback(600)
    assert np.array_equal(c.forward(text(4, seed=2), outputs="all"), np.stack(alone))


def test_a_draft_models_context_is_left_as_fast_as_it_can_be(model: LlamaModel) -> None:
    c = open_pool(
        model, n_ctx=1024, max_rows=4, threads=2, options=OPTIONS, flash="on", any_width=False
    ).open()
    assert not c.pool.kernels.any_width
    read(c, text(600))
    alone = [c.forward([t], outputs="all")[0].copy() for t in text(4, seed=2)]
    c.rollback(600)
    many = c.forward(text(4, seed=2), outputs="all")
    assert not np.array_equal(many, np.stack(alone)), "split over threads, or the test is empty"


@pytest.mark.parametrize("need", ["final_hidden", "nothing"])
def test_the_last_states_of_a_prompt_are_given_away_as_those_of_a_single_step(
    model: LlamaModel, need: HiddenNeed
) -> None:
    c = context(model)
    c.capture(need)
    read(c, text(600))
    known = c.hidden.rows(599, 600)
    assert (known is not None) == (need == "final_hidden")
    if known is not None:
        row = known.copy()
        c.rollback(599)
        c.forward(text(600)[-1:], outputs="all")
        again = c.hidden.rows(599, 600)
        assert again is not None
        assert np.array_equal(again, row)


def test_a_tree_behind_a_long_prompt_has_the_rows_of_its_paths(model: LlamaModel) -> None:
    c = context(model)
    read(c, text(600))
    rows = c.forward([7, 8, 9, 10], outputs="all", parents=[-1, 0, 0, 2]).copy()
    c.rollback(600)
    for path, at in (([7, 8], 1), ([7, 9, 10], 3)):
        row = None
        for token in path:
            row = c.forward([token], outputs="last")[0]
        assert np.array_equal(row, rows[at])
        c.rollback(600)


def reply(engine: Engine, prompt: list[int], proposer: str, **changes: object) -> Finished:
    params = asked(proposer, 1.0, seed=4, draft_max=None, min_speculative_tokens=0)
    last = finish(engine, prompt, params.replace(**changes))
    assert len(last.token_ids) == last.draft_n_accepted + last.rounds - last.cut
    return last


@pytest.mark.parametrize("n", [600, 1500])
def test_a_long_prompt_gives_the_same_text_read_afresh_or_cached_drafted_or_not(
    tiny: Engine, n: int
) -> None:
    prompt = text(n)
    tiny.reset()
    expected = reply(tiny, prompt, "none").token_ids
    for proposer in ("draft", "ngram", "none", "tree") if n < 1000 else ("draft", "tree"):
        cached = reply(tiny, prompt, proposer)
        assert (cached.token_ids, cached.cached_n) == (expected, n - 1)
        tiny.reset()
        fresh = reply(tiny, prompt, proposer)
        assert (fresh.token_ids, fresh.cached_n) == (expected, 0)


def test_a_shift_of_a_long_text_gives_the_same_text_drafted_or_not() -> None:
    options = EngineOptions(n_ctx=768, threads=1)
    with Engine.load("tiny", None, options) as engine:
        found = [
            reply(engine, text(740), proposer, max_tokens=60, on_full="shift").token_ids
            for proposer in ("none", "draft", "ngram")
        ]
    assert found[0] == found[1] == found[2]


def test_a_reading_that_was_cancelled_changes_nothing(tiny: Engine) -> None:
    prompt = text(1500)
    tiny.reset()
    expected = reply(tiny, prompt, "none").token_ids
    tiny.reset()
    cancel = Cancel()
    last = None
    for last in tiny.generate(prompt, GenerateParams(seed=4), cancel=cancel):
        if isinstance(last, PrefillProgress) and last.done:
            cancel.set()
    assert last.reason == "cancelled"
    assert 0 < tiny.target.n_past < len(prompt)
    assert reply(tiny, prompt, "draft").token_ids == expected


def test_where_attention_cannot_be_switched_the_cache_types_are_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> None:
        raise CannotLoad("the installed llama.cpp has no such function")

    monkeypatch.setattr(symbols, "_functions", missing)
    with Engine.load("tiny", None, EngineOptions(n_ctx=1024, threads=2, repack="off")) as engine:
        target = engine.target
        assert target.pool.kernels.any_width
        read(target, text(300))
        alone = [target.forward([t], outputs="all")[0].copy() for t in text(4, seed=2)]
        target.rollback(300)
        assert np.array_equal(target.forward(text(4, seed=2), outputs="all"), np.stack(alone))


class EveryOther(ThreadChoice):
    """Another count for every pass."""

    def choose(self, rows: int) -> int:
        self.passes = getattr(self, "passes", 0) + 1
        return 1 + self.passes % 2


def test_the_number_of_threads_changes_no_bit(model: LlamaModel, monkeypatch: Any) -> None:
    prompt, ahead = text(300), text(8, seed=2)
    fixed, varied = context(model), context(model)
    monkeypatch.setattr(llama_pool, "ThreadChoice", EveryOther)
    pool = varied.pool
    varied.close()
    pool.choose_threads(2, lambda count: None)
    varied = pool.open()
    for c in (fixed, varied):
        read(c, prompt)
    for width in (1, 1, 2, 4):
        rows = fixed.forward(ahead[:width], outputs="all").copy()
        np.testing.assert_array_equal(varied.forward(ahead[:width], outputs="all"), rows)
    assert pool.cache.threads.choice.passes >= 4  # type: ignore[attr-defined]


@pytest.mark.parametrize(("alone_s", "both_s", "count"), [(1.0, 2.0, 1), (2.0, 1.0, None)])
def test_one_thread_is_taken_where_it_is_faster(
    model: LlamaModel, monkeypatch: Any, alone_s: float, both_s: float, count: int | None
) -> None:
    first = context(model)
    pool: Any = first.pool
    first.close()
    clock = [0.0]

    def seconds() -> float:
        clock[0] += {1: alone_s, 2: both_s}[int(ll.llama_n_threads(pool.cache.handle))]
        return clock[0]

    monkeypatch.setattr(llama_pool, "perf_counter", seconds)
    pool.try_one_thread()
    choice = pool.cache.threads.choice
    assert (choice and choice.count) == count


def test_passes_on_a_cpu_are_short_unless_asked_for(model: LlamaModel) -> None:
    assert context(model).n_batch == 256
    assert context(model, n_batch=640).n_batch == 640


def test_a_count_that_was_asked_for_stays(llama_file: Path) -> None:
    with Engine.load(llama_file, options=EngineOptions(threads=2)) as engine:
        assert engine.target.pool.cache.threads.choice is None  # type: ignore[attr-defined]
    with Engine.load(llama_file) as engine:
        cores = engine.info.threads
        chosen = engine.target.pool.cache.threads.choice  # type: ignore[attr-defined]
        assert (chosen is not None) is (cores > 1)

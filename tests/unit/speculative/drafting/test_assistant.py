"""Gemma 4 assistants: what the proposer asks of one, and which files are refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import FakeContext, fake_info, loaded
from ggufs import write_llama
from ggufs_gemma4 import write_assistant, write_gemma4
from head_lanes import FakeHeadLane
from table_model import FakeTable, FakeVocab

from specllama.arrays import Row, Rows
from specllama.engine.engine import Engine
from specllama.engine.target_heads import fitting, survey
from specllama.errors import BadGguf, ContextFull, PairIncompatible
from specllama.events import Finished
from specllama.models.assistant_file import check_target
from specllama.models.gguf import read_header
from specllama.models.library import single
from specllama.models.memory import estimate_head, kv_bytes
from specllama.settings.params import GenerateParams, SamplingParams
from specllama.speculative.drafting.mtp import AssistantDrafter

V, WIDTH = 24, 8


class FakeLook(FakeHeadLane):
    """An assistant that knows a table and looks into a lane; its states tell what it guessed."""

    def __init__(self, table: FakeTable, target: FakeContext, of: FakeTable, full: int) -> None:
        self._table, self._target, self._of, self._full = table, target, of, full
        self.n_batch, self.width, self.heads, self.max_rows = 16, WIDTH, 1, 16
        self.first = self.end = 0
        self._guessed: dict[float, list[int]] = {}  # by the state behind them
        self.looks = 0
        self.closed = False

    def feed(self, tokens: Sequence[int], states: Rows) -> tuple[Row, Row]:
        text = self._target.tokens
        assert self.end == len(text), "it looks from where the text ends, however much it guessed"
        assert len(tokens) == 1
        if len(text) >= self._full:
            raise ContextFull("full")
        assert np.array_equal(states[0], self._of.row(text)[:WIDTH])
        self.end += 1
        self.looks += 1
        self._guessed = {1.0: [*tokens]}
        return self._table.row([*text, *tokens]), np.ones(WIDTH, np.float32)

    def grow(
        self, tokens: Sequence[int], states: Rows, parents: Sequence[int], head: int = 0
    ) -> tuple[Rows, Rows]:
        text = self._target.tokens
        assert self.end == len(text) + 1
        rows, own = [], []
        for token, state in zip(tokens, states, strict=True):
            guessed = [*self._guessed[float(state[0])], token]
            name = 1.0 + len(self._guessed)
            self._guessed[name] = guessed
            rows.append(self._table.row([*text, *guessed]))
            own.append(np.full(WIDTH, name, np.float32))
        self.looks += 1
        return np.stack(rows), np.stack(own)

    def rollback(self, keep: int) -> None:
        self.first = self.end = keep

    def close(self) -> None:
        self.closed = True


def make(
    agreement: float = 0.9, n_ctx: int = 256, full: int = 1 << 30, leaves: int = 16
) -> tuple[Engine, FakeLook]:
    table = FakeTable(V, seed=3, sharpness=2.0, eog_bias=-3.0)
    other = FakeTable(V, seed=4, sharpness=2.0, of=table, agreement=agreement)
    target = FakeContext(table, n_ctx=n_ctx, max_leaves=leaves)
    look = FakeLook(other, target, table, full)
    engine = Engine(
        loaded(
            target=target,
            vocab=FakeVocab(V),
            info=fake_info(n_ctx, V),
            drafters={"mtp": AssistantDrafter(look, target, n_vocab=V)},
        )
    )
    return engine, look


def run(engine: Engine, prompt: Sequence[int], **changes: Any) -> Finished:
    sampling = SamplingParams(temperature=changes.pop("temperature", 0.7), top_k=0, min_p=0.0)
    options: dict[str, Any] = {"proposer": "mtp", "window": "fixed", "max_tokens": 40, "seed": 1}
    params = GenerateParams(sampling=sampling, **(options | changes))
    *_, finished = engine.generate(list(prompt), params)
    assert isinstance(finished, Finished)
    return finished


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("agreement", [1.0, 0.9, 0.0])
def test_the_text_is_that_of_plain_decoding(temperature: float, agreement: float) -> None:
    engine, _ = make(agreement)
    for seed in range(8):
        prompt = [1 + (seed * 7 + i) % 20 for i in range(1 + seed)]
        plain = run(engine, prompt, proposer="none", seed=seed, temperature=temperature)
        drafted = run(engine, prompt, seed=seed, temperature=temperature)
        assert drafted.token_ids == plain.token_ids
        assert drafted.draft_n > 0


def test_one_that_knows_the_target_is_always_right_and_looks_once_a_guess() -> None:
    engine, look = make(1.0, leaves=1)
    finished = run(engine, [3, 4, 5], draft_max=4, ignore_eos=True)
    assert finished.acceptance_rate == 1.0
    assert look.looks == finished.draft_n


def test_a_tree_takes_a_look_per_depth() -> None:
    engine, look = make(0.5)
    finished = run(engine, [3, 4, 5], draft_max=12, ignore_eos=True)
    assert finished.draft_n > 2 * look.looks


def test_any_history_of_requests_leaves_the_text_as_it_was() -> None:
    rng = random.Random(5)
    engine, _ = make()
    text: list[int] = []
    for turn in range(60):
        cut = rng.randrange(len(text) + 1) if text else 0
        prompt = (text[:cut] + [1 + rng.randrange(20) for _ in range(rng.randrange(1, 6))])[:150]
        options: dict[str, Any] = {
            "seed": turn,
            "draft_max": rng.randrange(1, 7),
            "temperature": rng.choice([0.0, 0.7, 1.0]),
            "max_tokens": rng.randrange(8, 30),
        }
        plain = run(make()[0], prompt, proposer="none", **options)
        proposer = rng.choice(["mtp", "mtp", "none"])
        finished = run(engine, prompt, proposer=proposer, **options)
        assert finished.token_ids == plain.token_ids
        if proposer == "mtp":
            assert finished.draft_n > 0, "it needs no state but the last"
        text = prompt + list(finished.token_ids)


def test_a_further_turn_reads_only_what_is_new_whoever_answered_before() -> None:
    engine, _ = make()
    prompt = [1 + i % 20 for i in range(30)]
    text = prompt + list(run(engine, prompt, proposer="none").token_ids)
    again = run(engine, [*text, 7, 8, 9])
    assert again.cached_n >= len(text) - 1
    assert again.draft_n > 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_it_drafts_under_the_other_rules(rule: str) -> None:
    finished = run(make()[0], [3, 4, 5], verify=rule, ignore_eos=True)
    assert 0 < finished.draft_n_accepted < finished.draft_n


def test_a_full_cache_ends_the_drafting_not_the_text() -> None:
    engine, look = make(full=20)
    plain = run(engine, [3, 4, 5], proposer="none", ignore_eos=True)
    assert run(engine, [3, 4, 5], ignore_eos=True).token_ids == plain.token_ids
    engine.close()
    assert look.closed


def test_a_context_that_shifts_keeps_the_text_of_plain_decoding() -> None:
    options: dict[str, Any] = {"on_full": "shift", "ignore_eos": True, "max_tokens": 90}
    plain = run(make(n_ctx=48)[0], [3, 4, 5], proposer="none", **options)
    shifted = run(make(n_ctx=48)[0], [3, 4, 5], **options)
    assert shifted.token_ids == plain.token_ids
    assert shifted.draft_n_accepted > 0


def test_an_assistant_is_found_beside_its_target(tmp_path: Path) -> None:
    target = read_header(write_gemma4(tmp_path / "target.gguf"))
    head = write_assistant(tmp_path / "head.gguf")
    assert {way.name: way.available for way in survey(target, [str(head)])}["mtp"]
    assert list(fitting(target, [single(target.path), single(head)])) == ["mtp"]
    assert estimate_head(read_header(head), target, n_ctx=4096).kv == 0 < kv_bytes(target, 4096)


OWN = "gemma4-assistant."


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({OWN + "embedding_length_out": 96}, "hidden states of width 96"),
        (
            {OWN + "attention.key_length": 64, OWN + "rope.dimension_count": 64},
            "1 keys of width 64",
        ),
        ({OWN + "attention.value_length_swa": 32}, "layer 0 reads"),
        ({OWN + "attention.head_count_kv": [4, 2, 1]}, "layer 0 reads 4 keys"),
        ({OWN + "attention.head_count_kv": [2, 2, 2]}, "layer 2 reads 2 keys"),
        ({"tokenizer.ggml.tokens": [f"<{i}>" for i in range(332)]}, "have another text"),
    ],
)
def test_one_of_another_target_is_refused(keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    target = read_header(write_gemma4(tmp_path / "target.gguf"))
    head = read_header(write_assistant(tmp_path / "head.gguf", keys=keys))
    with pytest.raises(PairIncompatible, match="another target") as refused:
        check_target(head, target)
    assert words in refused.value.message


def test_a_target_must_have_what_it_looks_into(tmp_path: Path) -> None:
    head = read_header(write_assistant(tmp_path / "head.gguf"))
    check_target(head, read_header(write_gemma4(tmp_path / "own.gguf")))
    kept = (True, False, True, False, True, False)
    check_target(head, read_header(write_gemma4(tmp_path / "kept.gguf", pattern=kept, shared=2)))
    other = write_gemma4(tmp_path / "last.gguf", pattern=(True, False, False))
    for target, words in (
        (other, "one with a window"),
        (write_llama(tmp_path / "l.gguf"), "llama"),
    ):
        with pytest.raises(PairIncompatible, match=words):
            check_target(head, read_header(target))


@pytest.mark.parametrize(
    "keys",
    [
        {OWN + "nextn_predict_layers": 1},
        {OWN + "attention.sliding_window_pattern": [False] * 3},
        {OWN + "block_count": 0},
        {OWN + "rope.dimension_count": 256},
        {OWN + "rope.dimension_count_swa": 7},
        {OWN + "rope.dimension_count_swa": 96},
        {OWN + "rope.dimension_count_swa": None},
    ],
)
def test_one_on_which_llama_cpp_would_abort_is_refused(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    target = read_header(write_gemma4(tmp_path / "target.gguf"))
    head = read_header(write_assistant(tmp_path / "head.gguf", keys=keys))
    with pytest.raises(BadGguf):
        check_target(head, target)

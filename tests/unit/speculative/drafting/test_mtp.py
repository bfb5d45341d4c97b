"""The MTP proposer over a table model: what it reads, what it keeps, what it never does."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from engines import FakeContext, engine_over
from head_fakes import FakeNextn
from head_lanes import FakeHeadLane
from requests_made import asked, finish
from table_model import FakeTable

from specllama.arrays import Row, Rows
from specllama.engine.engine import Engine
from specllama.errors import ContextFull
from specllama.events import Finished
from specllama.speculative.drafting.mtp import AssistantDrafter, MtpDrafter

V, WIDTH = 24, 8


def make(
    agreement: float = 0.9, n_ctx: int = 256, nextn_ctx: int = 512, heads: int = 1, leaves: int = 16
) -> tuple[Engine, FakeNextn, FakeTable]:
    table = FakeTable(V, seed=3, sharpness=2.0, eog_bias=-3.0)
    other = FakeTable(V, seed=4, sharpness=2.0, of=table, agreement=agreement)
    target = FakeContext(table, n_ctx=n_ctx, max_leaves=leaves)
    nextn = FakeNextn(other, nextn_ctx, heads=heads)
    engine = engine_over(target, drafters={"mtp": MtpDrafter(nextn, target, n_vocab=V)})
    return engine, nextn, table


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


def make_look(
    agreement: float = 0.9, n_ctx: int = 256, full: int = 1 << 30, leaves: int = 16
) -> tuple[Engine, FakeLook]:
    table = FakeTable(V, seed=3, sharpness=2.0, eog_bias=-3.0)
    other = FakeTable(V, seed=4, sharpness=2.0, of=table, agreement=agreement)
    target = FakeContext(table, n_ctx=n_ctx, max_leaves=leaves)
    look = FakeLook(other, target, table, full)
    engine = engine_over(target, drafters={"mtp": AssistantDrafter(look, target, n_vocab=V)})
    return engine, look


def run(engine: Engine, prompt: Sequence[int], **changes: Any) -> Finished:
    fixed: dict[str, Any] = {"free": True, "max_tokens": 40, "draft_max": None}
    options = {"proposer": "mtp", "temperature": 0.7, "ignore_eos": False, **fixed, **changes}
    return finish(engine, list(prompt), asked(**options))


def true_pairs(table: FakeTable, text: Sequence[int], first: int) -> list[Any]:
    """Tokens with the target's states behind the tokens before them."""
    pairs = []
    for i in range(first, len(text)):
        state = table.row(text[:i])[:WIDTH] if i else np.zeros(WIDTH, np.float32)
        pairs.append((text[i], tuple(state.tolist())))
    return pairs


WAYS = {"block": make, "look": make_look}  # a block of the target's file, an assistant of Gemma 4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("agreement", [1.0, 0.9, 0.0])
def test_the_text_is_that_of_plain_decoding(way: str, temperature: float, agreement: float) -> None:
    engine, *_ = WAYS[way](agreement)
    for seed in range(8):
        prompt = [1 + (seed * 7 + i) % 20 for i in range(1 + seed)]
        plain = run(engine, prompt, proposer="none", seed=seed, temperature=temperature)
        drafted = run(engine, prompt, seed=seed, temperature=temperature)
        assert drafted.token_ids == plain.token_ids
        assert drafted.draft_n > 0


def test_a_block_that_knows_the_target_is_always_right() -> None:
    engine, _, _ = make(1.0, leaves=1)
    assert run(engine, [3, 4, 5], draft_max=4, ignore_eos=True).acceptance_rate == 1.0


def test_it_holds_the_targets_states_and_reads_each_accepted_token_once() -> None:
    engine, nextn, table = make()
    prompt = [1 + i % 20 for i in range(40)]
    text = prompt + list(run(engine, prompt).token_ids)
    own = next((i for i, pair in enumerate(nextn.pairs) if set(pair[1]) == {1.0}), None)
    held = nextn.pairs[:own]
    assert len(held) > len(prompt)
    assert held == true_pairs(table, text, 0)[: len(held)]
    # rejected drafts and their followers were fed with states of the block only
    positions = [position for position, true in nextn.fed if true]
    assert positions == sorted(set(positions))
    assert nextn.restarts == []


def test_a_further_turn_reads_only_what_is_new() -> None:
    engine, nextn, table = make()
    prompt = [1 + i % 20 for i in range(30)]
    text = prompt + list(run(engine, prompt).token_ids)
    nextn.fed.clear()
    longer = [*text, 7, 8, 9]
    plain = run(make()[0], longer, proposer="none")
    assert run(engine, longer).token_ids == plain.token_ids
    assert min(position for position, _ in nextn.fed) >= len(text) - 8
    assert nextn.pairs[: len(text)] == true_pairs(table, text, 0)


def test_an_edited_text_is_continued_with_the_states_it_needs() -> None:
    engine, nextn, table = make()
    prompt = [1 + i % 20 for i in range(30)]
    run(engine, prompt)
    nextn.restarts.clear()
    edited = [*prompt[:20], 2, 2, 2, 5]
    plain = run(make()[0], edited, proposer="none")
    assert run(engine, edited).token_ids == plain.token_ids
    assert nextn.restarts == []
    assert nextn.pairs[:24] == true_pairs(table, edited, 0)


def test_a_text_that_another_proposer_wrote_is_read_again() -> None:
    engine, nextn, table = make()
    prompt = [1 + i % 20 for i in range(30)]
    text = prompt + list(run(engine, prompt, proposer="none", ignore_eos=True).token_ids)
    plain = run(make()[0], text, proposer="none", ignore_eos=True)
    taken_up = run(engine, text, ignore_eos=True)
    assert taken_up.token_ids == plain.token_ids
    assert taken_up.draft_n > 0
    assert taken_up.cached_n == 0
    whole = text + list(taken_up.token_ids)
    n = sum(set(state) != {1.0} for _, state in nextn.pairs)
    assert n > 1
    assert nextn.pairs[:n] == true_pairs(table, whole, nextn.first)[:n]


@pytest.mark.parametrize("way", WAYS)
def test_a_full_cache_ends_the_drafting_not_the_text(way: str) -> None:
    engine, head, *_ = make(nextn_ctx=20) if way == "block" else make_look(full=20)
    plain = run(engine, [3, 4, 5], proposer="none", ignore_eos=True)
    assert run(engine, [3, 4, 5], ignore_eos=True).token_ids == plain.token_ids
    assert way == "look" or len(head.pairs) <= 20
    engine.close()
    assert head.closed


@pytest.mark.parametrize("way", WAYS)
def test_any_history_of_requests_leaves_the_text_as_it_was(way: str) -> None:
    rng = random.Random(5)
    engine, head, *more = WAYS[way]()
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
        finished = run(
            engine, prompt, proposer=(by := rng.choice(["mtp", "mtp", "none"])), **options
        )
        assert finished.token_ids == plain.token_ids
        text = prompt + list(finished.token_ids)
        if way == "look":
            assert finished.draft_n > 0 or by == "none", "it needs no state but the last"
        elif finished.draft_n:
            held = list(itertools.takewhile(lambda pair: set(pair[1]) != {1.0}, head.pairs))
            true = true_pairs(more[0], text, head.first)
            assert len(held) <= len(true)
            for pair, expected in zip(held, true, strict=False):
                assert pair == expected or (pair[0] == expected[0] and set(pair[1]) == {0.0})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_it_drafts_under_the_other_rules(way: str, rule: str) -> None:
    finished = run(WAYS[way]()[0], [3, 4, 5], verify=rule, ignore_eos=True)
    assert 0 < finished.draft_n_accepted < finished.draft_n


def test_a_tree_takes_a_pass_per_depth() -> None:
    engine, nextn, _ = make(0.5)
    for temperature in (0.0, 1.0):
        nextn.used.clear()
        prompt = [1 + i % 20 for i in range(12)]
        finished = run(engine, prompt, draft_max=12, ignore_eos=True, temperature=temperature)
        assert finished.draft_n > 2 * len(nextn.used)


@pytest.mark.parametrize("way", WAYS)
def test_a_context_that_shifts_keeps_the_text_of_plain_decoding(way: str) -> None:
    options: dict[str, Any] = {"on_full": "shift", "ignore_eos": True, "max_tokens": 90}
    plain = run(make(n_ctx=48)[0], [3, 4, 5], proposer="none", **options)
    engine, head, *_ = make(n_ctx=48, nextn_ctx=48) if way == "block" else make_look(n_ctx=48)
    shifted = run(engine, [3, 4, 5], **options)
    assert shifted.token_ids == plain.token_ids
    assert shifted.draft_n_accepted > 0
    assert way == "look" or len(head.pairs) <= 48


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("agreement", [1.0, 0.8])
@pytest.mark.parametrize("leaves", [1, 16])
def test_of_several_heads_each_drafts_one_depth(
    temperature: float, agreement: float, leaves: int
) -> None:
    engine, nextn, _ = make(agreement, heads=3, leaves=leaves)
    prompt = [1 + i % 20 for i in range(30)]
    options: dict[str, Any] = {"draft_max": 6, "ignore_eos": True, "temperature": temperature}
    plain = run(engine, prompt, proposer="none", **options)
    nextn.used.clear()
    finished = run(engine, prompt, **options)
    assert finished.token_ids == plain.token_ids
    assert set(nextn.used) == {0, 1, 2}
    assert all(head == 0 or before == head - 1 for before, head in itertools.pairwise(nextn.used))
    if agreement == 1.0:
        assert leaves > 1 or finished.draft_n_accepted == finished.draft_n
        assert len(finished.token_ids) <= 4 * finished.rounds


def test_one_that_knows_the_target_is_always_right_and_looks_once_a_guess() -> None:
    engine, look = make_look(1.0, leaves=1)
    finished = run(engine, [3, 4, 5], draft_max=4, ignore_eos=True)
    assert finished.acceptance_rate == 1.0
    assert look.looks == finished.draft_n


def test_a_tree_takes_a_look_per_depth() -> None:
    engine, look = make_look(0.5)
    assert run(engine, [3, 4, 5], draft_max=12, ignore_eos=True).draft_n > 2 * look.looks


def test_a_further_turn_reads_only_what_is_new_whoever_answered_before() -> None:
    engine, _ = make_look()
    prompt = [1 + i % 20 for i in range(30)]
    text = prompt + list(run(engine, prompt, proposer="none").token_ids)
    again = run(engine, [*text, 7, 8, 9])
    assert again.cached_n >= len(text) - 1
    assert again.draft_n > 0

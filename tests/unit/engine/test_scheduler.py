"""Conversations side by side: each writes what it would write alone."""

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import llama_cpp as ll
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from side_by_side import V, alone, engine_of, params
from table_model import FakePool

from specllama import paths
from specllama.backend.base import Part
from specllama.backend.kernels import TILE
from specllama.backend.llama_vocab import LlamaVocab
from specllama.engine.engine import Engine
from specllama.engine.pace import CHUNK, Pace
from specllama.engine.pair_loading import SamplerChains
from specllama.engine.serving import Turns
from specllama.errors import EngineError, PromptTooLong, UsageError
from specllama.events import Finished, RoundDone
from specllama.settings.params import GenerateParams, SamplingParams

METHODS = ("draft", "ngram", "suffix", "mixed", "tree", "merged", "lookahead", "none")


def test_two_conversations_take_turns() -> None:
    engine = engine_of(2)
    prompts = [[1, 2, 3, 1, 2], [7, 8, 9]]
    asked = [params("draft", 1), params("mixed", 2)]
    ids = [engine.submit(p, a) for p, a in zip(prompts, asked, strict=True)]
    texts: dict[int, tuple[int, ...]] = {}
    order: list[int] = []
    while events := engine.step():
        for id, event in events:
            if isinstance(event, RoundDone):
                order.append(id)
            if isinstance(event, Finished):
                texts[id] = event.token_ids
    for id, prompt, a in zip(ids, prompts, asked, strict=True):
        assert texts[id] == alone(prompt, a)
    assert 0 < order.index(ids[1]) < len(order) - 1 - order[::-1].index(ids[0]), "side by side"


def test_conversations_share_passes() -> None:
    """As many passes as the longer one takes, not as both take."""
    engine = engine_of(2)
    for seed in (1, 2):
        engine.submit([1, 2, 3], params("none", seed, ends=False))
    while engine.step():
        pass
    pool = engine.target.pool
    assert pool.fake.passes.count(2) == 23
    assert len(pool.fake.passes) < 30


def test_the_row_of_a_prompt_comes_from_a_pass_that_others_share() -> None:
    engine = engine_of(2, tiles=True)
    pool = engine.target.pool
    asked, prompt = params("none", 2, ends=False), [1 + i % 5 for i in range(100)]
    engine.submit([1, 2, 3], params("none", 1, ends=False))
    while len(pool.fake.passes) < 4:
        engine.step()
    id = engine.submit(prompt, asked)
    texts = {}
    while events := engine.step():
        texts |= {id: event.token_ids for id, event in events if isinstance(event, Finished)}
    assert pool.fake.passes[4:7] == [1, 2, 2], "the prompt itself is read apart"
    assert texts[id] == alone(prompt, asked, tiles=True)


def test_a_third_has_to_wait() -> None:
    engine = engine_of(2)
    first, _ = engine.submit([1, 2], params("none", 1)), engine.submit([3], params("none", 2))
    with pytest.raises(EngineError, match="busy"):
        engine.submit([4], params("none", 3))
    engine.drop(first)
    third = engine.submit([4], params("none", 3))
    said = [event for events in iter(engine.step, []) for id, event in events if id == third]
    assert isinstance(said[-1], Finished)
    assert said[-1].token_ids == alone([4], params("none", 3))


def test_an_error_ends_one_conversation_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(request: Any) -> None:
        raise UsageError("not today")

    engine = engine_of(2)
    good = engine.submit([1, 2], params("draft", 1))
    with pytest.raises(PromptTooLong):
        engine.submit([1] * 400, params("draft", 1))
    with pytest.raises(UsageError, match="eagle3"):
        engine.submit([1, 2], params("eagle3", 1))  # there is no such drafter
    monkeypatch.setattr(engine._slots[1].drafters["draft"], "start", start)
    bad = engine.submit([1, 2], params("draft", 1))
    said: dict[int, list[Any]] = {good: [], bad: []}
    while events := engine.step():
        for id, event in events:
            said[id].append(event)
    assert [type(event) for event in said[bad]][-1:] == [UsageError]
    assert said[good][-1].token_ids == alone([1, 2], params("draft", 1))
    for _ in range(2):  # both slots are free again
        engine.submit([1], params("none", 1))


def test_where_no_pass_can_be_shared_each_has_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakePool.run

    def one_by_one(pool: FakePool, parts: Sequence[Part]) -> None:
        if len(parts) > 1:
            raise EngineError("not today")
        run(pool, parts)

    monkeypatch.setattr(FakePool, "run", one_by_one)
    asked = [params("draft", 1), params("none", 2), params("mixed", 3)]
    said = together(engine_of(3), asked)
    texts = {id: event.token_ids for id, event in said if isinstance(event, Finished)}
    wanted = [alone([1 + i, 2, 3, 1 + i, 2], a) for i, a in enumerate(asked)]
    assert [texts[id] for id in sorted(texts)] == wanted


def together(engine: Engine, asked: Sequence[GenerateParams]) -> list[tuple[int, Any]]:
    """Everything that conversations of these wishes say, side by side."""
    for i, a in enumerate(asked):
        engine.submit([1 + i, 2, 3, 1 + i, 2], a)
    return [said for events in iter(engine.step, []) for said in events]


@pytest.mark.parametrize("method", ["draft", "tree", "merged", "lookahead"])
def test_scarce_rows_cut_drafts_and_change_no_text(method: str) -> None:
    asked = [params(method, seed, ends=False) for seed in (1, 2, 3)]
    said = together(engine_of(3, rows=9, leaves=12), asked)
    cut = [e for _, e in said if isinstance(e, RoundDone) and "others share" in e.window_reason]
    assert len(cut) > 5
    assert all(len(event.drafted) < 4 or method == "lookahead" for event in cut)
    for id, event in said:
        if isinstance(event, Finished):
            assert event.token_ids == alone([1 + id, 2, 3, 1 + id, 2], asked[id])
            assert event.draft_n_accepted > 0 or method == "lookahead"
            assert len(event.token_ids) == event.draft_n_accepted + event.rounds - event.cut


@pytest.mark.parametrize("rows", [2, 3])
def test_where_not_even_a_row_each_fits_they_take_turns(rows: int) -> None:
    asked = [params(method, 1, ends=False) for method in ("draft", "none", "tree", "ngram")]
    said = together(engine_of(4, rows=rows), asked)
    rounds = [id for id, event in said if isinstance(event, RoundDone)]
    ends = [i for i, (_, event) in enumerate(said) if isinstance(event, Finished)]
    everybody = [id for id, event in said[: ends[0]] if isinstance(event, RoundDone)]
    for id in range(4):
        assert rounds.count(id) > 5
        waits = [i for i, other in enumerate(everybody) if other == id]
        assert max(b - a for a, b in pairwise(waits)) <= 2 * 4 - 1
    for id, event in said:
        if isinstance(event, Finished):
            assert event.token_ids == alone([1 + id, 2, 3, 1 + id, 2], asked[id])


def test_a_long_prompt_keeps_nobody_from_writing() -> None:
    engine = engine_of(2, rows=4)
    first = engine.submit([1, 2], params("draft", 1, ends=False))
    second = engine.submit([1, 2, 3] * 40, params("none", 1, ends=False))
    order = [id for events in iter(engine.step, []) for id, e in events if isinstance(e, RoundDone)]
    assert order.index(second) < len(order) - order[::-1].index(first) - 1


class Conversations(RuleBasedStateMachine):
    """Any order of submitting, going on, cancelling, dropping: nobody changes another's text.

    Where rows are scarce drafts are cut and passes split.
    """

    @initialize(
        slots=st.integers(1, 3),
        rows=st.sampled_from([2, 3, 5, 9, 65]),
        leaves=st.sampled_from([2, 4, 16]),
    )
    def start(self, slots: int, rows: int, leaves: int) -> None:
        self.engine = engine_of(slots, rows=rows, leaves=min(rows, leaves))
        self.slots = slots
        # coins are thrown for what is sent: only common noise and greed make one text of all cuts
        self.one_text = rows == 65 and leaves == 16
        self.asked: dict[int, tuple[list[int], GenerateParams]] = {}
        self.cancelled: set[int] = set()

    @rule(
        prompt=st.lists(st.integers(1, V - 1), min_size=1, max_size=12),
        method=st.sampled_from(METHODS),
        seed=st.integers(0, 5),
        sampled=st.sampled_from([("match", 0.0), ("match", 0.8), ("rejection", 0.8)]),
    )
    def submit(self, prompt: list[int], method: str, seed: int, sampled: tuple[str, float]) -> None:
        if len(self.asked) < self.slots and (self.one_text or sampled[0] == "match"):
            asked = params(method, seed, rule=sampled[0], temperature=sampled[1])
            self.asked[self.engine.submit(prompt, asked)] = prompt, asked

    @rule(steps=st.integers(1, 12))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            for id, event in self.engine.step():
                if isinstance(event, Finished):
                    text = alone(*self.asked.pop(id))
                    if event.reason == "cancelled":
                        assert id in self.cancelled
                        text = text[: len(event.token_ids)]
                    assert event.token_ids == text

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.asked:
            id = data.draw(st.sampled_from(sorted(self.asked)))
            self.engine.cancel(id)
            self.cancelled.add(id)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.asked:
            id = data.draw(st.sampled_from(sorted(self.asked)))
            self.engine.drop(id)
            del self.asked[id]

    @invariant()
    def lanes_that_rest_hold_their_text(self) -> None:
        for slot in self.engine._seats.free:
            slot.target.pool.settle()
            assert slot.target.n_past == len(slot.target.tokens)


Conversations.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
test_no_text_depends_on_its_neighbours = Conversations.TestCase


# -- requests wait in one order --


def turns_of(*waiting: tuple[str, int]) -> Turns[int]:
    turns = Turns[int]()
    for client, one in waiting:
        turns.put(client, one)
    return turns


def test_what_is_first_is_what_is_taken() -> None:
    turns = turns_of(("a", 1), ("a", 2), ("b", 3), ("a", 4))
    assert sorted(turns) == [1, 2, 3, 4]
    taken = []
    while turns:
        first = next(iter(turns))
        taken.append(turns.pop())
        assert taken[-1] == first
    assert taken == [1, 3, 2, 4]


def test_what_is_taken_back_costs_its_client_no_turn() -> None:
    turns = turns_of(("a", 1), ("b", 2), ("b", 3), ("c", 4))
    assert turns.remove("b", 2)
    assert not turns.remove("b", 2)
    assert not turns.remove("nobody", 4)
    assert turns.remove("c", 4)
    turns.put("c", 5)
    assert [turns.pop() for _ in range(3)] == [1, 3, 5]
    assert not turns


# -- the pace of a prompt while others wait --


@pytest.mark.parametrize(
    ("writing_ms", "reading_ms", "chunk"),
    [
        (10.0, 0.01, CHUNK),  # reading costs next to nothing
        (30.0, 0.3, 300),  # three passes' worth
        (10.0, 5.0, TILE),  # never less than a tile
    ],
)
def test_a_prompt_takes_three_passes_of_the_others(
    writing_ms: float, reading_ms: float, chunk: int
) -> None:
    pace = Pace()
    assert pace.chunk() == 2 * TILE, "nothing is known"
    for _ in range(3):
        pace.passed(4, writing_ms / 1e3)
        pace.passed(128, 128 * reading_ms / 1e3)
    assert pace.chunk() == pytest.approx(chunk, abs=1)
    for _ in range(30):  # the machine became four times as fast in writing
        pace.passed(2, writing_ms / 4e3)
    assert pace.chunk() == pytest.approx(
        min(max(chunk_of(writing_ms / 4, reading_ms), TILE), CHUNK), abs=1
    )


def chunk_of(writing_ms: float, reading_ms: float) -> float:
    return 3 * writing_ms / reading_ms


# -- the sampler for text that fills a gap, against llama.cpp's own --


K = 40


@pytest.fixture(scope="module")
def vocab() -> Iterator[LlamaVocab]:
    params = ll.llama_model_default_params()
    params.vocab_only = True
    model = ll.llama_model_load_from_file(
        os.fsencode(paths.bundled_dir() / "tiny-target-q4_0.gguf"), params
    )
    yield LlamaVocab(model, "gpt-2")
    ll.llama_model_free(model)


def theirs(vocab: LlamaVocab, row: np.ndarray) -> dict[int, float]:
    """What llama.cpp may draw after top-k and the sampler, and how likely."""
    n = len(row)
    data = (ll.llama_token_data * n)(*((t, float(row[t]), 0.0) for t in range(n)))
    array = ll.llama_token_data_array(data, n, -1, False)
    for sampler in (ll.llama_sampler_init_top_k(K), ll.llama_sampler_init_infill(vocab.handle)):
        ll.llama_sampler_apply(sampler, array)
        ll.llama_sampler_free(sampler)
    kept = {array.data[i].id: array.data[i].logit for i in range(array.size)}
    weights = {token: float(np.exp(logit - max(kept.values()))) for token, logit in kept.items()}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 2.0, 4.0])
def test_it_keeps_what_llama_cpp_keeps(vocab: LlamaVocab, sharpness: float) -> None:
    sampling = SamplingParams(temperature=1.0, top_k=K, top_p=1.0, min_p=0.0, infill=True)
    rng, chains, seen = np.random.default_rng(3), SamplerChains(vocab), set()
    ends = [t for t in range(vocab.n_tokens) if vocab.is_eog(t)]
    for case in range(120):
        row = (rng.standard_normal(vocab.n_tokens) * sharpness).astype(np.float32)
        row[ends] += case % 8 * sharpness / 2  # the end is more or less likely
        row[rng.integers(vocab.n_tokens)] = row.max() + rng.random()
        chain = chains.chain(GenerateParams(sampling=sampling), 1, [], 0)
        law, want = chain.law(row), theirs(vocab, row)
        got = dict(zip(law.ids.tolist(), law.probs.tolist(), strict=True))
        if len(want) == 1 and vocab.is_eog(next(iter(want))):
            assert all(map(vocab.is_eog, got))
        else:
            assert got == pytest.approx(want, abs=1e-5)
        seen.add((len(want), bool(want.keys() & set(ends))))
    assert len(seen) > 1

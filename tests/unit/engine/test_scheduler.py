"""Conversations side by side: each writes what it would write alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from side_by_side import V, alone, engine_of, params
from table_model import FakePool

from specllama.backend.base import Part
from specllama.engine.engine import Engine
from specllama.errors import EngineError, PromptTooLong, UsageError
from specllama.events import Finished, RoundDone
from specllama.settings.params import GenerateParams

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
    assert isinstance(pool, FakePool)
    assert pool.fake.passes.count(2) == 23
    assert len(pool.fake.passes) < 30


def test_the_row_of_a_prompt_comes_from_a_pass_that_others_share() -> None:
    engine = engine_of(2, tiles=True)
    pool = engine.target.pool
    assert isinstance(pool, FakePool)
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


def test_where_no_pass_can_be_shared_each_has_its_own_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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

"""The EAGLE-3 proposer on a table head: one text per seed, exact rejection, states or no draft."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from engines import FakeContext
from head_lanes import FakeHeadLane
from oracle import Oracle, Tokens, bias
from toys import FULL, LAYERS, PROMPT, WIDTH, ChainToy, Leaves, NotTwice, Setup, V, is_eog

from specllama.arrays import Row, Rows
from specllama.backend.fake import FakeTable
from specllama.errors import ContextFull
from specllama.speculative.drafting.drafter import Request
from specllama.speculative.drafting.eagle3 import EagleDrafter
from specllama.speculative.effects import run_alone
from specllama.speculative.round import Rounds
from specllama.speculative.rules import MATCH, REJECTION, RandomCoins, rule_of
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import Draft, Room
from specllama.speculative.window import FixedWindow


class FakeHead(FakeHeadLane):
    """A head that knows the table. It checks what it is fed: encoded states of the target, one of
    each position, and its own behind guesses only."""

    def __init__(
        self, table: FakeTable, target: FakeContext, known: FakeTable, n_ctx: int = 512
    ) -> None:
        self.n_ctx, self.n_batch, self.width, self.heads = n_ctx, 16, WIDTH, 1
        self.max_rows = 16
        self.grown: list[int] = []  # nodes of each pass over guesses
        self._nodes: list[list[int]] = []  # guesses on the path to each
        self.first = 0
        self.layers = LAYERS
        self.pairs: list[tuple[int, bool]] = []  # token, with a state of the target
        self.read: list[int] = []  # pairs of each pass with states of the target
        self.encoded: list[int] = []  # states of each pass of the encoder
        self._table = table
        self._of, self._known = target, known

    @property
    def end(self) -> int:
        return self.first + len(self.pairs)

    def encode(self, features: Rows) -> Rows:
        self.encoded.append(len(features))
        states = np.full((len(features), WIDTH), 2.0, np.float32)
        states[:, : features.shape[1]] = 2.0 * features
        return states

    def feed(self, tokens: Sequence[int], states: Rows) -> tuple[Row, Row]:
        assert 0 < len(tokens) <= self.n_batch
        self._nodes = []
        if len(self.pairs) + len(tokens) > self.n_ctx:
            raise ContextFull("full")
        for token, state in zip(tokens, states, strict=True):
            text = [*self._of.tokens, token]
            assert text[self.end] == token
            row = self._known.row(text[: self.end])[:WIDTH]
            assert np.array_equal(state[: len(row)], 2.0 * row)
            self.pairs.append((token, True))
        self.read.append(len(tokens))
        return self._table.row(self._text), np.ones(WIDTH, np.float32)

    @property
    def _text(self) -> list[int]:
        return [*self._of.tokens[: self.first], *(token for token, _ in self.pairs)]

    def grow(
        self, tokens: Sequence[int], states: Rows, parents: Sequence[int], head: int = 0
    ) -> tuple[Rows, Rows]:
        assert (states == 1).all()
        self.grown.append(len(tokens))
        rows = []
        for token, parent in zip(tokens, parents, strict=True):
            assert parent < len(self._nodes)
            self._nodes.append([*(self._nodes[parent] if parent >= 0 else ()), token])
            rows.append(self._table.row([*self._text, *self._nodes[-1]]))
        if len(self.pairs) + len(self._nodes) > self.n_ctx:
            raise ContextFull("full")
        return np.stack(rows), np.ones((len(tokens), WIDTH), np.float32)

    def drop(self) -> None:
        self._nodes = []

    def rollback_to(self, end: int) -> None:
        assert self.first <= end <= self.end
        del self.pairs[end - self.first :]
        self._nodes = []

    def begin_at(self, position: int) -> None:
        self.first = position
        self.pairs.clear()
        self._nodes = []

    def close(self) -> None:
        self.begin_at(0)


def head_for(setup: Setup, target: FakeContext, agreement: float = 0.7) -> EagleDrafter:
    table = FakeTable(V, seed=6, sharpness=1.5, of=setup.table, agreement=agreement)
    return EagleDrafter(FakeHead(table, target, setup.table), target, n_vocab=V)


def head_of(proposer: EagleDrafter) -> FakeHead:
    assert isinstance(proposer._lane, FakeHead)
    return proposer._lane


def run(setup: Setup, leaves: int, agreement: float = 0.7) -> tuple[list[int], list[Draft]]:
    """A reply of the setup, drafted with a head."""
    tokens = list(PROMPT)
    target = FakeContext(setup.table, n_ctx=256)
    target.capture(LAYERS)
    target.forward(tokens[:-1], outputs="none")
    proposer = Leaves(head_for(setup, target, agreement), leaves)
    coins = RandomCoins((setup.seed, 2))
    proposer.start(Request(seed=setup.seed, rule=rule_of(setup.rule), coins=coins, is_eog=is_eog))
    loop = Rounds(
        target=target,
        drafter=proposer,
        tokens=tokens,
        chain=SamplerChain(setup.sampling, seed=setup.seed, tokens=tokens),
        window=FixedWindow(setup.draft_max),
        rule=rule_of(setup.rule),
        seed=setup.seed,
        coins=RandomCoins((setup.seed, 1)),
        is_stop=is_eog,
        pass_rows=65,
    )
    while len(tokens) < 60 and not is_eog(tokens[-1]):
        run_alone(loop.round())
    return tokens[:60], proposer.drafts


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("leaves", [1, 4])
def test_same_seed_same_text(temperature: float, leaves: int) -> None:
    for seed in range(5):
        sampling = dataclasses.replace(FULL, temperature=temperature)
        setup = Setup(seed=seed, sampling=sampling, draft_max=6, eog_bias=-20.0)
        plain, _ = run(dataclasses.replace(setup, draft_max=0), leaves)
        text, drafts = run(setup, leaves)
        assert text == plain
        assert sum(map(len, drafts)) > 20
        assert all(draft.is_chain for draft in drafts) == (leaves == 1)


@pytest.mark.parametrize("grammar", [False, True])
@pytest.mark.parametrize("case", ["plain", "truncated", "penalties"])
@pytest.mark.parametrize(("siblings", "nodes", "leaves"), [(1, 2, 1), (2, 3, 4), (3, 4, 4)])
def test_rejection_is_exact(
    siblings: int, nodes: int, leaves: int, case: str, grammar: bool
) -> None:
    """Sampled, fixed and hybrid children of a head, over all outcomes of the coins."""
    sampling = {
        "plain": FULL,
        "truncated": dataclasses.replace(FULL, top_k=2, temperature=0.8),
        "penalties": dataclasses.replace(FULL, repeat_penalty=1.5, presence_penalty=0.5),
    }[case]
    prompt, length = [1, 2, 1, 2], 2
    setup = Setup(sampling=sampling, rule="rejection", grammar=grammar)
    table = FakeTable(3, seed=2, sharpness=0.8)
    other = FakeTable(3, seed=3, sharpness=0.8, of=table, agreement=0.4)
    shapes: set[tuple[int, ...]] = set()

    def program(oracle: Oracle) -> Tokens:
        tokens = list(prompt)
        target = FakeContext(table, n_ctx=16)
        target.capture(LAYERS)
        target.forward(tokens[:-1], outputs="none")
        proposer = EagleDrafter(FakeHead(other, target, table, 16), target, n_vocab=3)
        proposer.siblings = siblings
        request = Request(
            seed=0,
            rule=REJECTION,
            coins=oracle,
            is_eog=is_eog,
            leaves=leaves,
            pass_rows=16,
        )
        proposer.start(request)
        loop = Rounds(
            target=target,
            drafter=proposer,
            tokens=tokens,
            chain=SamplerChain(sampling, tokens=tokens, constraint=NotTwice() if grammar else None),
            window=FixedWindow(nodes),
            rule=REJECTION,
            seed=0,
            coins=oracle,
            is_stop=is_eog,
            pass_rows=65,
        )
        while len(tokens) < len(prompt) + length and not is_eog(tokens[-1]):
            shapes.add(run_alone(loop.round()).draft.parents)
        return tuple(tokens[len(prompt) :])

    assert bias(program, ChainToy(setup, table, prompt), length).tv < 1e-9
    assert any(shapes)
    if siblings > 1 and not grammar:
        assert any(parents.count(-1) > 1 for parents in shapes)


def propose(proposer: EagleDrafter, tokens: list[int]) -> Draft:
    coins = RandomCoins((1,))
    proposer.start(Request(seed=1, rule=MATCH, coins=coins, is_eog=is_eog, leaves=4))
    return run_alone(proposer.draft(tokens, SamplerChain(FULL, seed=1, tokens=tokens), Room(4)))


def test_only_what_was_accepted_is_read_again() -> None:
    """A round feeds the accepted tokens and the target's own, not the whole pass."""
    setup = Setup(eog_bias=-20.0)
    target = FakeContext(setup.table, n_ctx=64)
    target.capture(LAYERS)
    target.forward([1, 2, 3, 4], outputs="none")
    proposer = head_for(setup, target)
    head = head_of(proposer)
    assert len(propose(proposer, [1, 2, 3, 4, 5])) == 4
    target.forward([5, 6, 7, 8], outputs="all")
    target.rollback(6)  # 5 and 6 are known now, 9 is pending
    assert len(propose(proposer, [1, 2, 3, 4, 5, 6, 9])) == 4
    assert head.read == [4, 2]
    assert head.encoded == [4, 2]


def test_without_states_there_is_no_draft() -> None:
    setup = Setup(eog_bias=-20.0)
    target = FakeContext(setup.table, n_ctx=64)
    target.forward([1, 2, 3, 4], outputs="none")
    proposer = head_for(setup, target)
    assert len(propose(proposer, [1, 2, 3, 4, 5])) == 0


def test_states_of_a_later_part_suffice() -> None:
    """Another method drafted first: the head begins where its states do."""
    setup = Setup(eog_bias=-20.0)
    target = FakeContext(setup.table, n_ctx=64)
    target.forward([1, 2, 3, 4], outputs="none")
    target.capture(LAYERS)
    target.forward([5], outputs="all")
    proposer = head_for(setup, target)
    assert len(propose(proposer, [1, 2, 3, 4, 5, 6])) > 0
    head = head_of(proposer)
    assert head.first == 5
    target.forward([6, 7], outputs="all")
    assert len(propose(proposer, [1, 2, 3, 4, 5, 6, 7, 8])) > 0
    assert head.first == 5
    assert head.encoded == [1, 2]


def test_states_outlive_another_method() -> None:
    """Its states are forgotten by the target, not by the head: only what follows is read again."""
    setup = Setup(eog_bias=-20.0)
    target = FakeContext(setup.table, n_ctx=64)
    target.capture(LAYERS)
    target.forward([1, 2, 3, 4], outputs="none")
    proposer = head_for(setup, target)
    assert len(propose(proposer, [1, 2, 3, 4, 5])) == 4
    target.capture("nothing")
    target.forward([5, 6], outputs="all")
    target.capture(LAYERS)
    assert proposer.reusable([1, 2, 3, 4, 5, 6, 7], 6) == 4
    target.rollback(4)
    target.forward([5, 6], outputs="none")
    assert proposer.reusable([1, 2, 3, 4, 5, 6, 7], 6) == 6
    assert len(propose(proposer, [1, 2, 3, 4, 5, 6, 7])) == 4
    assert head_of(proposer).read == [4, 2]


def test_it_asks_for_the_layer_inputs() -> None:
    setup = Setup()
    assert head_for(setup, FakeContext(setup.table)).needs == LAYERS

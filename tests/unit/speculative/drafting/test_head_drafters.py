"""What every kind of head keeps: one text per seed, exact rejection, states or no draft."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from engines import FakeContext
from head_fakes import BLOCKS, HEAD_DRAFTERS
from table_model import FakeTable
from toys import EXACT, FULL, LAYERS, PROMPT, Leaves, Setup, V, is_eog

from specllama.settings.params import VerifyRule
from specllama.speculative.drafting.drafter import Drafter, Request
from specllama.speculative.effects import run_alone
from specllama.speculative.rules import RandomCoins, rule_of
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import Draft, Room

LAYERED = {"eagle3": 1, "dflash": 0}  # read layers of the target: tokens before their first state


def drafter_for(kind: str, setup: Setup, target: FakeContext) -> Drafter:
    table = FakeTable(V, seed=6, sharpness=1.5, of=setup.table, agreement=0.7)
    return HEAD_DRAFTERS[kind](table, target, setup.table, 512)


def lane_of(drafter: Drafter) -> Any:
    return drafter._lane  # type: ignore[attr-defined]


def run(kind: str, setup: Setup, leaves: int) -> tuple[list[int], list[Draft]]:
    """A reply of the setup, drafted with a head."""
    tokens, target = list(PROMPT), FakeContext(setup.table, n_ctx=256)
    proposer = Leaves(drafter_for(kind, setup, target), leaves)
    loop = setup.loop(proposer, target, tokens, coins=RandomCoins((setup.seed, 2)))
    while len(tokens) < 60 and not is_eog(tokens[-1]):
        run_alone(loop.round())
    return tokens[:60], proposer.drafts


@pytest.mark.parametrize("kind", HEAD_DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("leaves", [1, 4])
def test_same_seed_same_text(temperature: float, leaves: int, kind: str) -> None:
    for seed in range(4):
        sampling = dataclasses.replace(FULL, temperature=temperature)
        setup = Setup(seed=seed, sampling=sampling, draft_max=6, eog_bias=-20.0)
        plain, _ = run(kind, dataclasses.replace(setup, draft_max=0), leaves)
        text, drafts = run(kind, setup, leaves)
        assert text == plain
        assert sum(map(len, drafts)) > 20
        assert all(draft.is_chain for draft in drafts) == (leaves == 1)


@pytest.mark.parametrize("kind", HEAD_DRAFTERS)
@pytest.mark.parametrize("case", ["plain", "truncated", "penalties", "grammar", "cut grammar"])
@pytest.mark.parametrize(
    ("rule", "siblings", "nodes", "leaves"),
    [("rejection", 1, 2, 1), ("rejection", 2, 3, 4), ("rejection", 3, 4, 4), ("block", 1, 2, 1)],
)
def test_rejection_is_exact(
    rule: VerifyRule, siblings: int, nodes: int, leaves: int, case: str, kind: str
) -> None:
    """Sampled, fixed and hybrid children, laws that depend on what was drawn before: over all
    outcomes of the coins."""
    if kind in BLOCKS and nodes == 4:
        pytest.skip("a block of so many places has too many outcomes")
    grammar = "grammar" in case
    sampling = EXACT["truncated" if case == "cut grammar" else case.replace("grammar", "plain")]
    setup = Setup(sampling=sampling, seed=0, rule=rule, grammar=grammar, draft_max=nodes)
    table = FakeTable(3, seed=2, sharpness=0.8)
    other = FakeTable(3, seed=3, sharpness=0.8, of=table, agreement=0.4)
    shapes: set[tuple[int, ...]] = set()

    def make(target: FakeContext) -> Drafter:
        proposer = HEAD_DRAFTERS[kind](other, target, table, 16)
        if hasattr(proposer, "siblings"):
            proposer.siblings = siblings
        return proposer

    off = setup.off_by(
        make, table, [1, 2, 1, 2], 2, lambda done: shapes.add(done.parents), leaves=leaves,
        pass_rows=16,
    )  # fmt: skip
    assert off < 1e-9
    assert max(map(len, shapes)) > 1
    if siblings > 1 and not grammar:
        assert any(parents.count(-1) > 1 for parents in shapes)


# -- those that read layers of the target -------------------------------------------------------


def propose(drafter: Drafter, tokens: list[int]) -> Draft:
    coins = RandomCoins((1,))
    drafter.start(Request(seed=1, rule=rule_of("match"), coins=coins, is_eog=is_eog, leaves=4))
    return run_alone(drafter.draft(tokens, SamplerChain(FULL, seed=1, tokens=tokens), Room(4)))


def begun(kind: str, tokens: Sequence[int] = (1, 2, 3, 4)) -> tuple[FakeContext, Drafter]:
    """A target that has read a text, with its drafter."""
    setup = Setup(eog_bias=-20.0)
    target = FakeContext(setup.table, n_ctx=64)
    drafter = drafter_for(kind, setup, target)
    target.capture(drafter.needs)
    target.forward(list(tokens), outputs="none")
    return target, drafter


@pytest.mark.parametrize("kind", LAYERED)
def test_only_what_was_accepted_is_read_again(kind: str) -> None:
    """A round feeds the accepted tokens and the target's own, not the whole pass."""
    target, drafter = begun(kind)
    assert len(propose(drafter, [1, 2, 3, 4, 5])) == 4
    target.forward([5, 6, 7, 8], outputs="all")
    target.rollback(6)  # 5 and 6 are known now, 9 is pending
    assert len(propose(drafter, [1, 2, 3, 4, 5, 6, 9])) == 4
    assert lane_of(drafter).reads == [4, 2]
    if kind == "eagle3":
        assert lane_of(drafter).encoded == [4, 2]


@pytest.mark.parametrize("kind", LAYERED)
def test_without_states_there_is_no_draft(kind: str) -> None:
    target, drafter = begun(kind)
    target.capture("nothing")
    assert len(propose(drafter, [1, 2, 3, 4, 5])) == 0


@pytest.mark.parametrize("kind", LAYERED)
def test_states_of_a_later_part_suffice(kind: str) -> None:
    """Another method drafted first: the head begins where its states do."""
    target, drafter = begun(kind)
    target.capture("nothing")
    target.capture(LAYERS)
    target.forward([5], outputs="all")
    assert len(propose(drafter, [1, 2, 3, 4, 5, 6])) == 4
    lane, first = lane_of(drafter), 4 + LAYERED[kind]
    assert lane.first == first
    assert kind == "eagle3" or drafter.reusable([1, 2, 3, 4, 5, 6], 5) == 5
    target.forward([6, 7], outputs="all")
    assert len(propose(drafter, [1, 2, 3, 4, 5, 6, 7, 8])) == 4
    assert lane.first == first
    assert lane.reads == [1, 2]


@pytest.mark.parametrize("kind", LAYERED)
def test_states_outlive_another_method(kind: str) -> None:
    """Its states are forgotten by the target, not by the head: only what follows is read again."""
    target, drafter = begun(kind)
    assert len(propose(drafter, [1, 2, 3, 4, 5])) == 4
    target.capture("nothing")
    target.forward([5, 6], outputs="all")
    target.capture(LAYERS)
    assert drafter.reusable([1, 2, 3, 4, 5, 6, 7], 6) == 4
    target.rollback(4)
    target.forward([5, 6], outputs="none")
    assert drafter.reusable([1, 2, 3, 4, 5, 6, 7], 6) == 6
    assert len(propose(drafter, [1, 2, 3, 4, 5, 6, 7])) == 4
    assert lane_of(drafter).reads == [4, 2]


@pytest.mark.parametrize("kind", LAYERED)
def test_it_asks_for_its_layers(kind: str) -> None:
    assert begun(kind)[1].needs == LAYERS

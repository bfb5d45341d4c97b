"""Forced text: what a constraint tells is drafted, and how right it was is learnt by token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from toys import FULL

from specllama.speculative.drafting.drafter import Request
from specllama.speculative.drafting.forced import ForcedDrafter
from specllama.speculative.effects import run_alone
from specllama.speculative.rules import MATCH, RandomCoins
from specllama.speculative.sampling import Constraint, SamplerChain
from specllama.speculative.types import EMPTY_DRAFT, Draft, Room, Verdict

STOP = 9


class Tells:
    """A constraint that allows everything and tells what it was given."""

    def __init__(self, told: Sequence[tuple[int, float]]) -> None:
        self.told = list(told)

    def allowed(self, ids: object) -> object:
        raise AssertionError("a draft does not depend on it")

    def accept(self, token: int) -> None:
        raise AssertionError("a draft does not move it")

    def fork(self) -> Tells:
        return self

    def ahead(self, most: int, habits: dict[bytes, dict[bytes, float]]) -> list[tuple[int, float]]:
        return self.told[:most]


def chain(*told: tuple[int, float]) -> SamplerChain:
    constraint: Constraint = Tells(told)  # type: ignore[assignment]
    return SamplerChain(FULL, constraint=constraint)


def started() -> ForcedDrafter:
    drafter = ForcedDrafter()
    drafter.start(Request(seed=0, rule=MATCH, coins=RandomCoins(0), is_eog=lambda t: t == STOP))
    return drafter


def draft(drafter: ForcedDrafter, chain: SamplerChain, n: int = 8) -> Draft:
    return run_alone(drafter.draft([1, 2], chain, Room(n)))


def test_nothing_is_drafted_where_nothing_constrains() -> None:
    assert draft(started(), SamplerChain(FULL)) == EMPTY_DRAFT
    assert draft(started(), chain()) == EMPTY_DRAFT


def test_it_drafts_a_chain_of_point_masses() -> None:
    one = draft(started(), chain((4, 1.0), (5, 1.0), (6, 0.5)), 2)
    assert (one.tokens, one.is_chain, one.sources) == ((4, 5), True, ("forced", "forced"))
    assert one.q == (None, None)


@pytest.mark.parametrize("right", [True, False])
def test_doubts_are_settled_by_token(right: bool) -> None:
    drafter = started()
    for _ in range(6):
        (guess,) = drafter.guesses([1], chain((4, 1.0), (5, 0.5), (6, 0.5)), 8)
        text = [1, 4, 5 if right else 7]
        drafter.commit(text, EMPTY_DRAFT, Verdict((0,), text[-1], "recovered"))
    (guess,) = drafter.guesses([1], chain((4, 1.0), (5, 0.5), (6, 0.5)), 8)
    assert guess.shares[0] == 1.0
    assert guess.shares[1] > 0.8 if right else guess.shares[1] < 0.2
    assert guess.shares[2] == 0.5, "it was never tested"
    drafter.forget()
    (guess,) = drafter.guesses([1], chain((5, 0.5)), 8)
    assert guess.shares == (0.5,)


def test_the_end_is_the_one_that_ended_a_text_before() -> None:
    drafter = started()
    over = chain((4, 1.0), (-1, 1.0))
    assert draft(drafter, over).tokens == (4,)
    assert draft(drafter, chain((-1, 1.0))) == EMPTY_DRAFT
    drafter.commit([1, 4, STOP], EMPTY_DRAFT, Verdict((), STOP, "plain"))
    assert draft(drafter, over).tokens == (4, STOP)

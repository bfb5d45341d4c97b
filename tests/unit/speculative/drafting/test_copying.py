"""What the text's own habits say about a copied token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specllama.speculative.drafting import copying
from specllama.speculative.drafting.copying import Backoff
from specllama.text_history import History


def of(text: list[int]) -> Backoff:
    habits = Backoff()
    habits.follow(History(text))
    return habits


def test_the_estimate_is_that_of_witten_and_bell() -> None:
    habits = of([1, 2, 3, 9, 2, 3, 8, 2, 4, 1, 2])
    # after 2 came 3, 3, 4; after (1, 2) came 3
    one = (2 + 2 * 0.02) / (3 + 2)
    assert habits.likely([3]) == pytest.approx([(1 + 1 * one) / (1 + 1)])
    other = (1 + 2 * 0.02) / (3 + 2)
    assert habits.likely([4]) == pytest.approx([(0 + 1 * other) / (1 + 1)])
    assert habits.likely([7])[0] == pytest.approx(0.5 * (2 * 0.02) / 5)


def test_a_copied_token_is_judged_behind_those_before_it() -> None:
    habits = of([1, 2, 3, 4, 5, 1, 2])
    behind_3 = (1 + 0.02) / (1 + 1)
    first, second = habits.likely([3, 4])
    assert second == pytest.approx((1 + behind_3) / (1 + 1)), "behind (2, 3), where 4 always came"
    assert habits.likely([4])[0] < 0.01, "behind (1, 2) it never did"
    # copying proves nothing: the counts are those of the text
    assert habits.likely([3, 4]) == (first, second) == of([1, 2, 3, 4, 5, 1, 2]).likely([3, 4])


def test_what_always_follows_is_safer_than_one_of_many() -> None:
    key, colon = 1, 2
    values = of([key, colon, 10, key, colon, 11, key, colon, 12, key, colon])
    always = of([key, colon, 10, key, colon, 10, key, colon, 10, key, colon])
    assert always.likely([10])[0] > 0.9
    assert values.likely([12])[0] < 0.4
    assert Backoff().likely([5, 6]) == (0.02, 0.02)


Change = tuple[int, list[int]]  # tokens kept (modulo the length), tokens that follow


@pytest.mark.parametrize("newest", [3, 4096])
@given(st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, 5), max_size=9)), max_size=9))
def test_following_changes_is_reading_at_once(newest: int, changes: list[Change]) -> None:
    """Whatever is counted one by one or sorted, appended or cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "_NEWEST", newest)
        text, habits, copied = History(), Backoff(), [0, 1, 2]
        for keep, more in changes:
            text.cut(keep)
            text.extend(more)
            habits.follow(text)
            assert habits.likely(copied) == pytest.approx(of(list(text)).likely(copied), abs=1e-15)
            assert all(0.0 < p < 1.0 for p in habits.likely(copied))

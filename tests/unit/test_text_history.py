"""A text that is appended and cut, its followers, and where its end stands elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specllama import text_history as module
from specllama.speculative import matches as matching
from specllama.speculative.matches import Matches, common_suffix
from specllama.text_history import Follower, History, common_prefix

Change = tuple[int, list[int], bool]  # tokens kept, tokens that follow, whether the follower looks
TEXTS = st.lists(st.integers(0, 3), max_size=12)
MARKED = st.lists(st.sampled_from((-1, 0, 1, 70_000)), max_size=12)  # -1 stands between two texts
CHANGES = st.lists(st.tuples(st.integers(0, 60), TEXTS, st.booleans()), max_size=12)


@given(CHANGES)
def test_a_follower_learns_how_much_still_stands(changes: list[Change]) -> None:
    text, seen = History(), list[int]()
    mark = text.mark()
    for keep, more, looks in changes:
        stands = min(keep, len(seen))
        text.cut(keep)
        seen = seen[:stands]
        text.extend(more)
        assert text.kept(mark) == len(seen)
        if looks:
            mark, seen = text.mark(), list(text)
        assert text[: len(seen)] == seen


@pytest.mark.parametrize("lists", [False, True])
@given(CHANGES)
def test_a_follower_reads_only_what_is_new(lists: bool, changes: list[Change]) -> None:
    text, follower, read = History(), Follower(), list[int]()
    for keep, more, looks in changes:
        text.cut(keep)
        text.extend(more)
        if looks:
            kept, edited = follower.follow(list(text) if lists else text)
            assert text[:kept] == read[:kept]
            assert edited is (kept < len(read))
            if not lists:  # what was cut and came again is read again
                assert kept == len(read) or edited
            read = list(follower.text)
            assert read == text
    other = History(text)
    assert follower.follow(other) == (0, bool(read))
    assert follower.text is other


@pytest.mark.parametrize("unsorted", [2, 4096])
@given(st.lists(st.tuples(st.integers(0, 60), MARKED), max_size=12))
def test_places_are_those_of_the_text(unsorted: int, changes: list[tuple[int, list[int]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_UNSORTED", unsorted)
        text = History()
        for keep, more in changes:
            text.cut(keep)
            text.extend(more)
            assert text.array.tolist() == text
            for token in (-1, 0, 1, 70_000):
                assert text.places(token).tolist() == [i for i, t in enumerate(text) if t == token]


def test_a_history_changes_at_its_end_only() -> None:
    text = History([1, 2, 3, 4])
    assert text.replace([1, 2, 5]) == 2
    assert text == [1, 2, 5]
    del text[1:]
    text += [7]
    text.append(8)
    assert text == [1, 7, 8]
    for change in (
        lambda: text.insert(0, 1),
        lambda: text.pop(),
        lambda: text.__setitem__(0, 9),
        lambda: text.__delitem__(0),
        lambda: text.sort(),
    ):
        with pytest.raises(TypeError, match="at its end only"):
            change()
    assert text == [1, 7, 8]


@given(TEXTS, TEXTS)
def test_common_prefix_and_suffix(a: list[int], b: list[int]) -> None:
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]
    assert common_prefix(History(a), History(b)) == n
    back = common_prefix(a[::-1], b[::-1])
    assert common_suffix(np.array(a, np.int32), np.array(b, np.int32)) == back


@given(st.integers(0, 400), st.integers(0, 400), st.integers(0, 400))
def test_a_long_common_suffix(shared: int, before: int, other: int) -> None:
    tail = list(range(shared))
    a, b = np.array([-1] * before + tail, np.int32), np.array([-2] * other + tail, np.int32)
    assert common_suffix(a, b) == shared


def brute_force(within: History, text: History) -> list[tuple[int, int]]:
    found = []
    for place in range(len(within) - (within is text)):
        n = 0
        while n <= place and n < len(text) and within[place - n] == text[len(text) - 1 - n]:
            n += 1
        if n:
            found.append((place, n))
    return found


@contextmanager
def shallow(few: int) -> Iterator[None]:
    """Make short texts search as long ones do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matching, "_FEW", few)
        patch.setattr(matching, "_DEEP", 5)
        yield


@pytest.mark.parametrize("few", [0, 4])
@given(CHANGES, st.lists(st.integers(-1, 3), max_size=30))
def test_matches_are_those_of_brute_force(
    few: int, changes: list[Change], earlier: list[int]
) -> None:
    """In the text itself and in another, looked up anew and followed."""
    with shallow(few):
        text, past = History(), History(earlier)
        own, other = Matches(text), Matches(past)
        for keep, more, looks in changes:
            text.cut(keep)
            text.extend(more)
            if not looks:
                continue
            for matches in (own, other):
                matches.follow(text)
                expected = brute_force(matches.within, text)
                assert matches.places.tolist() == [place for place, _ in expected]
                for found, (_, n) in zip(matches.lengths.tolist(), expected, strict=True):
                    assert found == n or 5 <= found < n


@pytest.mark.parametrize("few", [1, 4])
@given(CHANGES, CHANGES)
def test_both_texts_may_grow_and_be_cut(
    few: int, changes: list[Change], there: list[Change]
) -> None:
    with shallow(few):
        text, other = History(), History()
        matches = Matches(other)
        for (keep, more, looks), (left, new, _) in zip(changes, there, strict=False):
            text.cut(keep)
            text.extend((*more, 1))
            other.cut(left)
            other.extend(new)
            if not looks:
                continue
            matches.follow(text)
            expected = brute_force(other, text)
            assert matches.places.tolist() == [place for place, _ in expected]
            for found, (_, n) in zip(matches.lengths.tolist(), expected, strict=True):
                assert found == n or 5 <= found < n

"""Counters only; rates are derived and None where they mean nothing."""

import pytest
from fakes import round_done
from hypothesis import given, settings
from hypothesis import strategies as st

from specllama.backend.exactness import Exactness
from specllama.events import Finished, RoundDone
from specllama.figures import SpecStats, rounding

rounds = st.integers(0, 6).flatmap(
    lambda n: st.builds(
        lambda a, cut: round_done(n, a, cut=cut and int(a > 0)),
        st.integers(0, n),
        st.integers(0, 1),
    )
)


def observed(done: list[RoundDone]) -> SpecStats:
    stats = SpecStats()
    for one in done:
        stats.observe(one)
    return stats


def test_nothing_observed_has_no_rates() -> None:
    stats = SpecStats()
    assert stats.acceptance_rate is None
    assert stats.mean_acceptance_length is None
    assert stats.by_depth == []
    assert stats.rejected == 0


def test_plain_rounds_have_a_length_but_no_rate() -> None:
    stats = observed([round_done(), round_done()])
    assert stats.acceptance_rate is None
    assert stats.mean_acceptance_length == 1.0
    assert stats.drafted_at == []


def test_a_known_run() -> None:
    stats = observed([round_done(), round_done(4, 2), round_done(4, 4), round_done(2, 1, cut=1)])
    assert (stats.rounds, stats.drafted, stats.accepted, stats.emitted, stats.cut) == (
        4, 10, 7, 10, 1,
    )  # fmt: skip
    assert stats.acceptance_rate == 0.7
    assert stats.mean_acceptance_length == 1 + 7 / 4
    assert stats.rejected == 3
    assert stats.drafted_at == [3, 3, 2, 2]
    assert stats.accepted_at == [3, 2, 1, 1]
    assert [at.of_rounds for at in stats.by_depth] == [0.75, 0.5, 0.25, 0.25]
    assert stats.near_ties == 1
    assert (stats.draft_ms, stats.verify_ms, stats.other_ms) == (4.0, 8.0, 2.0)


def test_trees_count_depth_not_nodes() -> None:
    stats = observed([round_done(parents=(-1, -1, 0, 2, 1), accepted=2)])
    assert stats.drafted == 5
    assert stats.drafted_at == [1, 1, 1]
    assert stats.accepted_at == [1, 1, 0]


@settings(max_examples=40)
@given(st.lists(rounds, max_size=12))
def test_conservation(done: list[RoundDone]) -> None:
    stats = observed(done)
    assert stats.emitted == stats.accepted + stats.rounds - stats.cut
    assert sum(stats.accepted_at) == stats.accepted
    assert all(a <= d for a, d in zip(stats.accepted_at, stats.drafted_at, strict=True))
    assert stats.accepted_at == sorted(stats.accepted_at, reverse=True)


@pytest.mark.parametrize(
    ("exactness", "ties", "said", "seen"),
    [
        ("near-ties possible (not measured yet)", 8, "not compared here yet", False),
        ("near-ties possible beyond 2 rows (not measured)", 1, "not compared here yet", False),
        ("near-ties possible", 8, "up to rounding: 8 near-ties", True),
        ("near-ties possible beyond 2 rows", 1, "up to rounding: 1 near-tie", True),
        ("bitwise up to 65 rows", 0, "", False),
    ],
)
def test_rounding_that_was_not_compared_is_no_finding(
    exactness: str, ties: int, said: str, seen: bool
) -> None:
    words, found = rounding(Finished("length", exactness=exactness, near_ties=ties))
    assert words.endswith(said)
    assert found is seen
    assert bool(words) == bool(said)


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("why_not", ["", "it is busy"])
def test_the_label_of_an_exactness_tells_if_it_was_compared(rows: int, why_not: str) -> None:
    label = Exactness(rows=rows, why_not=why_not).label
    _, seen = rounding(Finished("length", exactness=label, near_ties=3))
    assert seen == (not why_not)

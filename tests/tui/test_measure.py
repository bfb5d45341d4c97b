from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest
from fakes import Reply, ScriptedEngine

from specllama.events import RoundDone
from specllama.params import GenerateParams
from specllama.tui.measure import Meter, SpeedModel
from specllama.tui.record import depth_of
from specllama.tui.widgets.stats_strip import StripState
from specllama.verdict import STILL


# Entries of the table of best speed-ups, by (α, c, β): speed-up and k.
@pytest.mark.parametrize(
    ("alpha", "c", "beta", "speedup", "k"),
    [
        (0.5, 0.0, 0.03, 1.73, 4),
        (0.6, 0.1, 0.12, 1.36, 2),
        (0.7, 0.05, 0.03, 2.10, 5),
        (0.8, 0.1, 0.03, 2.24, 5),
        (0.9, 0.1, 0.12, 2.25, 6),
        (0.95, 0.2, 0.12, 2.08, 7),
        (0.6, 0.1, 0.55, 1.00, 0),
    ],
)
def test_the_best_k_is_the_one_of_the_closed_form(
    alpha: float, c: float, beta: float, speedup: float, k: int
) -> None:
    model = SpeedModel(alpha, c, beta)
    best, top = model.best(32)
    assert best == k
    assert top == pytest.approx(speedup, abs=0.006)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("cost", [0.0, 0.05, 0.2, 0.5, 0.95])
def test_it_pays_if_and_only_if_alpha_exceeds_c_plus_beta(alpha: float, cost: float) -> None:
    model = SpeedModel(alpha, cost / 2, cost / 2)
    assert model.pays == (max(model.speedup(k) for k in range(1, 65)) > 1)
    assert model.best(64)[1] <= max(1.0, model.bound)


def test_the_edges_of_the_model() -> None:
    assert SpeedModel(1.0, 0.0).tokens(4) == 5
    assert SpeedModel(0.0, 0.1).tokens(4) == 1
    assert SpeedModel(0.5, 0.0).bound == math.inf
    assert SpeedModel(0.9, 0.1, 0.1).collapse() is not None
    assert SpeedModel(0.9, 0.01, 0.0).collapse(64) is None


def rounds(reply: Reply, **params: object) -> list[RoundDone]:
    request = GenerateParams(seed=1, **params)  # type: ignore[arg-type]
    events = ScriptedEngine([reply]).generate("x", request)
    return [e for e in events if isinstance(e, RoundDone)]


TEXT = " ".join(f"w{i}" for i in range(200))


def test_the_meter_measures_what_the_engine_did() -> None:
    meter = Meter()
    assert meter.model() is None
    assert meter.verdict.answer == "unknown"
    for done in rounds(Reply(TEXT, accept=(4, 2)), draft_max=4):
        meter.observe(done)
    pair = meter.model()
    assert pair is not None
    assert pair.c == pytest.approx(3.0 / 4 / 12.25)
    # accept 4 of 4, then 2 of 3 judged: six accepted of seven tested
    assert pair.alpha == pytest.approx(6 / 7, abs=0.03)
    assert pair.beta == 0.0
    assert meter.verdict.ratio == pytest.approx(4 * 12.25 / 15.25, rel=0.05)


def test_without_a_figure_of_the_engine_the_plain_steps_of_a_race_count() -> None:
    meter = Meter()
    for done in rounds(Reply(TEXT, accept=(4, 2)), draft_max=4):
        meter.observe(dataclasses.replace(done, plain_ms=None))
    assert meter.verdict.answer == "unknown"
    assert meter.model() is None
    meter.measured([24.5] * 8)
    assert meter.verdict.ratio == pytest.approx(2 * 4 * 12.25 / 15.25, rel=0.05)
    assert meter.model() is not None
    meter.clear()
    assert meter.plain == []


def test_the_tail_behind_a_rejection_does_not_count_as_judged() -> None:
    meter = Meter()
    for done in rounds(Reply(TEXT, accept=(0,)), draft_max=8):
        meter.observe(done)
    pair = meter.model()
    assert pair is not None
    assert pair.alpha == 0.0
    assert meter.verdict.accepted == 0
    assert meter.verdict.drafted > 4 * meter.verdict.judged


def test_a_losing_pair_is_seen_to_lose() -> None:
    state = StripState()
    for done in rounds(Reply(TEXT, accept=(0,)), draft_max=4):
        state.meter.observe(dataclasses.replace(done, draft_ms=30.0))
    assert state.loses
    assert state.meter.verdict.high is not None
    assert state.meter.verdict.high < 0.5
    assert not StripState(state.meter, speculate=False).loses


def test_a_wider_pass_is_never_measured_cheaper_than_a_plain_one() -> None:
    meter = Meter()
    for done in rounds(Reply(TEXT, accept=(4,)), draft_max=4):
        meter.observe(dataclasses.replace(done, plain_ms=1000.0))  # a busy machine
    pair = meter.model()
    assert pair is not None
    assert pair.beta == 0.0


def round_of(tokens: int, ms: float, drafted: int) -> RoundDone:
    """A round that drafted ``drafted`` tokens, kept all but one of its own, and took ``ms``."""
    done = rounds(Reply(TEXT, accept=(1,)), draft_max=4)[1]
    return dataclasses.replace(
        done,
        index=1,
        draft_max=drafted,
        drafted=(1,) * drafted,
        parents=tuple(range(-1, drafted - 1)),
        accepted=min(drafted, tokens - 1),
        emitted=(1,) * tokens,
        draft_ms=0.0,
        verify_ms=ms,
        other_ms=0.0,
        plain_ms=20.0,
    )


def test_a_window_that_has_stopped_drafting_is_off_and_does_not_lose() -> None:
    state = StripState()
    for _ in range(64):
        state.meter.observe(round_of(1, 30.0, 4))
    assert state.loses
    for _ in range(STILL):
        state.meter.observe(round_of(1, 20.0, 0))
    assert not state.loses
    assert state.meter.verdict.answer == "off"


def test_what_is_measured_restarts_with_another_way_to_draft_and_plain_steps_stay() -> None:
    meter = Meter()
    meter.measured([20.0] * 8)
    for _ in range(16):
        meter.observe(round_of(2, 20.0, 4))
    assert meter.verdict.answer == "faster"
    meter.restart()
    assert (meter.verdict.answer, meter.tokens_per_s) == ("unknown", None)
    assert meter.verdicts_by_length() == {}
    assert meter.plain == [20.0] * 8


def test_verdicts_by_length_are_those_of_the_rounds_that_drafted_so_far() -> None:
    meter = Meter()
    for i in range(32):
        meter.observe(round_of(1, 20.0, 0))
        meter.observe(round_of(2, 25.0 + i % 3, 2))
        meter.observe(round_of(4, 100.0 + i % 3, 5))
    meter.observe(round_of(9, 1.0, 9))  # one round is no measurement
    found = meter.verdicts_by_length()
    assert list(found) == [2, 5]
    assert found[2].ratio == pytest.approx(2 * 20 / 26, rel=0.01)
    assert found[5].ratio == pytest.approx(4 * 20 / 101, rel=0.01)
    assert (found[2].answer, found[5].answer) == ("faster", "slower")


@pytest.mark.parametrize("tree", [False, True])
def test_acceptance_by_position_agrees_with_what_was_accepted(tree: bool) -> None:
    """Weighted by what was drafted there, its mean is the rate; plain rounds count in neither."""
    meter = Meter()
    for done in rounds(Reply(TEXT, accept=(4, 2, 0, 1), tree=tree), draft_max=4)[:20]:
        meter.observe(done)
    before = meter.acceptance_by_position
    for _ in range(10):
        meter.observe(round_of(1, 20.0, 0))
    by_position = meter.acceptance_by_position
    assert by_position == before
    drafted = Counter(depth for done in meter.recent for depth in depth_of(done))
    weighted = sum(share * drafted[i] for i, share in enumerate(by_position, 1))
    accepted = sum(done.accepted for done in meter.recent)
    assert weighted / drafted.total() == pytest.approx(accepted / drafted.total())
    assert max(by_position) <= 1.0

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections import Counter

import pytest
from fakes import Reply, ScriptedEngine

from specllama.events import RoundDone
from specllama.params import GenerateParams
from specllama.tui.measure import MeasuredPair, Meter, SpeedModel
from specllama.tui.record import depth_of
from specllama.tui.widgets.stats_strip import StripState


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
    assert meter.pair() is None
    assert meter.speedup is None
    for done in rounds(Reply(TEXT, accept=(4, 2)), draft_max=4):
        meter.observe(done)
    assert meter.pair() is None  # no plain step was seen yet: nothing to compare with
    for done in rounds(Reply(TEXT), speculate=False):
        meter.observe(done)
    pair = meter.pair()
    assert pair is not None
    assert pair.c == pytest.approx(3.0 / 4 / 12)
    # accept 4 of 4, then 2 of 3 judged: six accepted of seven tested
    assert pair.alpha == pytest.approx(6 / 7, abs=0.03)
    assert pair.v[5] == 1.0
    assert pair.cost_of_rows(3) == 1.0


def test_the_tail_behind_a_rejection_does_not_count_as_judged() -> None:
    meter = Meter()
    for done in rounds(Reply(TEXT, accept=(0,)), draft_max=8):
        meter.observe(done)
    assert meter.alpha == 0.0
    assert meter.acceptance == 0.0
    assert meter.mean_length == 1.0


def test_costs_between_and_beyond_the_measured_rows() -> None:
    pair = MeasuredPair(0.8, 0.1, 0.1, {1: 1.0, 4: 1.3, 8: 2.1}, 10.0)
    assert pair.cost_of_rows(2) == pytest.approx(1.1)
    assert pair.cost_of_rows(6) == pytest.approx(1.7)
    assert pair.cost_of_rows(10) == pytest.approx(2.3)
    assert MeasuredPair(0.0, 0.5, 0.5, {1: 1.0}, 1.0).best() == (0, 1.0)


def test_a_losing_pair_is_seen_to_lose() -> None:
    meter = Meter()
    for done in rounds(Reply(TEXT), speculate=False):
        meter.observe(done)
    for done in rounds(Reply(TEXT, accept=(0,)), draft_max=4):
        meter.observe(dataclasses.replace(done, draft_ms=30.0))
    assert meter.speedup is not None
    assert meter.speedup.verdict == "slower"
    assert meter.speedup.high < 0.5


def test_plain_measurements_that_make_no_sense_are_dropped() -> None:
    meter = Meter()
    for ms in (math.nan, math.inf, 0.0, -1.0):
        meter.observe_plain(ms)
    assert meter.plain_ms is None
    for _ in range(4):
        meter.observe_plain(20.0)
    assert meter.plain_ms == 20.0


def test_a_wider_pass_is_never_measured_cheaper_than_a_plain_one() -> None:
    meter = Meter()
    for done in rounds(Reply(TEXT), speculate=False):
        meter.observe(dataclasses.replace(done, verify_ms=1000.0))  # a busy machine
    for done in rounds(Reply(TEXT, accept=(4,)), draft_max=4):
        meter.observe(done)
    pair = meter.pair()
    assert pair is not None
    assert min(pair.v.values()) == 1.0
    assert pair.best()[1] <= 1 / (1 - pair.alpha) if pair.alpha < 1 else pair.best()[1] <= 17


def test_there_is_no_speed_up_while_nothing_is_drafted() -> None:
    meter = Meter()
    for done in rounds(Reply(TEXT), speculate=False):
        meter.observe(done)
    assert meter.plain_ms is not None
    assert meter.speedup is None


def round_of(tokens: int, ms: float, drafted: int, index: int = 1) -> RoundDone:
    """A round that drafted ``drafted`` tokens, kept all but one of its own, and took ``ms``."""
    done = rounds(Reply(TEXT, accept=(1,)), draft_max=4)[1]
    return dataclasses.replace(
        done,
        index=index,
        drafted=(1,) * drafted,
        parents=tuple(range(-1, drafted - 1)),
        accepted=min(drafted, tokens - 1),
        emitted=(1,) * tokens,
        draft_ms=0.0,
        verify_ms=ms,
        other_ms=0.0,
    )


def test_a_few_rounds_are_no_speed_up() -> None:
    """One first look at a draft model is most of what a very short reply takes."""
    meter = Meter()
    for _ in range(8):
        meter.observe_plain(20.0)
    for _ in range(4):
        meter.observe(round_of(1, 300.0, 4))
    assert meter.drafting
    assert meter.speedup is None


def test_hiccups_do_not_make_free_drafts_look_dear() -> None:
    """Every round, plain or drafted, takes five times as long in 15 % of the cases."""
    rng = random.Random(5)
    ratios = []
    for _ in range(40):
        meter = Meter()
        for i in range(128):
            hiccup = 5.0 if rng.random() < 0.15 else 1.0
            meter.observe(round_of(1, 20.0 * hiccup, 4 * (i % 2)))
        assert meter.speedup is not None
        assert meter.speedup.verdict == "unsure"
        ratios.append(meter.speedup.ratio)
    assert statistics.fmean(ratios) == pytest.approx(1.0, abs=0.08)


def test_a_window_that_has_stopped_drafting_is_not_said_to_lose() -> None:
    state = StripState()
    for _ in range(32):
        state.meter.observe(round_of(1, 20.0, 0))
    for _ in range(64):
        state.meter.observe(round_of(1, 30.0, 4))
    assert state.loses
    for _ in range(9):
        state.meter.observe(round_of(1, 20.0, 0))
    assert not state.loses  # most of the newest rounds are plain
    for _ in range(7):
        state.meter.observe(round_of(1, 20.0, 0))
    assert state.meter.speedup is None


def test_a_draft_that_came_to_nothing_is_no_part_of_a_plain_step() -> None:
    meter = Meter()
    for _ in range(8):
        meter.observe(dataclasses.replace(round_of(1, 20.0, 0), draft_ms=15.0))
    assert meter.plain_ms == 20.0


def test_what_is_measured_restarts_with_another_way_to_draft_and_plain_steps_stay() -> None:
    meter = Meter()
    for _ in range(8):
        meter.observe(round_of(1, 20.0, 0))
    for _ in range(16):
        meter.observe(round_of(2, 20.0, 4))
    assert meter.speedup is not None
    meter.restart()
    assert (meter.speedup, meter.tokens_per_s, meter.acceptance) == (None, None, None)
    assert meter.speedup_by_length() == {}
    assert meter.plain_ms == 20.0


def test_speed_ups_by_length_are_those_of_the_rounds_that_drafted_so_far() -> None:
    meter = Meter()
    for _ in range(32):
        meter.observe(round_of(1, 20.0, 0))
        meter.observe(round_of(2, 25.0, 2))
        meter.observe(round_of(4, 100.0, 5))
    meter.observe(round_of(9, 1.0, 9))  # one round is no measurement
    found = meter.speedup_by_length()
    assert list(found) == [2, 5]
    assert found[2].ratio == pytest.approx(2 * 20 / 25)
    assert found[5].ratio == pytest.approx(4 * 20 / 100)
    assert (found[2].verdict, found[5].verdict) == ("faster", "slower")


@pytest.mark.parametrize("tree", [False, True])
def test_acceptance_by_position_agrees_with_acceptance(tree: bool) -> None:
    """The rate is the mean over the positions, weighted by what was drafted there; plain rounds
    count in neither."""
    meter = Meter()
    for done in rounds(Reply(TEXT, accept=(4, 2, 0, 1), tree=tree), draft_max=4)[:20]:
        meter.observe(done)
    before = meter.acceptance, meter.acceptance_by_position
    for _ in range(10):
        meter.observe(round_of(1, 20.0, 0))
    assert (meter.acceptance, meter.acceptance_by_position) == before
    drafted = Counter(depth for done in meter.recent for depth in depth_of(done))
    by_position = meter.acceptance_by_position
    weighted = sum(share * drafted[i] for i, share in enumerate(by_position, 1))
    assert weighted / drafted.total() == pytest.approx(meter.acceptance)
    assert max(by_position) <= 1.0

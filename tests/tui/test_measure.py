from __future__ import annotations

import dataclasses
import math

import pytest
from fakes import Reply, ScriptedEngine

from specllama.events import RoundDone
from specllama.params import GenerateParams
from specllama.tui.measure import MeasuredPair, Meter, SpeedModel


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
    assert meter.speedup < 0.5


def test_plain_measurements_that_make_no_sense_are_dropped() -> None:
    meter = Meter()
    for ms in (math.nan, math.inf, 0.0, -1.0):
        meter.observe_plain(ms)
    assert meter.plain_ms is None
    for _ in range(3):
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


def test_a_handful_of_tokens_is_no_speed_up() -> None:
    """One first look at a draft model is most of what a very short reply takes."""
    meter = Meter()
    meter.observe_plain(20.0)
    meter.observe_plain(20.0)
    meter.observe_plain(20.0)
    for done in rounds(Reply("one two three", accept=(0,)), draft_max=4):
        meter.observe(dataclasses.replace(done, draft_ms=300.0))
    assert any(r.drafted for r in meter.recent)
    assert meter.speedup is None

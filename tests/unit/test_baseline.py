"""Plain steps of these minutes: which count, when the next is due, and what that may cost."""

from __future__ import annotations

import random

import pytest
from test_window_traces import GPU, trace
from windows import Pair, play

from specllama.bench.replay import VirtualClock
from specllama.speculative.policy.baseline import FEW, FRESH_S, PlainSteps
from specllama.speculative.policy.controller import MEASURING
from specllama.speculative.policy.ledger import BEHIND, EPSILON


def timed(clock: VirtualClock, *ms: float) -> PlainSteps:
    steps = PlainSteps(clock)
    for each in ms:
        clock.now += 1.0
        steps.took(each, 100)
    return steps


def test_the_typical_step_is_of_these_minutes() -> None:
    clock = VirtualClock()
    steps = timed(clock, *[10.0] * 20)
    clock.now += FRESH_S + 1.0
    for _ in range(FEW):
        steps.took(20.0, 100)  # the machine became busy
    found = steps.typical(100, 0.0)
    assert found is not None
    assert (found.ms, found.age_s, found.n) == (20.0, 0.0, FEW)
    clock.now += 240.0
    old = steps.typical(100, 0.0)
    assert old is not None
    assert (old.age_s, old.n) == (240.0, 1), "it says how old it is"
    assert PlainSteps(clock).typical(0, 0.0) is None


def test_a_step_is_told_for_its_depth() -> None:
    found = timed(VirtualClock(), 10.0, 10.0).typical(1100, 0.002)
    assert found is not None
    assert found.ms == pytest.approx(12.0)


def test_with_few_the_next_is_due_at_once_and_after_a_pause_again() -> None:
    clock = VirtualClock()
    steps = PlainSteps(clock)
    for _ in range(FEW):
        for _ in range(3):
            steps.drafted(1.5)
        assert steps.is_due(0.4, settled=True)
        steps.paid(0.4)
        steps.took(10.0, 0)
    for _ in range(8):
        steps.drafted(1.5)
    assert not steps.is_due(0.4, settled=True)
    clock.now += FRESH_S + 1
    assert steps.is_due(0.4, settled=True)


@pytest.mark.parametrize("forgone", [0.1, 0.4, 0.8])
def test_it_takes_a_hundredth_of_the_time_at_most(forgone: float) -> None:
    clock = VirtualClock()
    steps = timed(clock, *[10.0] * FEW)
    time, spent = 0.0, 0.0
    for _ in range(5000):
        if steps.is_due(forgone, settled=True):
            steps.paid(forgone)
            steps.took(10.0, 0)
            spent += forgone
        else:
            steps.drafted(1.6)
            time += 1.6
    assert 0.0 < spent <= EPSILON * time


@pytest.mark.parametrize("peek", [True, False])
def test_plain_steps_are_timed_while_drafting_pays_and_are_charged(peek: bool) -> None:
    pair = Pair().tuned(GPU, 0.1)
    done = play(trace("good", 1), GPU, 0.1, pair=pair, peek=peek, draft_max=15)
    assert done.reasons[MEASURING] > FEW
    assert done.speed > 2.0
    assert pair.ledger.total <= BEHIND


def test_what_is_due_does_not_depend_on_what_is_written() -> None:
    """Under rejection and block no decision may look at a sampled token: it sees counts alone."""
    rng = random.Random(1)
    rounds = [rng.uniform(1.0, 2.0) for _ in range(400)]

    def plan() -> list[bool]:
        steps, due = timed(VirtualClock(), *[10.0] * FEW), []
        for took in rounds:
            due.append(steps.is_due(0.3, settled=True))
            if due[-1]:
                steps.paid(0.3)
                steps.took(10.0, 0)
            steps.drafted(took)
        return due

    assert plan() == plan()
    assert 0 < sum(plan()) < 60

"""Plain steps of these minutes: which count, when the next is due, and what that may cost."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from fakes import learn
from replay import VirtualClock
from traces import GPU, trace
from windows import Pair, booking, play

from specllama.speculative.policy.baseline import PlainSteps
from specllama.speculative.policy.constants import (
    AHEAD,
    BEHIND,
    EPSILON,
    FRESH_S,
    SETTLE,
    SINGLES,
    STRETCH_S,
)
from specllama.speculative.policy.costs import Costs
from specllama.speculative.policy.learned import Learned
from specllama.speculative.policy.ledger import Ledger
from specllama.speculative.policy.policy import MEASURING, Policy


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
    for _ in range(SETTLE + 1):
        clock.now += 2 * STRETCH_S
        steps.took(20.0, 100)  # the machine became busy
    found = steps.typical(100, 0.0)
    assert found is not None
    assert found.ms == pytest.approx(20.0)
    assert (found.age_s, found.n) == (0.0, SETTLE)
    clock.now += 240.0
    old = steps.typical(100, 0.0)
    assert old is not None
    assert (old.age_s, old.n, old.spread) == (240.0, 0, None), "it says how old it is"
    assert PlainSteps(clock).typical(0, 0.0) is None


def test_a_step_is_told_for_its_depth() -> None:
    found = timed(VirtualClock(), 10.0, 10.0).typical(1100, 0.002)
    assert found is not None
    assert found.ms == pytest.approx(12.0)


def test_how_far_plain_steps_are_off_is_what_they_were_off_before() -> None:
    rng, clock = random.Random(1), VirtualClock()
    for spread in (0.02, 0.2):
        steps = PlainSteps(clock)
        for _ in range(60):
            level = 10.0 * math.exp(rng.gauss(0.0, spread))
            for _ in range(20):  # steps of one second are alike
                clock.now += STRETCH_S / 16
                steps.took(level, 0)
        found = steps.typical(0, 0.0)
        assert found is not None
        assert found.spread is not None
        assert spread / 1.5 < found.spread < spread * 1.5
        assert found.n == SINGLES
        clock.now += FRESH_S + 60.0


def test_the_older_the_newest_step_the_further_it_is_off() -> None:
    """On a machine that slows down for a minute, then speeds up: as far as it was off before, so
    long ahead."""
    clock = VirtualClock()
    steps = PlainSteps(clock)
    for second in range(60):
        clock.now += 1.5 * STRETCH_S
        steps.took(10.0 * math.exp(abs(second % 40 - 20) / 20), 0)
    now = steps.typical(0, 0.0)
    clock.now += 10.0
    later = steps.typical(0, 0.0)
    assert now is not None
    assert later is not None
    assert now.spread is not None
    assert later.spread is not None
    assert later.spread > 1.5 * now.spread


def test_a_busy_moment_is_forgotten_within_its_minute() -> None:
    clock = VirtualClock()
    rng = random.Random(2)
    steps = PlainSteps(clock)
    for second in range(60):
        clock.now += 1.5 * STRETCH_S
        steps.took(10.0 * math.exp(rng.gauss(0.0, 1.0 if second < 30 else 0.02)), 0)
    found = steps.typical(0, 0.0)
    assert found is not None
    assert found.spread is not None
    assert found.spread < 0.1


def test_a_hiccup_is_no_part_of_a_stretch() -> None:
    clock = VirtualClock()
    steps = PlainSteps(clock)
    for i in range(16):
        clock.now += STRETCH_S / 32
        steps.took(200.0 if i == 7 else 10.0, 0)
    found = steps.typical(0, 0.0)
    assert found is not None
    assert found.ms == pytest.approx(10.0, rel=0.05)


def test_with_few_seconds_of_them_the_next_is_due_at_once_and_after_a_pause_again() -> None:
    clock = VirtualClock()
    steps = PlainSteps(clock)
    for _ in range(SETTLE + 1):
        for _ in range(AHEAD):
            steps.drafted(1.5)
        assert steps.is_due(settled=True)
        steps.took(10.0, 0)
        for _ in range(AHEAD):
            steps.drafted(1.5)
        assert not steps.is_due(settled=True), "one a second is enough"
        clock.now += 1.5 * STRETCH_S
    for _ in range(8):
        steps.drafted(1.5)
    assert not steps.is_due(settled=True)
    clock.now += FRESH_S + 1
    assert steps.is_due(settled=True)


def test_it_takes_a_hundredth_of_the_time_at_most() -> None:
    clock = VirtualClock()
    steps = timed(clock, *[10.0] * (2 * SETTLE + 2))
    time = spent = 0.0
    for _ in range(5000):
        if steps.is_due(settled=True):
            steps.took(10.0, 0)
            spent += 1.0
        else:
            steps.drafted(1.6)
            time += 1.6
    assert 0.0 < spent <= EPSILON * time


@pytest.mark.parametrize("peek", [True, False])
def test_plain_steps_are_timed_while_drafting_pays(peek: bool) -> None:
    pair = Pair().tuned(GPU, 0.1)
    done = play(trace("good", 1), GPU, 0.1, pair=pair, peek=peek, draft_max=15)
    assert done.reasons[MEASURING] > SETTLE
    assert done.speed > 2.0
    assert pair.ledger.total <= BEHIND


@pytest.mark.parametrize("peek", [True, False])
def test_what_is_due_does_not_depend_on_which_tokens_are_written(peek: bool) -> None:
    """It is decided before a round, from how long rounds took and how many tokens they wrote."""

    def plans(words: Sequence[int]) -> list[int]:
        clock, found = VirtualClock(), list[int]()
        window = Policy(
            Learned(), Costs(), Ledger(), draft_max=4, peek=peek, clock=clock,
            steps=PlainSteps(clock),
        )  # fmt: skip
        window.drafts_with(booking("draft"))
        window.prefilled(10, 10)
        for i in range(300):
            plan = window.plan(100)
            found.append(plan.draft_max)
            n = min(plan.draft_max, 4)
            emitted = 3 if n else 1
            clock.now += 0.012 if n else 0.01
            tokens = tuple(words[(3 * i + k) % len(words)] for k in range(emitted))
            draft_ms = 2.0 if n else 0.0
            learn(window, n, emitted - 1, tokens, draft_ms, 10.0 + draft_ms)
        return found

    first = plans(range(7, 100))
    assert first == plans([1]) == plans(range(900, 100, -3))
    assert 0 < first.count(0) < 150

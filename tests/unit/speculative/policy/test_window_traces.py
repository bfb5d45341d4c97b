"""Traces replayed offline: busy machines, and logs that become traces."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from engines import fake_info
from fakes import round_done
from replay import Spot, VirtualClock, trace_of_rounds
from traces import CLIFF, CPU, GPU, trace
from windows import Pair, play

from specllama.settings.params import GenerateParams
from specllama.store.rounds import RoundLog, read_run


def test_a_new_text_is_looked_at_however_bad_the_last_one_was() -> None:
    pair = Pair()
    play_on = [Spot(False, 0.6, 1.0)] * 600, [Spot(True, 0.9, 4.0)] * 600
    speeds = []
    for spots in play_on:
        speeds.append(play(spots, GPU, 0.1, pair=pair, prompt=20, draft_max=6).speed)
    assert speeds[0] > 0.97
    assert speeds[1] > 2.0


@pytest.mark.parametrize("verify", [CPU, CLIFF])
def test_a_draft_that_may_not_be_looked_at_is_tried_again(verify: list[float]) -> None:
    """Where tokens are sampled, only what is sent tells how good the guesses are."""
    rng = random.Random(2)
    pair = Pair()
    speeds = []
    for rate in (0.02, 0.9):
        spots = [Spot(rng.random() < rate, 0.95, 4.0) for _ in range(1500)]
        speeds.append(play(spots, verify, 0.1, pair=pair, peek=False).speed)
    assert speeds[0] > 0.97
    assert speeds[1] > 1.08


@pytest.mark.parametrize("slow", [3.0, 10.0, 30.0, 5000.0])
def test_a_busy_moment_does_not_switch_drafting_off(slow: float) -> None:
    """Passes that other programs slowed, of drafts and of plain steps alike."""

    class Busy(VirtualClock):
        def __init__(self) -> None:
            super().__init__()
            self._passes = 0

        def steps(self, n: float) -> None:
            self._passes += 1
            super().steps(n * slow if self._passes % 170 == 150 else n)

    spots = trace("good", 1, 1500)
    calm = play(spots, GPU, 0.1, draft_max=8)
    busy = play(spots, GPU, 0.1, clock=Busy(), draft_max=8)
    assert busy.drafted > 0.75 * calm.drafted


class Disturbed(VirtualClock):
    """A busy machine: some passes take several times as long, the first single ones among them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = random.Random(seed)
        self.slow = 2 + seed % 3  # passes from the second on

    def steps(self, count: float) -> None:
        self.slow -= 1
        hit = self.slow >= 0 or self._rng.random() < 0.03
        super().steps(count * (self._rng.choice((2, 3, 4)) if hit else 1.0))


@pytest.mark.parametrize("seed", range(12))
def test_a_plain_step_that_was_slowed_does_not_make_drafts_look_good(seed: int) -> None:
    """What plain decoding takes is the yardstick: it is settled first and checked again."""
    verify, step = [0.0, 1.0, 1.82, 2.58, 2.60, 3.6, 4.3, 5.1], 0.19
    rng = random.Random(seed)
    spots = []
    for _ in range(900):
        p = min(max(rng.gauss(0.6, 0.3), 0.02), 0.98)
        spots.append(Spot(rng.random() < p, p, 4 * p))
    clock = Disturbed(seed)
    pair = Pair()
    pair.costs.draft_share = step
    replayed = play(spots, verify, step, pair=pair, clock=clock, draft_max=6)
    plain = Disturbed(seed)
    for _ in spots:
        plain.steps(1.0)
    assert plain.now / clock.now > 0.95, replayed.reasons


def test_a_log_becomes_a_trace(tmp_path: Path) -> None:
    rounds = [
        replace(round_done(3, 1), confidence=(0.9, 0.4, 0.3)),
        round_done(0, 0),
        replace(round_done(2, 2), confidence=(0.8, None)),
    ]
    log = RoundLog(fake_info(), GenerateParams(), folder=tmp_path)
    for done in rounds:
        log.write(done)
    log.close()
    with log.path.open("a") as file:
        file.write('{"torn": ')
    spots = trace_of_rounds(read_run(log.path).rounds)
    assert [s.hit for s in spots] == [True, False, False, True, True, True]
    assert [s.confidence for s in spots] == [0.9, 0.4, 0.4, 0.8, None, None]

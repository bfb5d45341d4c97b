"""Traces replayed offline: whatever the drafts are worth, the loss stays within the ledger."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from engines import FakeContext, fake_info, loaded
from fakes import round_done
from replay import Spot, VirtualClock, trace_of_rounds
from table_model import FakeTable, FakeVocab
from traces import CLIFF, CPU, DEAR, GPU, KINDS, trace
from windows import Pair, play

from specllama.engine.engine import Engine
from specllama.settings.params import GenerateParams, SamplingParams
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.policy.constants import BEHIND, EPSILON
from specllama.speculative.policy.ledger import Ledger
from specllama.store.rounds import Logged, RoundLog, read_run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("verify", "step"), [(CPU, 0.1), (GPU, 0.1), (DEAR, 0.6), (CLIFF, 0.08)], ids=str
)
@pytest.mark.parametrize("peek", [True, False])
def test_the_ledger_bounds_the_loss(
    kind: str, verify: list[float], step: float, peek: bool
) -> None:
    pair = Pair().tuned(verify, step)
    result = play(trace(kind, 1 + peek), verify, step, pair=pair, peek=peek, draft_max=15)
    assert result.worst_loss(EPSILON) <= Ledger().total + 1e-6
    assert -1e-6 <= pair.ledger.total <= BEHIND + 1e-6
    assert result.speed > 0.98
    assert result.slowest(500) > 0.97


def test_a_new_text_is_looked_at_however_bad_the_last_one_was() -> None:
    pair = Pair()
    play_on = [Spot(False, 0.6, 1.0)] * 600, [Spot(True, 0.9, 4.0)] * 600
    speeds = []
    for spots in play_on:
        speeds.append(play(spots, GPU, 0.1, pair=pair, prompt=20, draft_max=6).speed)
    assert speeds[0] > 0.97
    assert speeds[1] > 2.0


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


def test_twenty_logged_runs_replay_within_the_ledger(tmp_path: Path) -> None:
    """Logs of real rounds over the fake backend, written and read as people's logs are."""
    for n in range(20):
        table = FakeTable(seed=n, order=1)
        draft = FakeContext(FakeTable(seed=n + 100, order=1, of=table, agreement=n / 20))
        engine = Engine(
            loaded(
                target=FakeContext(table),
                vocab=FakeVocab(),
                info=fake_info(),
                drafters={"draft": ChainDrafter(draft, n_vocab=64)},
            )
        )
        params = GenerateParams(
            sampling=SamplingParams(temperature=0.5 * (n % 3)),
            proposer="draft",
            window="fixed",
            draft_max=6,
            max_tokens=150,
            ignore_eos=True,
            seed=n,
        )
        logged = Logged(engine, folder=tmp_path)
        with engine:
            for _ in logged.generate("what is a draft", params):
                pass
        assert logged.log is not None
        spots = trace_of_rounds(read_run(logged.log.path).rounds)
        logged.close()
        assert len(spots) == 150
        for peek in (True, False):
            pair = Pair().tuned(CPU, 0.1)
            result = play(spots, CPU, 0.1, pair=pair, peek=peek, draft_max=15)
            assert result.worst_loss(EPSILON) <= Ledger().total + 1e-6

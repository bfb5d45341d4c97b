"""Own time holds all that a user pays for: events, the round log and the pipe as well as rounds."""

from dataclasses import astuple
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engines import FakeContext, engine_over
from replay import VirtualClock
from table_model import FakeTable

from specllama.bench.experiment import EngineArm, Task
from specllama.bench.prompts import BenchPrompt
from specllama.engine.engine import Engine
from specllama.events import Finished, RoundDone, Started
from specllama.figures import Figures
from specllama.interface import Message
from specllama.settings.params import GenerateParams
from specllama.speculative.drafting.ngram import NgramDrafter
from specllama.store.rounds import RoundLog

PASS, TAKE, LOG = 10.0, 3.0, 2.0  # plain steps, one a millisecond
PARAMS = GenerateParams(max_tokens=20, seed=1, proposer="ngram", window="fixed", ignore_eos=True)


class Timed(FakeContext):
    clock: VirtualClock

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.clock.steps(PASS)
        return super().forward(*args, **kwargs)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    clock = VirtualClock()
    for module in ("speculative.round", "engine.conversation", "engine.engine", "bench.experiment"):
        monkeypatch.setattr(f"specllama.{module}.perf_counter", clock)
    return clock


@pytest.fixture
def engine(clock: VirtualClock) -> Engine:
    target = Timed(FakeTable(seed=3))
    target.clock = clock
    return engine_over(target, drafters={"ngram": NgramDrafter()})


def test_own_time_lasts_until_the_events_are_taken(engine: Engine, clock: VirtualClock) -> None:
    taken = 0
    finished = None
    for event in engine.generate("the rain in spain", PARAMS):
        if isinstance(event, RoundDone):
            clock.steps(TAKE)  # encoded, logged, drawn
            taken += 1
        elif isinstance(event, Finished):
            finished = event
    t = finished.timings
    assert t.deliver_ms == pytest.approx(TAKE * taken)
    assert t.other_ms == pytest.approx(t.deliver_ms), "nothing else takes time here"
    whole = t.draft_ms + t.verify_ms + t.other_ms
    assert whole == pytest.approx(t.first_decode_ms + t.decode_ms)


def test_a_bench_pays_for_the_round_log(
    engine: Engine, clock: VirtualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = RoundLog._append

    def slow(self: RoundLog, line: dict[str, Any]) -> None:
        clock.steps(LOG)
        append(self, line)

    monkeypatch.setattr(RoundLog, "_append", slow)
    prompt = BenchPrompt("a", "chat", (Message("user", "the rain in spain"),))
    arm = EngineArm("specllama", engine, PARAMS, logs=tmp_path)
    run = arm.run(Task(prompt, 0.0, 20, seed=1, ignore_eos=True), 0)
    arm.close()
    assert run.deliver_s == pytest.approx(LOG * run.rounds / 1e3)
    assert run.other_s == pytest.approx(run.deliver_s), "nothing else takes time here"
    [log] = tmp_path.glob("*.jsonl")
    assert len(log.read_text().splitlines()) == run.rounds + 3


def test_the_parts_are_all_of_the_time(engine: Engine, clock: VirtualClock) -> None:
    """By the clock of the whole: of the first token, of every round, and of the reply."""
    asked = clock()
    engine.submit("the rain in spain", PARAMS)
    clock.steps(7.0)  # others are before it
    rounds: list[RoundDone] = []
    started = finished = None
    while finished is None:
        for _, event in engine.step():
            if isinstance(event, Started):
                started = event
            elif isinstance(event, RoundDone):
                rounds.append(event)
                clock.steps(1.0 + len(rounds) % 3)  # pipes, the caller
            elif isinstance(event, Finished):
                finished = event
    t = finished.timings
    assert t.queue_ms == pytest.approx(7.0)
    parts = t.tokenize_ms + t.queue_ms + t.prefill_ms + t.first_decode_ms
    assert t.ttft_ms == pytest.approx(parts) == pytest.approx(1e3 * rounds[0].t_s)
    assert t.ttft_ms + t.decode_ms == pytest.approx(1e3 * (clock() - asked))
    assert t.decode_ms == pytest.approx(t.draft_ms + t.verify_ms + t.waiting_ms)
    assert t.waiting_ms > len(rounds)
    for before, done in pairwise(rounds):
        assert done.took_ms == pytest.approx(1e3 * (done.t_s - before.t_s))
    live, whole = (Figures.of(started, rounds, end) for end in (None, finished))
    assert whole.first is not None
    assert live.first is not None
    assert astuple(whole.first) == pytest.approx(astuple(live.first))
    assert (live.draft_ms, live.verify_ms) == pytest.approx((whole.draft_ms, whole.verify_ms))
    assert 0.0 <= whole.decode_ms - live.decode_ms <= 3.0  # the last round was handed on

"""The race's conversations at once: who runs beside whom, what it says, and the engine it needs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from app_driver import Driver
from fakes import Reply, ScriptedEngine

from specllama.bench import outcome
from specllama.bench.experiment import (
    DRAFTED,
    PLAIN,
    TOGETHER_TOKENS,
    RaceBoard,
    Run,
    side_by_side,
)
from specllama.cancel import Cancel
from specllama.errors import EngineError
from specllama.events import Event, Finished, RoundDone
from specllama.interface import EngineInfo, Prompt
from specllama.remote.board import Board
from specllama.settings.params import GenerateParams
from support.demo_engine import DemoEngine, demo_info
from specllama.tui.lane_watch import LaneWatch
from specllama.tui.race import RaceEnded, Racing
from specllama.tui.screens.top import TopScreen

LONG = " ".join(f"word{i}" for i in range(80))
PARAMS = GenerateParams(seed=5, draft_max=4)
PROMPTS = ("one", "two", "three", "four")


class Together:
    """An engine that sees how many are with it at once; each waits for its company."""

    def __init__(self, fails: str = "") -> None:
        self.info: EngineInfo = replace(demo_info(), lanes=4)
        self.asked: list[tuple[object, str]] = []
        self.most = 0
        self._guard, self._here = threading.Lock(), 0
        self._fails = fails

    def generate(
        self, prompt: Prompt, params: GenerateParams, *, cancel: Cancel | None = None
    ) -> Iterator[Event]:
        with self._guard:
            self._here += 1
            self.most = max(self.most, self._here)
            self.asked.append((prompt, params.proposer))
        try:
            if prompt == self._fails:
                raise EngineError("no")
            yield from DemoEngine().generate(prompt, params, cancel=cancel)
        finally:
            with self._guard:
                self._here -= 1

    def count_tokens(self, prompt: object) -> int:
        return 1

    def close(self) -> None:
        pass


def raced(engine: Any, runs: list[Run]) -> RaceEnded:
    told: list[Any] = []
    racing = Racing(engine, told.append, log=False)
    racing.start(runs)
    assert racing.thread is not None
    racing.thread.join(30)
    assert isinstance(told[-1], RaceEnded)
    return told[-1]


def test_the_same_prompts_are_answered_in_every_company() -> None:
    runs = side_by_side(PROMPTS, PARAMS, (1, 2, 4))
    assert len(runs) == 24
    for n in (1, 2, 4):
        for name in (PLAIN, DRAFTED):
            mine = [run for run in runs if (run.lanes, run.name) == (n, name)]
            assert [run.prompt for run in mine] == list(PROMPTS)
    assert {run.params.max_tokens for run in runs} == {TOGETHER_TOKENS}
    assert all(run.params.ignore_eos and run.params.seed == 5 for run in runs)
    waves, left = [], runs
    while left:
        waves.append({(run.lanes, run.name) for run in left[: left[0].lanes]})
        left = left[left[0].lanes :]
    assert all(len(wave) == 1 for wave in waves)
    assert len(waves) == 2 * (4 + 2 + 1)


def test_they_run_at_once_each_wave_from_an_empty_cache() -> None:
    engine = Together()
    runs = side_by_side(PROMPTS, PARAMS, (4,))
    assert raced(engine, runs).error is None
    asked = [prompt for prompt, _ in engine.asked]
    assert asked[0] == asked[5] == "."
    assert set(asked[1:5]) == set(asked[6:]) == set(PROMPTS)
    assert 1 <= engine.most <= 4
    assert all(run.finished for run in runs)


def test_one_that_fails_ends_them_all() -> None:
    runs = side_by_side(PROMPTS, PARAMS, (2, 4))
    ended = raced(Together(fails="three"), runs)
    assert ended.error is not None
    assert ended.error.message == "no"
    assert not any(run.finished for run in runs if run.lanes == 4)


def scripted(run: Run, accept: Sequence[int], pass_ms: float) -> None:
    """Its rounds, with passes that take so long."""
    engine = ScriptedEngine([Reply(LONG, accept=accept)])
    t_s = 0.0
    for event in engine.generate(run.prompt, run.params):
        if isinstance(event, RoundDone):
            t_s += (event.draft_ms + pass_ms) / 1000
            run.rounds.append(
                replace(event, t_s=t_s, verify_ms=pass_ms, other_ms=0.0, plain_ms=None)
            )
        elif isinstance(event, Finished):
            run.finished = event


def test_gain_cost_and_verdict() -> None:
    """Passes of two take 1.25 times as long: two write 1.6 times as much, each at 0.8."""
    board = RaceBoard({"lanes": side_by_side(PROMPTS[:2], PARAMS, (1, 2))})
    for run in board.runs["lanes"]:
        drafted_ms = 3.0 * run.lanes * (run.name == DRAFTED)
        scripted(run, (2,), (10.0 if run.lanes == 1 else 12.5) + drafted_ms)
    one, two = outcome.ways(board, "lanes")
    assert (one.run.lanes, two.run.lanes) == (1, 2)
    assert one.gain == pytest.approx(1.0, abs=1e-6)
    assert two.gain == pytest.approx(1.6, rel=1e-3)
    for each in (one, two):  # the columns say what the verdicts say
        assert each.plain is not None
        assert each.gain == pytest.approx(each.plain / one.plain)  # type: ignore[operator]
        assert each.verdict.ratio == pytest.approx(each.speed / each.plain)  # type: ignore[operator]
    assert two.plain == pytest.approx(160.0, rel=0.02)
    assert one.verdict.ratio == pytest.approx(3 * 10.0 / (10 + 3 + 3), rel=0.03)
    assert two.verdict.ratio == pytest.approx(3 * 12.5 / (12.5 + 3 + 6), rel=0.03)
    assert two.verdict.answer == "faster"
    assert (two.same, two.of) == (4 * len(board.runs["lanes"][0].tokens),) * 2
    wrong = board.runs["lanes"][-1]
    wrong.rounds[2] = replace(wrong.rounds[2], emitted=(1,))
    assert outcome.ways(board, "lanes")[1].same < two.same


def test_rounds_without_company_do_not_count() -> None:
    runs = side_by_side(PROMPTS[:2], PARAMS, (1, 2))
    for run in runs:
        scripted(run, (2,), 10.0)
    late = next(run for run in runs if (run.lanes, run.name) == (2, PLAIN))
    late.began_s = 0.2
    alone = [replace(done, t_s=done.t_s + 1e3) for done in late.rounds[-3:]]
    late.rounds[-3:] = alone
    _, two = outcome.ways(RaceBoard({"lanes": runs}), "lanes")
    assert two.gain == pytest.approx(2.0, rel=0.02)


def test_a_round_without_a_draft_waits_for_the_drafts_of_the_others() -> None:
    runs = side_by_side(PROMPTS[:2], PARAMS, (1, 2))
    for run in runs:
        accept = (2,) if run.prompt == "one" else (0,)
        scripted(run, accept, 10.0 + 5.0 * (run.name == DRAFTED and run.lanes == 2))
    for run in runs:
        if run.prompt == "two":
            run.rounds = [
                replace(done, drafted=(), parents=(), accepted=0, emitted=done.emitted[:1])
                for done in run.rounds
            ]
    _, two = outcome.ways(RaceBoard({"lanes": runs}), "lanes")
    assert two.verdict.ratio is not None
    assert two.verdict.ratio < 3 * 10.0 / 15.0


async def opened(d: Driver, lanes: int) -> TopScreen:
    def told() -> Iterator[dict[str, Any]]:
        yield {"type": "hello", "model": "qwen", "lanes": lanes}

    info = replace(demo_info(), lanes=lanes)
    watch = LaneWatch("box:8484", lambda: (Board(), told()))
    board = RaceBoard()
    screen = TopScreen(watch, info, DemoEngine(speed=0, info=info), PARAMS, board)
    d.app.push_screen(screen)
    await d.until(lambda: d.app.screen is screen)
    return screen


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (120, 36)])
async def test_the_page_of_lanes_races_several_at_once(start: Any, size: tuple[int, int]) -> None:
    async with start(size=size) as d:
        screen = await opened(d, 4)
        await d.until(lambda: "R races 1, 2 and 4 replies at once" in d.shown)
        await d.pilot.press("r")
        await d.until(lambda: len(outcome.ways(screen.board, "lanes")) == 3)
        await d.until(lambda: not screen.racing.busy)  # type: ignore[union-attr]
        await d.until(lambda: "4 at once write" in d.shown)
        rows = [line.split()[0] for line in d.shown.splitlines() if "✓" in line]
        assert rows == ["1", "2", "4"]
        assert all(way.same == way.of for way in outcome.ways(screen.board, "lanes"))
        screen.watch_lanes.close()


async def test_a_server_that_takes_one_says_so(start: Any) -> None:
    async with start() as d:
        screen = await opened(d, 1)
        await d.until(lambda: "one reply at a time" in d.shown)
        await d.pilot.press("r")
        await d.pilot.pause()
        assert not screen.board.runs
        screen.watch_lanes.close()

"""Comparisons, reports and measurements over the fake backend."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engines import FakeContext, fake_info, loaded
from markdown_table import table_of
from odd_drafts import (
    Expected,
    ToldArm,
    expecting,
    make_useless,
    slowest_in_run,
    slowest_stretch,
    what_drafting_took,
)
from speed_table import read_report
from table_model import FakeTable, FakeVocab

from specllama.backend import turns
from specllama.bench import tuning
from specllama.bench.experiment import (
    EngineArm,
    RunFigures,
    Task,
    compare,
)
from specllama.bench.prompts import SLICES, BenchPrompt, half, load_prompts
from specllama.bench.report import (
    Comparison,
    percentile,
    provenance,
    to_json,
)
from specllama.bench.tuning import advise, pass_costs, split, tune
from specllama.engine.engine import Engine
from specllama.errors import UsageError
from specllama.events import RoundDone
from specllama.interface import Message
from specllama.settings.params import GenerateParams
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.drafting.ngram import NgramDrafter
from specllama.speculative.drafting.prediction import PredictionDrafter
from specllama.speculative.policy.costs import Costs
from specllama.verdict import judge

PROMPTS = [
    BenchPrompt("a", "chat", (Message("user", "the rain in spain"),)),
    BenchPrompt("b", "code", (), "def add(a, b): return a + b"),
]


@pytest.fixture
def engine() -> Engine:
    table = FakeTable(seed=3, sharpness=2.0)
    draft = FakeContext(FakeTable(seed=9, of=table, agreement=0.8))
    return Engine(
        loaded(
            target=FakeContext(table),
            vocab=FakeVocab(),
            info=fake_info(),
            drafters={
                "ngram": NgramDrafter(),
                "prediction": PredictionDrafter(),
                "draft": ChainDrafter(draft, n_vocab=64),
            },
        )
    )


def tasks(n: int = 24, temperatures: tuple[float, ...] = (0.0, 1.0)) -> list[Task]:
    return [Task(p, t, n, seed=5, ignore_eos=True) for p in PROMPTS for t in temperatures]


def both(engine: Engine, **changes: Any) -> list[EngineArm]:
    spec = GenerateParams(proposer="draft", window="fixed", draft_max=3).replace(**changes)
    return [
        EngineArm("plain", engine, GenerateParams(speculate=False)),
        EngineArm("specllama", engine, spec),
    ]


@pytest.mark.parametrize("what", ["edited", "wrong"])
def test_an_arm_may_be_told_what_to_expect(engine: Engine, what: Expected) -> None:
    params = GenerateParams(proposer="prediction", window="fixed", draft_max=8)
    plain, asked = both(engine)[0], tasks(n=40)
    expects = expecting(what, plain, asked)
    arms = [plain, ToldArm(what, engine, params, expects=expects)]
    result = Comparison.of(arms, asked, repetitions=1)
    told, before = result.summary(what, "all"), result.summary("plain", "all")
    assert told.equal == told.compared == len(asked)
    assert told.accepted is not None
    if what == "edited":
        assert expects(asked[0]) != plain.answer(asked[0]).end.text
        assert told.accepted > before.tokens / 10
    else:
        assert expects(asked[0]) == plain.answer(asked[len(asked) // len(PROMPTS)]).end.text
        assert told.drafted is not None
        assert told.accepted < told.drafted


def test_arms_take_turns_and_write_the_same_text(engine: Engine) -> None:
    seen: list[tuple[int, int]] = []
    result = Comparison.of(
        both(engine),
        tasks(),
        repetitions=2,
        progress=lambda *done: seen.append(done),
    )
    assert len(result.runs) == 2 * 2 * 4
    assert seen == [(done, 18) for done in range(1, 19)], "the runs that warm up as well"
    whole = result.summary("specllama", "all")
    assert whole.equal == whole.compared == 8
    assert whole.tokens == 8 * 24
    assert whole.accepted + whole.rejected == whole.drafted > 0
    assert 0 < (whole.acceptance_rate or 0) <= 1
    groups = {s.group for s in result.summaries()}
    assert groups == {"all", "T=0", "T=1", "chat T=0", "chat T=1", "code T=0", "code T=1"}


def test_no_way_is_always_first() -> None:
    asked: list[str] = []
    ways = [lambda task, repetition, way=way: asked.append(way) or way for way in "ab"]
    assert list(compare(ways, [1, 2], warm_up=1)) == [["a", "b"]] * 2
    assert asked == [*"ab", *"ab", *"ba"]
    assert list(compare(ways, [1, 2], in_turn=False)) == [["a", "b"]] * 2
    assert asked[6:] == [*"ab", *"ab"]


def test_every_run_reads_its_prompt_afresh(engine: Engine) -> None:
    """Time to the first token counts for target and draft alike."""
    arms = both(engine)
    draft = engine.drafters["draft"].lane  # type: ignore[attr-defined]
    for _ in range(2):
        arms[1].run(tasks()[0], 0)
        assert max(draft.passes) >= 10, "the draft read the prompt"
        draft.passes.clear()


def run_of(arm: str, repetition: int, tokens: int, seconds: float, **more: Any) -> RunFigures:
    return RunFigures(
        arm, "p", "chat", 0.0, repetition, tokens, seconds, seconds + 0.1, 0.1, **more
    )


def test_ratios_are_of_neighbours_and_as_sure_as_these_agree() -> None:
    result = Comparison(baseline="plain")
    for n, (plain, spec) in enumerate([(1.0, 0.5), (2.0, 1.6), (1.0, 1.0)]):
        result.runs.append(run_of("plain", n, 101, plain, token_ids=(1, 2)))
        result.runs.append(run_of("fast", n, 101, spec, token_ids=(1, 2 + (n == 2))))
    summary = result.summary("fast", "all")
    assert summary.ratio == pytest.approx((2.0 * 1.25 * 1.0) ** (1 / 3)), "the geometric mean"
    assert summary.tok_per_s == pytest.approx((200 * 62.5 * 100) ** (1 / 3))
    apart = statistics.stdev(map(math.log, (2.0, 1.25, 1.0))) / math.sqrt(3)
    assert summary.low is not None
    assert summary.high is not None
    reach = 4.3027 * apart  # Student's t of two degrees of freedom
    assert math.log(summary.ratio / summary.low) == pytest.approx(reach, rel=1e-4)
    assert math.log(summary.high / summary.ratio) == pytest.approx(reach, rel=1e-4)
    assert summary.equal is not None
    assert (summary.equal, summary.compared) == (2, 3)
    assert summary.ttft_ratio == pytest.approx(1.0)
    assert result.summary("absent", "all").ratio is None


def test_prompts_that_gain_differently_are_no_noise() -> None:
    """What a prompt gains again and again is known, however much another one gains."""
    runs = [
        dataclasses.replace(run_of(arm, n, 101, seconds), prompt=prompt)
        for n in range(2)
        for prompt, fast in (("a", 0.25), ("b", 1.0))
        for arm, seconds in (("plain", 1.0), ("fast", fast))
    ]
    summary = Comparison("plain", runs).summary("fast", "all")
    assert (summary.low, summary.ratio, summary.high) == pytest.approx((2.0, 2.0, 2.0))
    once = Comparison("plain", runs[:4]).summary("fast", "all")
    assert once.ratio == pytest.approx(2.0)
    assert once.low is once.high is None, "one run of each prompt does not say how sure it is"


def test_the_slowest_stretch_is_found() -> None:
    timeline = [(n, 0.01 * n) for n in range(1, 601)]
    timeline += [(600 + n, 6 + 0.02 * n) for n in range(1, 301)]
    assert slowest_stretch(timeline, 500) == pytest.approx(500 / (2 + 6), rel=0.01)
    assert slowest_stretch(timeline, 5000) is None


def test_what_drafting_took_does_not_depend_on_the_machine() -> None:
    def round_at(ms: float, *, drafted: int = 0, emitted: int = 1, draft_ms: float = 0.0) -> Any:
        done = round_of(drafted, emitted - 1)
        return dataclasses.replace(
            done, verify_ms=ms, other_ms=0.0, draft_ms=draft_ms, emitted=(1,) * emitted
        )

    rounds = [round_at(10.0 if n % 2 else 30.0) for n in range(600)]
    rounds += [round_at(50.0, drafted=3, emitted=2, draft_ms=10.0) for _ in range(10)]
    plain_s, points = what_drafting_took(rounds)
    assert plain_s == pytest.approx(0.02), "the mean of slow and fast passes"
    assert points[-1] == pytest.approx((620, 600 * 0.02 + 10 * 0.06))
    run = run_of("x", 0, 621, 1.0, passes=rounds)
    summary = Comparison("x", [run]).summary("x", "all")
    assert summary.in_run == judge(rounds).ratio == pytest.approx(620 * 0.02 / 12.6, rel=0.02)
    assert slowest_in_run([run]) == pytest.approx(500 * 0.02 / (480 * 0.02 + 10 * 0.06), rel=0.01)
    assert what_drafting_took(rounds[-10:]) == (None, [])


def test_a_useless_draft_is_never_right_and_the_text_the_same(engine: Engine) -> None:
    plain, fixed = both(engine)
    make_useless(engine)
    task = Task(PROMPTS[0], 0.0, 60, 5, True)
    run = fixed.run(task, 0)
    assert run.drafted > 100
    assert run.accepted < 0.1 * run.drafted
    assert run.token_ids == plain.run(task, 0).token_ids


def test_percentiles() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.95) == 3.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0], 1.0) == 4.0


def test_reports_are_complete_and_self_contained(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["specllama", "bench", "run"])
    result = Comparison.of(both(engine), tasks(12), repetitions=1)
    result.provenance = provenance(engine.info)
    path = tmp_path / "report.json"
    path.write_bytes(msgspec.json.encode(to_json(result)))
    data = read_report(path)
    assert data["provenance"]["arguments"] == ["bench", "run"]
    assert {s["arm"] for s in data["summaries"]} == {"plain", "specllama"}
    assert "token_ids" not in data["runs"][0], "texts stay at home"


def test_hostile_names_stay_text() -> None:
    assert "\\|" in table_of(["kind"], [["<img src=x onerror=alert(1)>|"]])


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": "other"}'])
def test_foreign_reports_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(UsageError, match="not a report"):
        read_report(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_report(tmp_path / "missing.json")


# -- measuring ------------------------------------------------------------------------------------


def test_costs_are_measured_and_the_caches_left_empty(engine: Engine) -> None:
    draft = engine.drafters["draft"].lane  # type: ignore[attr-defined]
    ticks: list[int] = []
    costs = pass_costs(
        engine.target, draft, [1, 2, 3, 4] * 10, repetitions=2, progress=lambda: ticks.append(1)
    )
    assert costs.target[1] > 0
    assert set(costs.ratios) == set(costs.target)
    assert costs.ratios[1] == 1.0
    assert engine.target.n_past == draft.n_past == 0
    assert len(ticks) == 2 * (len(costs.target) + len(costs.draft)), "once a size"
    kept = Costs()
    costs.store(kept)
    assert kept.target.ms(4) == pytest.approx(costs.target[4], rel=1e-6)
    assert kept.draft.ms(1) == pytest.approx(costs.draft[1], rel=1e-6)


def test_a_pass_is_timed_once_a_device_replays_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        """A context that captures the graph of a pass when the second one like it comes."""

        now, last, row, n_past = 0.0, 0, 0, 3

        def forward(self, tokens: list[int], outputs: str) -> None:
            self.row = self.row + 1 if len(tokens) == self.last else 1
            self.last = len(tokens)
            self.now += (0.003, 0.005, 0.001)[min(self.row, 3) - 1] * len(tokens)

        def rollback(self, n: int) -> None:
            pass

    device: Any = Device()
    monkeypatch.setattr(turns, "perf_counter", lambda: device.now)
    found = tuning.time_passes(
        device, [1, 2, 3], (1, 2, 4), outputs="all", repetitions=2, progress=lambda: None
    )
    assert found == pytest.approx({1: 1.0, 2: 2.0, 4: 4.0})


def round_of(drafted: int, accepted: int, source: str = "draft") -> RoundDone:
    none = (None,) * drafted
    return RoundDone(
        index=0, t_s=0.0, n_past=0, source=source if drafted else "none", draft_max=drafted,
        window_reason="", drafted=(1,) * drafted, parents=tuple(range(-1, drafted - 1)),
        drafted_text=("x",) * drafted, confidence=none, p=none, q=none, accepted=accepted,
        accepted_path=tuple(range(accepted)), target_token=2, target_text="y",
        target_kind="recovered", emitted=(1,) * (accepted + 1), emitted_text=(), cut=0,
        draft_ms=1.0, verify_ms=1.0, other_ms=0.0,
    )  # fmt: skip


def check_of(
    *seconds: float, temperatures: Sequence[float] = (0.0,), drafted: int = 2
) -> Comparison:
    """Plain decoding of prompts in one second each, against a window that took so many, the prompts
    at the temperatures by turns."""
    runs = []
    for i, took in enumerate(seconds):
        passes = [round_of(drafted, drafted)] * 20
        for arm, s in (("plain", 1.0), ("specllama", took)):
            run = run_of(arm, 0, 101, s, token_ids=(1,), passes=passes)
            temperature = temperatures[i % len(temperatures)]
            runs.append(dataclasses.replace(run, prompt=f"chat-{i}", temperature=temperature))
    return Comparison(baseline="plain", runs=runs)


@pytest.mark.parametrize(
    ("gains", "wanted", "words"),
    [
        ((1.5, 1.48, 1.52, 1.51), True, "keep speculation on: 1.50× (1."),
        ((0.8, 0.79, 0.81, 0.8), False, "speculation loses here: 0.80× (0.7"),
        ((1.0, 0.9, 1.2, 1.1), None, "no sure gain and no sure loss: 1.04× (0."),
        ((1.5,), None, "not known yet: "),
        ((1.5, 0.2), None, "not known yet: the runs differ too much"),
    ],
)
def test_what_the_window_gains_is_the_advice(
    gains: Sequence[float], wanted: bool | None, words: str
) -> None:
    """The gain over all prompts with its interval, or that it is not known."""
    advice = advise(check_of(*(1.0 / gain for gain in gains)))
    assert advice["speculate"] is wanted
    assert advice["words"].startswith(words)
    assert advice["temperatures"]["0"]["measured"] == pytest.approx(advice["measured"])
    if wanted is None:
        assert "specllama tune -r 3" in advice["words"]


def test_the_best_temperature_is_no_finding() -> None:
    """1.30 at the one temperature where a machine was busy, 1.07 of all: tune praised 1.30."""
    noisy = (1 / 0.97, 1 / 1.30, 1 / 0.96, 1 / 1.01, 1 / 1.28, 1 / 0.95)
    advice = advise(check_of(*noisy, temperatures=(0.0, 0.7, 1.0)))
    assert advice["temperatures"]["0.7"]["measured"] == pytest.approx(1.29, abs=0.01)
    assert advice["measured"] == pytest.approx(1.07, abs=0.01)
    assert advice["low"] < 1.0 < advice["high"]
    assert "1.29" not in advice["words"]
    assert "1.30" not in advice["words"]
    assert advice["speculate"] is None


def test_where_nothing_was_guessed_no_speed_is_praised() -> None:
    advice = advise(check_of(*[1 / 1.3] * 6, drafted=0))
    assert advice["words"].startswith("hardly anything was guessed in these replies")
    assert "×" not in advice["words"]
    assert advice["speculate"] is False


def test_tuning_a_pair(engine: Engine) -> None:
    shares: list[float] = []
    said: list[str] = []
    result = tune(
        engine,
        PROMPTS,
        base=GenerateParams(),
        temperatures=(0.0, 1.0),
        per_slice=1,
        max_tokens=16,
        repetitions=1,
        progress=shares.append,
        say=said.append,
    )
    assert [words.split(":")[0] for words in said] == ["step 1 of 2", "step 2 of 2"]
    assert "15 replies, about" in said[1], "4, and 1 to warm up, in each way"
    assert said[1].endswith("min")
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
    assert set(result.check.slices) == {"chat", "code"}
    assert result.check.temperatures == [0.0, 1.0]
    assert set(result.advice["temperatures"]) == {"0", "1"}
    summary = result.check.summary("specllama", "all")
    assert summary.equal == summary.compared
    json.dumps(result.to_dict())


def test_the_halves_of_the_shipped_prompts_share_nothing() -> None:
    every = load_prompts()
    learnt, measured = half(every, "tune"), half(every, "bench")
    assert len(learnt) == len(measured) == len(every) / 2
    for part in (learnt, measured):
        assert {p.slice for p in part[:4]} == set(SLICES), "any first few are a fair sample"
    assert not {p.id for p in learnt} & {p.id for p in measured}
    asked = [{p.messages for p in part} for part in (learnt, measured)]
    assert not asked[0] & asked[1]


@pytest.mark.parametrize("per_slice", [1, 3, 5, 12])
def test_lessons_and_check_of_a_tuning_stay_within_its_half(per_slice: int) -> None:
    mine = half(load_prompts(), "tune")
    check, lessons = split(mine, per_slice)
    assert len(check) == len(lessons) == 4 * per_slice
    assert not {p.id for p in check} & {p.id for p in lessons}

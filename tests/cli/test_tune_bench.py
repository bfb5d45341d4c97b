"""``tune`` and ``bench`` on the command line, over the fake backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines import fake_info

from specllama.bench.experiment import EngineArm, RunFigures, Task
from specllama.cli import invoke
from specllama.engine.profiles import Profile, Windows, open_profile
from specllama.speculative.policy.ledger import Ledger
from specllama.speculative.policy.policy import Policy
from specllama.speculative.window import Plan

pytestmark = pytest.mark.usefixtures("loads")


def test_tune_prints_keeps_and_advises(
    capsys: pytest.CaptureFixture[str], loads: list[tuple[Any, Any]]
) -> None:
    assert invoke(["tune", "some-pair", "--quick", "--max-tokens", "8", "--temperature", "0"]) == 0
    out = capsys.readouterr().out
    assert loads == [("some-pair", None)]
    for part in (
        "a pass of n rows",
        "draft model:",
        "fixed 8",
        "weights: repacked",
        "profile kept:",
        "chat",
    ):
        assert part in out
    profile = open_profile(fake_info(2048))
    assert profile.warm
    assert profile.advice is not None
    assert "words" in profile.advice
    overall = profile.advice
    assert overall["low"] < overall["measured"] < overall["high"]
    [row] = [line for line in out.splitlines() if line.split()[:2] == ["specllama", "all"]]
    assert f"{overall['measured']:.2f}×" in row, "the verdict's figure is in the table"
    assert profile.costs.target.seen(16) > 0


def test_tune_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-tokens", "8", "-n", "1", "--temperature", "1", "--no-save", "--json"]
    assert invoke(["tune", *flags]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "specllama.tune.v2"
    assert data["costs"]["target_ratio"]["1"] == 1.0
    groups = {f"{kind} T=1" for kind in ("chat", "code", "rag", "json")}
    assert {summary["group"] for summary in data["check"]} == groups | {"all"}
    assert data["profile"] is None
    assert data["advice"]["temperatures"]["1"]["measured"] is not None


def test_without_saving_nothing_is_kept() -> None:
    flags = ["--max-tokens", "8", "-n", "1", "--temperature", "0"]
    assert invoke(["tune", *flags, "--no-save"]) == 0
    assert not open_profile(fake_info(2048)).warm
    assert invoke(["tune", *flags]) == 0
    assert open_profile(fake_info(2048)).warm


def test_the_check_is_of_a_window_that_knows_the_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []
    plan = Policy.plan

    def watched(self: Policy, room: int) -> Plan:
        plans.append(plan(self, room))
        return plans[-1]

    monkeypatch.setattr(Policy, "plan", watched)
    assert invoke(["tune", "--max-tokens", "8", "-n", "1", "--temperature", "0", "--no-save"]) == 0
    assert plans
    assert not any(p.reason == "measuring a plain step" for p in plans)


def test_what_tuning_loses_is_lost_on_nobodys_text(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Policy.finish

    def spend(self: Policy) -> None:
        self._ledger.spare = -5.0
        finish(self)

    monkeypatch.setattr(Policy, "finish", spend)
    assert invoke(["tune", "--max-tokens", "8", "-n", "1", "--temperature", "0"]) == 0
    profile = open_profile(fake_info(2048))
    assert profile.learned("greedy").sources
    assert profile.ledger == Ledger()


def test_tuning_gives_nothing_back() -> None:
    """What was lost before stays lost, however often the pair is tuned."""
    profile = open_profile(fake_info(2048))
    profile.ledger.book("mixed", 0.5 - Ledger().total)
    profile.costs.target.set(1, 5.0)
    assert profile.save()
    for _ in range(2):
        assert invoke(["tune", "--max-tokens", "8", "-n", "1", "--temperature", "0"]) == 0
        assert open_profile(fake_info(2048)).ledger.total == pytest.approx(0.5)


def test_tune_refuses_two_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["tune", "a", "-m", "b"]) == 2
    assert "once" in capsys.readouterr().err


def test_bench_run_table(capsys: pytest.CaptureFixture[str], prompts: Path) -> None:
    flags = ["--prompts", str(prompts), "--max-tokens", "12", "-r", "1", "--length", "2"]
    assert invoke(["bench", "run", *flags]) == 0
    text = capsys.readouterr().out
    for part in ("plain", "cold", "fixed 2", "T=0", "code T=1", "same text", "measured"):
        assert part in text
    assert "4/4" in text, "every reply equals plain decoding"


def test_bench_run_json(capsys: pytest.CaptureFixture[str], prompts: Path) -> None:
    flags = ["--prompts", str(prompts), "--slice", "code", "--max-tokens", "8", "-r", "1"]
    assert invoke(["bench", "run", *flags, "--temperature", "0", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "specllama.bench.v2"
    assert {run["slice"] for run in data["runs"]} == {"code"}
    assert data["provenance"]["versions"]["specllama"]


def test_bench_run_sets_methods_side_by_side(
    capsys: pytest.CaptureFixture[str], prompts: Path
) -> None:
    flags = ["--prompts", str(prompts), "--max-tokens", "8", "-r", "1", "--temperature", "0"]
    methods = ["--proposer", "auto", "--proposer", "draft", "--length", "2"]
    assert invoke(["bench", "run", *flags, *methods, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    arms = {run["arm"] for run in data["runs"]}
    assert arms == {"plain", "auto cold", "auto fixed 2", "draft cold", "draft fixed 2"}


def test_bench_measures_on_prompts_that_tune_has_not_seen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt: set[str] = set()
    reply = EngineArm.run

    def noted(self: EngineArm, task: Task, repetition: int) -> RunFigures:
        learnt.add(task.prompt.id)
        return reply(self, task, repetition)

    flags = ["--max-tokens", "4", "--temperature", "0"]
    with monkeypatch.context() as patch:
        patch.setattr(EngineArm, "run", noted)
        assert invoke(["tune", *flags, "-n", "2", "--no-save"]) == 0
    assert len(learnt) == 4 * 2 * 2
    capsys.readouterr()
    assert invoke(["bench", "run", *flags, "-n", "24", "-r", "1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    measured = {run["prompt"] for run in data["runs"]}
    assert measured == set(data["provenance"]["prompts"])
    assert len(measured) == 24
    assert not measured & learnt


def test_bench_reports_cold_beside_warm_and_keeps_nothing(
    capsys: pytest.CaptureFixture[str], prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--prompts", str(prompts), "--max-tokens", "12", "-r", "2", "--temperature", "0"]
    assert invoke(["bench", "run", *flags]) == 0
    said = capsys.readouterr()
    assert "cold" in said.out
    assert "warm" not in said.out
    assert "no warm arm; run specllama tune first" in said.err
    assert not open_profile(fake_info(2048)).warm, "a bench teaches nobody"
    assert invoke(["tune", "--max-tokens", "8", "-n", "1", "--temperature", "0"]) == 0
    capsys.readouterr()
    path = open_profile(fake_info(2048)).path
    assert path is not None
    before = path.read_bytes()
    begun: list[tuple[bool, int]] = []
    use = Windows.use

    def watched(self: Windows, profile: Profile) -> None:
        begun.append((profile.warm, id(profile)))
        use(self, profile)

    monkeypatch.setattr(Windows, "use", watched)
    assert invoke(["bench", "run", *flags]) == 0
    out = capsys.readouterr().out
    assert "cold" in out
    assert "warm: tuned" in out
    assert path.read_bytes() == before
    assert {known for known, _ in begun[1:]} == {True, False}


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--slice", "poetry"], 2, "no prompts of slice"),
        (["-n", "0"], 2, "not in the range"),
        (["--against", "magic 8ball"], 2, "is no address"),
        (["--prompts", "/no/such/file.txt"], 2, "cannot read"),
    ],
)
def test_bench_run_refuses(
    capsys: pytest.CaptureFixture[str], flags: list[str], status: int, words: str
) -> None:
    assert invoke(["bench", "run", *flags]) == status
    assert words in capsys.readouterr().err

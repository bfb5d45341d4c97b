"""``specllama demo``: its races, its report, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ggufs
import pytest
from fakes import Reply, ScriptedEngine

from specllama import paths
from specllama.bench.experiment import question
from specllama.bench.outcome import LEAST, MOST, RaceBoard
from specllama.bench.prompts import half, load_prompts
from specllama.cancel import Cancel
from specllama.cli import demo, invoke, loading
from specllama.models import catalog, library

LONG = Reply("one two three " * 20)


class ClosedEngine(ScriptedEngine):
    """With what the command asks of an engine of ours."""

    def __enter__(self) -> ClosedEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, nobody_else: Path) -> ClosedEngine:
    found = ClosedEngine([LONG] * 90)
    monkeypatch.setattr(loading, "load", lambda *args, **more: found)
    return found


def test_without_a_real_model_it_races_the_bundled_pair_and_names_a_real_one(
    engine: ClosedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["demo"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(("YES: ", "NO: ", "CANNOT TELL YET: "))
    assert "tokens identical" in told
    assert f"specllama hub pull {catalog.FIRST}" in told


def test_the_questions_that_it_shows_are_whole_words_on_eighty_columns(
    engine: ClosedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["demo"]) == 0
    rows = [line for line in capsys.readouterr().err.splitlines() if line[:5].strip().isdigit()]
    shown = [row.split("  ")[-1] for row in rows]
    said = {p.id: " ".join(question(p.content).split()) for p in half(load_prompts(), "bench")}
    assert len(shown) >= len(demo.PROMPTS)
    for row, asked, name in zip(rows, shown, demo.PROMPTS, strict=False):
        begun = asked.removesuffix(" …")
        assert f"{said[name]} ".startswith(f"{begun} ")
        assert (begun == said[name]) == (asked == begun), "what is cut says so"
        assert len(row) <= 80


def test_for_machines_it_is_one_object(
    engine: ClosedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["demo", "--json"]) == 0
    told = capsys.readouterr()
    assert not told.err
    report = json.loads(told.out)
    assert report["answer"] in ("YES", "NO", "CANNOT TELL YET")
    assert report["same_tokens"] == report["tokens"] > 0
    assert report["pairs"] >= LEAST


def test_real_models_that_are_here_are_raced_and_nothing_is_made(
    engine: ClosedEngine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    opened: list[tuple[Any, ...]] = []
    monkeypatch.setattr(loading, "load", lambda *args, **more: opened.append(args[:2]) or engine)
    repo = paths.models_dir() / catalog.load()[catalog.FIRST].target.repo
    repo.mkdir(parents=True)
    first = ggufs.write_llama(repo / "SmolLM2-135M-Instruct.Q4_1.gguf")
    mine = ggufs.write_llama(tmp_path / "mine.gguf")
    assert invoke(["demo", "--json"]) == 0
    assert invoke(["demo", "-m", str(mine), "-d", str(first), "--json"]) == 0
    library.remember(mine, None)
    assert invoke(["demo", "--json"]) == 0
    library.remember(first, None)
    assert invoke(["demo", "--json"]) == 0
    wanted = [(catalog.FIRST, None), (str(mine), str(first)), (catalog.FIRST, None)]
    assert opened == [*wanted, (str(mine), None), (catalog.FIRST, None)]
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["what"] for one in told] == ["scripted target Q4_0 + scripted draft Q8_0"] * 5
    assert all(one["bytes"] == engine.info.target.file_bytes for one in told)
    assert not any(sent.params.ignore_eos for sent in engine.requests)
    assert invoke(["demo"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(("YES: ", "NO: ", "CANNOT TELL YET: "))
    assert "hub pull" not in said.out


def test_the_bundled_pair_can_still_be_asked_for(
    engine: ClosedEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mine = ggufs.write_llama(tmp_path / "mine.gguf")
    library.remember(mine, None)
    assert invoke(["demo", "-m", "tiny", "--json"]) == 0
    capsys.readouterr()
    assert invoke(["demo", "-m", str(tmp_path / "gone.gguf")]) == 3
    assert "gone.gguf" in capsys.readouterr().err


def test_it_is_raced_in_pairs_of_several_prompts_until_it_is_sure() -> None:
    board, told = RaceBoard(), list[Any]()
    way = demo.race(ScriptedEngine([LONG] * 40), board, Cancel(), told.append)
    assert way is not None
    assert [one.pairs for one in told] == list(range(1, way.pairs + 1))
    assert LEAST <= way.pairs <= MOST
    runs = board.runs["race"]
    assert len({str(run.prompt) for run in runs}) >= LEAST
    first = {run.lap: run.name for run in reversed(runs)}
    assert {first[0], first[1]} == {"plain", "drafted"}  # they take turns at being first
    assert way.same == way.of


def test_time_ends_it_after_the_least_pairs() -> None:
    way = demo.race(ScriptedEngine([LONG] * 40), RaceBoard(), Cancel(), seconds=0.0)
    assert way is not None
    assert way.pairs == LEAST


def test_a_race_that_is_stopped_at_once_has_no_result() -> None:
    cancel = Cancel()
    cancel.set()
    assert demo.race(ScriptedEngine([Reply()] * 9), RaceBoard(), cancel) is None

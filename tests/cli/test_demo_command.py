"""``specllama demo``: what it says, what it leaves behind, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ggufs
import pytest
from fakes import Reply, ScriptedEngine

from specllama import paths
from specllama.bench import scaled_pair
from specllama.cli import invoke, loading
from specllama.models import catalog, memory
from specllama.tui.state import Preferences


class ClosedEngine(ScriptedEngine):
    """With what the command asks of an engine of ours."""

    windows: Any = SimpleNamespace(profile=SimpleNamespace(path="kept"))

    def __enter__(self) -> ClosedEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ClosedEngine:
    found = ClosedEngine([Reply("one two three " * 20)] * 60)

    def make(kind: scaled_pair.WeightKind, own: Path, progress: Any) -> tuple[Path, Path]:
        for name in ("t.gguf", "d.gguf"):
            (own / name).write_bytes(b"weights")
        return own / "t.gguf", own / "d.gguf"

    monkeypatch.setattr(scaled_pair, "make", make)
    monkeypatch.setattr(loading, "load", lambda *args, **more: found)
    monkeypatch.setattr(memory, "available_memory", lambda: int(20e9))
    return found


def files() -> list[Path]:
    return list(scaled_pair.folder().rglob("*.gguf"))


def test_it_answers_and_leaves_nothing(
    engine: ClosedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["demo"]) == 0
    told = capsys.readouterr()
    first = told.out.splitlines()[0]
    assert first.startswith(("YES: ", "NO: ", "CANNOT TELL YET: "))
    assert scaled_pair.WHAT in first
    assert "tokens identical" in told.out
    assert "deleted" in told.out
    assert f"{scaled_pair.WHAT}: 1.1 GB" in told.err
    assert not files()
    assert engine.windows.profile.path is None  # nothing learnt of it is kept


def test_for_machines_it_is_one_object(
    engine: ClosedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["demo", "--json"]) == 0
    told = capsys.readouterr()
    assert not told.err
    report = json.loads(told.out)
    assert report["answer"] in ("YES", "NO", "CANNOT TELL YET")
    assert report["what"] == scaled_pair.WHAT
    assert report["same_tokens"] == report["tokens"] > 0
    assert report["pairs"] >= scaled_pair.LEAST


def test_other_weights_are_tried_where_the_first_would_lose(
    engine: ClosedEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaled_pair, "promises", lambda costs: False)
    assert invoke(["demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["type"] == scaled_pair.KINDS[-1].name


def test_real_models_that_are_here_are_raced_and_nothing_is_made(
    engine: ClosedEngine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    nobody_else: Path,
    tmp_path: Path,
) -> None:
    opened: list[tuple[Any, ...]] = []
    monkeypatch.setattr(scaled_pair, "make", None)
    monkeypatch.setattr(loading, "load", lambda *args, **more: opened.append(args[:2]) or engine)
    repo = paths.models_dir() / catalog.load()[catalog.FIRST].target.repo
    repo.mkdir(parents=True)
    first = ggufs.write_llama(repo / "SmolLM2-135M-Instruct.Q4_1.gguf")
    mine = ggufs.write_llama(tmp_path / "mine.gguf")
    assert invoke(["demo", "--json"]) == 0
    assert invoke(["demo", "-m", str(mine), "-d", str(first), "--json"]) == 0
    Preferences(last_target=str(mine), last_draft="none").save()
    assert invoke(["demo", "--json"]) == 0
    Preferences(last_target=catalog.FIRST).save()
    assert invoke(["demo", "--json"]) == 0
    wanted = [(catalog.FIRST, None), (str(mine), str(first)), (catalog.FIRST, None)]
    assert opened == [*wanted, (str(mine), "none"), (catalog.FIRST, None)]
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["what"] for one in told] == ["scripted target Q4_0 + scripted draft Q8_0"] * 5
    assert all(one["bytes"] == engine.info.target.file_bytes for one in told)
    assert not any(sent.params.ignore_eos for sent in engine.requests)
    assert invoke(["demo"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(("YES: ", "NO: ", "CANNOT TELL YET: "))
    assert ("specllama demo -m tiny" in said.out) == (not said.out.startswith("YES"))
    assert "deleted" not in said.out


def test_the_bundled_pair_can_still_be_asked_for(
    engine: ClosedEngine, capsys: pytest.CaptureFixture[str], nobody_else: Path, tmp_path: Path
) -> None:
    mine = ggufs.write_llama(tmp_path / "mine.gguf")
    Preferences(last_target=str(mine)).save()
    assert invoke(["demo", "-m", "tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["what"] == scaled_pair.WHAT
    assert invoke(["demo", "-m", str(tmp_path / "gone.gguf")]) == 3
    assert "gone.gguf" in capsys.readouterr().err


def test_without_room_it_says_what_it_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1)
    assert invoke(["demo"]) == 1
    said = capsys.readouterr().err
    assert "of memory are free" in said
    assert "specllama demo" in said


@pytest.mark.parametrize("at", ["make", "load"])
def test_a_signal_deletes_the_files(at: str) -> None:
    """While they are written, and while they are loaded, where the process ends at once."""
    script = f"""
import sys, time
from specllama.bench import scaled_pair
from specllama.cli import invoke, loading
from specllama import signals
from specllama.models import memory
memory.available_memory = lambda: int(20e9)
def wait():
    print("there", flush=True)
    while True:
        time.sleep(0.01)
def make(kind, own, progress):
    (own / "t.gguf").write_bytes(b"weights")
    if {at!r} == "make":
        wait()
    return own / "t.gguf", own / "t.gguf"
def load(*args, **more):
    with signals.stop_loading():
        wait()
scaled_pair.make, loading.load = make, load
sys.exit(invoke(["demo"]))
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "there\n"
        assert files()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert not files()

"""``make gpu-check``, the command: what it says without a GPU, and how it hands its settings on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import gpu_check
import pytest
from gpu_check import Done
from gpu_command import main

from specllama.backend import devices
from specllama.backend.devices import Device

CPU = Device("CPU", "cpu", "CPU", "a processor", 1, 2)
CARD = Device("CUDA0", "gpu", "CUDA", "a card", 3 << 30, 4 << 30)

Ran = list[tuple[tuple[str, ...], dict[str, str]]]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """Commands that were run, and the environment that each was given."""
    found: Ran = []

    def run(argv: Sequence[str], seconds: float, environment: dict[str, str]) -> Done:
        found.append((tuple(argv), environment))
        return Done(0, 1.0, "{}")

    monkeypatch.setattr(gpu_check, "run", run)
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    return found


def test_without_a_gpu_it_says_so_and_runs_nothing(
    ran: Ran, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "devices", lambda: [CPU])
    monkeypatch.setattr(devices, "gpu_build_command", lambda found: None)
    assert main([]) == 1
    said = capsys.readouterr().err
    assert "no GPU here that this build of llama.cpp can use" in said
    assert "--device none" in said
    monkeypatch.setattr(devices, "gpu_build_command", lambda found: ("NVIDIA GPU", "CMAKE_ARGS=x"))
    assert main([]) == 1
    said = capsys.readouterr().err
    assert "NVIDIA GPU here" in said
    assert "CMAKE_ARGS=x" in said
    assert ran == []


def test_a_card_is_measured_and_the_report_says_with_what(
    ran: Ran,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(devices, "devices", lambda: [CPU, CARD])
    out = ["--out", str(tmp_path / "a"), "--out", str(tmp_path / "b")]
    flags = ["--only", "own", "--only", "load", "-m", "tiny", "--batch-size", "64", "--no-mmap"]
    assert main([*out, *flags]) == 0
    told = capsys.readouterr()
    assert "CUDA0: a card, 4.0 GiB" in told.out
    assert "llama-bench of the same build is not here" in told.err
    assert {argv[4] for argv, _ in ran} == {"doctor", "run"}
    for _, environment in ran:
        assert environment["SPECLLAMA_BATCH_SIZE"] == "64"
        assert environment["SPECLLAMA_MMAP"] == "off"
        assert environment["SPECLLAMA_HOME"] == str(tmp_path / "a" / "home")
        assert "SPECLLAMA_MODEL" not in environment
    assert (tmp_path / "b" / "gpu-check.md").read_text() == told.out
    state = json.loads((tmp_path / "a" / "gpu-check.json").read_text())
    assert state["facts"]["build"]["devices"] == ["a card"]
    before = len(ran)
    assert main([*out, *flags, "--json"]) == 0
    assert len(ran) == before
    assert json.loads(capsys.readouterr().out) == state


def test_the_processor_can_be_asked_for(
    ran: Ran, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "devices", lambda: [CPU])
    flags = ["--device", "none", "--from", "bench", "--no-more", "--out", str(tmp_path)]
    assert main([*flags, "-m", "tiny", "--count", "2"]) == 0
    (argv, environment), *rest = ran
    assert argv[4:6] == ("bench", "run")
    assert argv[argv.index("-n") + 1] == "2"
    assert environment["SPECLLAMA_DEVICE"] == "none"
    assert rest


def test_a_part_that_fails_makes_the_exit_status_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "devices", lambda: [CPU, CARD])
    failed = Done(5, 1.0, "", "error: it does not fit")
    monkeypatch.setattr(gpu_check, "run", lambda *given, **more: failed)
    flags = ["--only", "tune", "-m", "tiny", "--out", str(tmp_path)]
    assert main([*flags]) == 1
    told = capsys.readouterr()
    assert "failed: error: it does not fit" in told.err
    assert "## What failed" in told.out

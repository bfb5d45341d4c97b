"""``specllama doctor``: what it finds, and what it makes of a broken installation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specllama.backend import devices
from specllama.cli import invoke


def run(capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, dict[str, str]]:
    assert invoke(["doctor", "--json"]) == code
    return {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}


def test_a_sound_installation(capsys: pytest.CaptureFixture[str]) -> None:
    checks = run(capsys)
    assert "llama-cpp-python 0.3.36" in checks["packages"]["found"]
    assert "commit 0c1e57098" in checks["llama.cpp"]["found"]
    assert checks["CPU features"]["status"] == "ok"
    assert "free of" in checks["RAM"]["found"]
    assert "tiny-target-q4_0.gguf" in checks["bundled pair"]["found"]
    assert not [check for check in checks.values() if check["status"] == "bad"]


def test_the_table_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "✓  specllama" in out


def test_a_gpu_without_support_names_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "gpu_build_command", lambda found: ("NVIDIA GPU", "CMAKE_ARGS=x"))
    check = run(capsys)["GPU"]
    assert check["status"] == "warn"
    assert "CMAKE_ARGS=x" in check["advice"]


def test_a_library_that_does_not_load(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise OSError("libllama.so: cannot open shared object file")

    monkeypatch.setattr(devices, "build_info", broken)
    check = run(capsys, code=1)["llama.cpp"]
    assert check["status"] == "bad"
    assert "pip install" in check["advice"]


def test_offline_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    check = run(capsys)["network"]
    assert "switched off" in check["found"]
    assert "hf_secret" not in json.dumps(check)


def test_a_home_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import os

    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert run(capsys, code=1)["models"]["status"] == "bad"

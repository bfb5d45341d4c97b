"""``specllama doctor``: what it finds, and what it makes of a broken installation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import sketches
from engines import fake_info

from specllama import paths
from specllama.backend import devices, trial, verdicts
from specllama.backend.exactness import SCHEMA, Exactness
from specllama.cli import invoke
from specllama.engine import gguf_pair
from specllama.engine.profiles import Profile, pair_key, profile_path
from specllama.interface import ModelInfo
from specllama.models import context, memory
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.refs import bundled
from specllama.settings.params import EngineOptions


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


def test_a_package_that_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = paths.package_versions("huggingface-hub", "textual") | {"textual": "not installed"}
    monkeypatch.setattr("specllama.cli.doctor.package_versions", lambda *more: known)
    check = run(capsys, 1)["packages"]
    assert check["status"] == "bad"
    assert check["found"].endswith("textual not installed")
    assert "--force-reinstall" in check["advice"]


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
    assert check["advice"].endswith(devices.WHEELS_PAGE)


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


def test_a_model_s_place_is_told(cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a machine that does not exist, for a model of 17 GB without a file."""
    card = devices.Device("CUDA0", "gpu", "CUDA", "a card", 11_600_000_000, 12_000_000_000)
    processor = devices.Device("CPU", "cpu", "CPU", "", 28_000_000_000, 32_000_000_000)
    monkeypatch.setattr(devices, "devices", lambda: [card, processor])
    monkeypatch.setattr(memory, "available_memory", lambda: 28_000_000_000)
    monkeypatch.setattr(gguf_pair, "read_header", lambda path: sketches.qwen_30b_a3b())
    monkeypatch.setattr(gguf_pair, "check_loadable", lambda header, role: None)
    monkeypatch.setattr(verdicts, "circumstances", lambda header: {})
    file = tmp_path / "m.gguf"
    file.touch()
    found: dict[str, list[dict[str, str]]] = {}
    for check in json.loads(cli("doctor", "-m", str(file), "--json").out)["checks"]:
        found.setdefault(check["name"], []).append(check)
    assert found["context"][0]["found"].startswith("8,192 of 262,144 tokens")
    assert [check["found"] for check in found["offload"]] == [
        "target 49 of 49 layers: 49 on CUDA0 (9.8 GB)",
        "target experts of the first 24 of 48 layers in RAM (8.2 GB)",
    ]
    assert found["RAM needed"][0]["status"] == "ok"
    asked = cli("doctor", "-m", str(file), "--n-cpu-moe", "40", "--json").out
    assert "the first 40 of 48 layers" in asked
    assert cli("doctor", "-m", str(file), "--device", "CUDA7").code == 2
    monkeypatch.setattr(memory, "available_memory", lambda: 5_000_000_000)
    assert "! RAM needed" in " ".join(cli("doctor", "-m", str(file)).out.split())


def test_what_a_server_takes_is_told(cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Prompts are read in a second cache beside other conversations; idle ones take what is left.
    Where that does not fit, the next command is named."""

    def checks(free: float, *more: str) -> dict[str, dict[str, str]]:
        monkeypatch.setattr(memory, "available_memory", lambda: int(free))
        out = cli("doctor", "-m", str(file), "-c", "8192", "--json", *more).out
        return {check["name"]: check for check in json.loads(out)["checks"]}

    processor = devices.Device("CPU", "cpu", "CPU", "", 28_000_000_000, 32_000_000_000)
    monkeypatch.setattr(devices, "devices", lambda: [processor])
    monkeypatch.setattr(gguf_pair, "read_header", lambda path: sketches.qwen_30b_a3b())
    monkeypatch.setattr(gguf_pair, "check_loadable", lambda header, role: None)
    monkeypatch.setattr(gguf_pair.Pair, "layout", "as stored")
    monkeypatch.setattr(verdicts, "circumstances", lambda header: {})
    file = tmp_path / "m.gguf"
    file.touch()
    assert "conversations" not in checks(28e9)
    found = checks(28e9, "--parallel", "4")
    assert found["RAM needed"]["status"] == "ok"
    words = found["conversations"]["found"]
    assert words.startswith("4 at once share the context; ")
    assert "MB to read prompts beside them, up to 1.1 GB for what idle ones hold" in words
    one, four = (
        gguf_pair.Pair(
            sketches.qwen_30b_a3b(), None, False, context.Length(8192, 8192),
            EngineOptions(parallel=n), lanes=n,
        ).need(8192).required
        for n in (1, 4)
    )  # fmt: skip
    short = checks((one + four) / 2 / memory.MARGIN, "--parallel", "4")
    assert short["RAM needed"]["status"] == "warn"
    assert short["RAM needed"]["advice"] == "what fits: -c 4096 or --parallel 1"
    assert checks(5e9, "--parallel", "4")["RAM needed"]["advice"].startswith("choose a smaller")


def test_what_was_measured_of_a_model_is_told_and_what_was_not(cli) -> None:
    def told() -> str:
        checks = json.loads(cli("doctor", "-m", "tiny", "--json").out)["checks"]
        return next(check["found"] for check in checks if check["name"] == "exactness")

    assert told().endswith("specllama tune -m FILE")
    target = read_header(bundled("tiny-target"))
    target.read_contents()
    here = verdicts.circumstances(target)
    found, kernels = Exactness(rows=65, trees=True), trial.kernels().name
    verdicts.keep(SCHEMA, {**here, "repack": False, "kernels": kernels, "threads": 2}, found)
    assert told().startswith("not measured yet"), "that is another layout"
    verdicts.keep(SCHEMA, {**here, "repack": True, "kernels": kernels, "threads": 2}, found)
    verdicts.keep(SCHEMA, {**here, "repack": True, "kernels": kernels, "threads": 4}, found)
    assert told() == "bitwise up to 65 rows"
    verdicts.keep(
        SCHEMA, {**here, "file": "another", "repack": True, "kernels": kernels}, Exactness(rows=3)
    )
    assert told() == "bitwise up to 65 rows"


def test_what_would_be_faster_is_named_as_far_as_it_was_measured(cli) -> None:
    def told() -> list[str]:
        checks = json.loads(cli("doctor", "-m", "tiny", "--json").out)["checks"]
        return [check["found"] for check in checks if check["name"] == "faster"]

    assert told() == ["not known yet: that is measured at rest, or now by: specllama tune -m FILE"]
    target, draft = (read_header(bundled(name)) for name in ("tiny-target", "tiny-draft"))
    info = fake_info()
    key = pair_key(
        replace(
            info,
            here=verdicts.name_of(verdicts.here()),
            target=_like(info.target, target),
            draft=_like(info.target, draft),
        )
    )
    profile = Profile(profile_path(key, paths.profiles_dir()), key)
    for rows in (1, 2, 3, 4):
        profile.costs.target.set(rows, 10.0 * rows)
    profile.save()
    assert told() == ["nothing of what was measured here"]
    smaller = {**key, "target": "Q2_K 1"}
    other = Profile(profile_path(smaller, paths.profiles_dir()), smaller)
    for rows in (1, 2, 3, 4):
        other.costs.target.set(rows, 5.0 * rows)
    other.save()
    assert told() == ["this model as Q2_K would write 2.00×; its texts are other ones"]


def _like(info: ModelInfo, header: GgufHeader) -> ModelInfo:
    names = ("name", "quantization", "n_params", "file_bytes")
    same = {name: getattr(header, name) for name in names}
    return replace(info, kernels=trial.kernels().name, **same)

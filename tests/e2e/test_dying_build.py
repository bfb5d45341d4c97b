"""A build of llama.cpp that dies: tried by a child, said once, remembered; nobody ends by a signal.

The faults are those of ``dying_llama``; on a processor with AMX, the installed build is tried too.
"""

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import dying_llama
import pytest

from specllama.backend import devices, trial, verdicts
from specllama.engine import process
from specllama.models.refs import bundled

Run = Callable[..., subprocess.CompletedProcess[str]]
MEND = "pip install --force-reinstall"
HI = ("run", "--threads", "1", "-n", "4", "--seed", "1", "--temperature", "0", "hi")
LIBRARY = """
import sys
from specllama import Engine, EngineOptions, GenerateParams
from specllama.errors import SpecllamaError

def main():
    told = []
    try:
        options = EngineOptions(kernels="off", threads=1)
        with Engine.load("tiny", options=options, on_progress=told.append) as engine:
            *_, done = engine.generate("hi", GenerateParams(seed=1, max_tokens=4))
            assert done.text and not engine.info.target.repacked
    except SpecllamaError as error:
        sys.exit(f"{type(error).__name__}: {error.message}; {error.hint}")
    print("".join(event.message for event in told if event.type == "notice"))
"""
HOST = """
import sys
from specllama.engine.host import EngineHost, LoadEngine
from specllama.errors import SpecllamaError
from specllama.settings.params import EngineOptions, GenerateParams

def main():
    told = []
    options = EngineOptions(kernels="off", threads=1)
    with EngineHost(LoadEngine("tiny", None, options), on_event=told.append) as host:
        for attempt in range(2):
            try:
                params = GenerateParams(seed=1, max_tokens=4)
                *_, done = host.generate("Once upon a time there was a river that", params)
                assert done.text and not host.info.target.repacked
                break
            except SpecllamaError as error:
                print(f"{type(error).__name__}: {error.message}; {error.hint}")
    print("".join(event.message for event in told if event.type == "notice"))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dying_llama.build(tmp_path_factory.mktemp("dying"))


@pytest.fixture
def run(library: Path, tmp_path: Path) -> Run:
    """Runs specllama, or a program, over the library that dies."""

    def one(dies: str, *words: str, program: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "specllama", *words]
        if program:
            script = tmp_path / "program.py"
            script.write_text(f"{program}\n\nif __name__ == '__main__':\n    main()\n", "utf-8")
            command = [sys.executable, str(script)]
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            env={
                **os.environ,
                "LLAMA_CPP_LIB_PATH": str(library),
                "LLAMA_DIES": dies,
                "SPECLLAMA_KERNELS": "off",  # our own do not die of what llama.cpp's die of
            },
        )

    return one


@pytest.fixture(autouse=True)
def untried(home: Path) -> None:
    """Nothing is known of any build."""
    shutil.rmtree(home)


def trials(home: Path) -> list[Path]:
    return sorted((home / "data" / "profiles" / "trials").glob("*.json"))


def test_a_fault_of_wide_passes_costs_a_fallback_and_a_sentence_once(run: Run, home: Path) -> None:
    first = run("rows", *HI)
    assert first.returncode == 0, first.stderr
    (line,) = [line for line in first.stderr.splitlines() if "SIGILL" in line]
    assert "a pass of 2 rows is computed with weights repacked" in line
    assert "weights stay as stored" in line
    assert MEND in line
    (kept,) = trials(home)
    before = kept.stat().st_mtime_ns
    again = run("rows", *HI)
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert "SIGILL" not in again.stderr
    assert kept.stat().st_mtime_ns == before, "it is not tried again"
    doctor = run("rows", "doctor")
    assert "a pass of 2 rows is computed with weights repacked" in doctor.stdout
    assert MEND in doctor.stderr
    assert run("rows", *HI, "--repack", "on").returncode == 0


def test_the_library_is_told_and_goes_on(run: Run) -> None:
    done = run("rows", program=LIBRARY)
    assert done.returncode == 0, done.stderr
    assert "weights stay as stored" in done.stdout


@pytest.mark.parametrize("dies", ["import", "passes"])
def test_the_library_raises_where_nothing_can_be_computed(run: Run, dies: str) -> None:
    done = run(dies, program=LIBRARY)
    assert done.returncode == 1
    assert done.stderr.startswith("CannotLoad: this build of llama.cpp dies of SIGILL")


def test_the_process_of_the_app_and_of_a_server_is_told_and_goes_on(run: Run) -> None:
    done = run("rows", program=HOST)
    assert done.returncode == 0, done.stderr
    assert "weights stay as stored" in done.stdout
    assert "EngineDied" not in done.stdout


def test_a_fault_that_no_trial_meets_is_met_once(run: Run) -> None:
    """The trial goes well, and a real model dies: one sentence, and the next start falls back."""
    first = run("later", *HI, "--repack", "on")
    assert first.returncode == 5, first.stderr
    assert "an instruction that fails on this processor (SIGILL)" in first.stderr
    assert "specllama doctor tells how to build it again\n  start again" in first.stderr
    again = run("later", *HI, "--repack", "on")
    assert again.returncode == 0, again.stderr
    assert "a model is computed with weights repacked" in run("later", "doctor").stdout


def test_an_engine_process_that_dies_of_it_is_started_again_without(run: Run) -> None:
    """Nothing wide is computed while it loads: the first prompt meets the fault, the next none."""
    done = run("later", program=HOST)
    assert done.returncode == 0, done.stderr
    assert "an instruction that fails on this processor" in done.stdout
    assert "the next engine does without what was built for it" in done.stdout
    assert "specllama doctor" in done.stdout


def test_an_engine_process_that_dies_of_it_at_work_names_what_helps() -> None:
    died = process._obituary(-4, io.BytesIO(), "while it was working", loading=False)
    assert "SIGILL: this build of llama.cpp uses an instruction that fails" in died.message
    assert died.hint is not None
    assert "specllama doctor" in died.hint
    assert "smaller model" not in died.hint


COMMANDS = (
    HI,
    ("chat", "--plain"),
    ("serve", "--port", "0"),
    ("tune", "--quick"),
    ("prove", "-n", "1"),
    ("rpc-worker",),
    ("hub", "pairs"),
    ("quantize", str(bundled("tiny-target")), "made.gguf", "--type", "q8_0", "--requantize"),
)


def test_where_nothing_can_be_computed_every_command_says_so(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of them tries the build, the others know."""
    monkeypatch.chdir(tmp_path)
    for words in COMMANDS:
        done = run("passes", *words)
        assert done.returncode == 5, (words, done.stderr)
        assert "this build of llama.cpp dies of SIGILL on this processor when" in done.stderr
        assert f"build it for this processor: {'CXXFLAGS' if amx() else ''}" in done.stderr
        assert MEND in done.stderr


def test_doctor_and_pair_say_what_they_can_without_it(run: Run) -> None:
    doctor = run("import", "doctor")
    assert doctor.returncode == 1
    assert "dies of SIGILL on this processor when it is imported" in doctor.stdout
    assert "RAM" in doctor.stdout, "the rest of the table is there"
    assert run("import", "pair", "tiny").returncode == 0


def test_a_quantizer_that_dies_says_how_to_mend_it(run: Run, tmp_path: Path) -> None:
    words = (str(bundled("tiny-target")), str(tmp_path / "made.gguf"), "--type", "q8_0")
    done = run("quantize", "quantize", *words, "--requantize")
    assert done.returncode == 1
    assert "an instruction that fails on this processor" in done.stderr
    assert "specllama doctor" in done.stderr
    assert not list(tmp_path.glob("*.gguf"))


def amx() -> bool:
    return "amx_tile" in devices.cpu_features().split()


def test_the_installed_build_lives_in_both_layouts() -> None:
    """With AMX, too: the build of ``make`` keeps the stores that tiles need."""
    assert trial._tried() == trial.Ended()
    if amx():
        assert "AMX_INT8" in devices.build_info().features


def test_what_died_is_known_for_one_build_and_machine(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    tried: list[int] = []

    def died() -> trial.Ended:
        tried.append(1)
        return trial.Ended("SIGILL", "a pass of 2 rows is computed with weights repacked")

    monkeypatch.setattr(trial, "_known", {})
    monkeypatch.setattr(trial, "_untold", [])
    monkeypatch.setattr(trial, "_tried", died)
    assert not trial.repacks()
    assert not trial.repacks()
    monkeypatch.setattr(trial, "_known", {})  # another process
    assert not trial.repacks()
    assert len(tried) == 1
    assert len(trial.untold()) == 1
    assert trial.untold() == []
    monkeypatch.setattr(devices, "library_files", lambda: ["another build"])
    assert not trial.repacks()
    monkeypatch.setattr(devices, "cpu_features", lambda: "another machine amx_tile")
    assert not trial.repacks()
    assert len(tried) == 3
    assert 'CXXFLAGS="-fno-dse -fno-tree-dse" ' in trial.untold()[-1]
    assert "uv tool install, pipx install or pip install" in trial.mend_each()
    assert len(trials(home)) == 3


def test_want_of_memory_is_not_remembered(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(trial, "_known", {})
    monkeypatch.setattr(trial, "_untold", [])
    monkeypatch.setattr(trial, "_tried", lambda: trial.Ended("SIGABRT", "it is imported"))
    assert not trial.repacks()
    assert trials(home) == []


def test_a_trial_that_cannot_be_made_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_known", {})
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert trial.repacks()
    assert verdicts.known(trial.SCHEMA, trial._key(), trial.Ended) is None

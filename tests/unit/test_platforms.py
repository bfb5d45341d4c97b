"""Where systems differ: what this one cannot try is at least named, and takes the right branch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from specllama import paths
from specllama.backend import devices
from specllama.cli.doctor import _machine
from specllama.engine import process
from specllama.tui import editor


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")


def install(monkeypatch: pytest.MonkeyPatch, *, pip: bool, active: bool) -> str:
    found = object() if pip else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found if name == "pip" else None)
    monkeypatch.setattr(sys, "executable", "/home/me/my tools/bin/python")
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix if active else "/elsewhere")
    return paths.pip_install("gguf")


@pytest.mark.parametrize(
    ("pip", "active", "command"),
    [
        (True, True, "pip install gguf"),
        (True, False, "'/home/me/my tools/bin/python' -m pip install gguf"),
        (False, True, "uv pip install --python '/home/me/my tools/bin/python' gguf"),
    ],
)
def test_a_package_goes_into_the_environment_that_runs(
    monkeypatch: pytest.MonkeyPatch, pip: bool, active: bool, command: str
) -> None:
    assert install(monkeypatch, pip=pip, active=active) == command


@pytest.mark.usefixtures("windows")
def test_commands_for_windows_are_powershell_s(monkeypatch: pytest.MonkeyPatch) -> None:
    exe = '"/home/me/my tools/bin/python"'
    assert install(monkeypatch, pip=True, active=False) == f"& {exe} -m pip install gguf"
    assert install(monkeypatch, pip=False, active=False) == f"uv pip install --python {exe} gguf"
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.3.36")
    built = devices.build_command("GGML_CUDA")
    assert built.startswith('$env:CMAKE_ARGS="-DGGML_CUDA=on"; uv pip install ')


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (0xC0000005, "SIGSEGV: a crash in native code"),
        (3, "SIGABRT: llama.cpp aborted"),
        (0xC0000135, "exit status 3221225781"),  # a library is missing
    ],
)
def test_a_status_of_windows_is_told_as_a_signal(status: int, cause: str, tmp_path: Path) -> None:
    died = process._obituary(status, tmp_path / "none.log", "while it was working", loading=False)
    assert f"({cause})" in died.message


@pytest.mark.usefixtures("windows")
def test_windows_has_no_helper_that_needs_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def started() -> None:
        raise AssertionError("on Windows this is an ImportError")

    monkeypatch.setattr(process.resource_tracker, "ensure_running", started)
    process._ensure_resource_tracker()


def test_doctor_does_without_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "getloadavg")
    assert [check.name for check in _machine()] == ["CPU", "RAM"]


def test_an_editor_of_windows_keeps_its_backslashes(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr("subprocess.run", lambda words, **_: ran.append(words))
    editor.edit("vi -u 'my rc'", "")
    monkeypatch.setattr(sys, "platform", "win32")
    editor.edit(r'"C:\Program Files\ed.exe" -w', "")
    assert ran[0][:3] == ["vi", "-u", "my rc"]
    assert ran[1].startswith(r'"C:\Program Files\ed.exe" -w "')

"""Where systems differ: what this one cannot try is at least named, and takes the right branch."""

from __future__ import annotations

import os
import sys

import pytest

from specllama import paths
from specllama.cli.doctor import _machine


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


def test_doctor_does_without_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "getloadavg")
    assert [check.name for check in _machine()] == ["CPU", "RAM"]

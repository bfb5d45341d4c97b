"""Where systems differ: what this one cannot try is at least named, and takes the right branch."""

from __future__ import annotations

import sys

import pytest

from specllama import paths


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

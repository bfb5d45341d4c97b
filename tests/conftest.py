"""Shared fixtures: every test gets its own SPECLLAMA_HOME and no settings from outside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private home; variables of the caller's shell that change behaviour are removed."""
    for name in list(os.environ):
        if name.startswith("SPECLLAMA_"):
            monkeypatch.delenv(name)
    folder = tmp_path / "home"
    monkeypatch.setenv("SPECLLAMA_HOME", str(folder))
    monkeypatch.setenv("NO_COLOR", "1")
    return folder

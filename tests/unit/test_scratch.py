"""Folders among the temporary ones: a killed process's go when the next one is made."""

import os
import tempfile
import time
from pathlib import Path

import pytest
from filelock import FileLock

from specllama import paths


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left(folder: Path, *, age_s: float = 3600) -> Path:
    folder.mkdir()
    (folder / "model").write_bytes(b"0")
    then = time.time() - age_s
    os.utime(folder, (then, then))
    return folder


def test_it_is_gone_after_its_block(temporary: Path) -> None:
    with paths.scratch("trial") as folder:
        assert folder.parent == temporary
    assert [*temporary.iterdir()] == []


def test_what_a_kill_left_goes_with_the_next_one(temporary: Path) -> None:
    killed, other = left(temporary / "specllama-trial-a"), left(temporary / "specllama-bench-a")
    young = left(temporary / "specllama-trial-b", age_s=0)
    with paths.scratch("trial"):
        assert [killed.exists(), other.exists(), young.exists()] == [False, True, True]


def test_what_is_in_use_stays(temporary: Path) -> None:
    used = left(temporary / "specllama-trial-a")
    with FileLock(used / ".lock"):
        os.utime(used, (0, 0))
        with paths.scratch("trial"):
            assert (used / "model").exists()


def test_a_link_is_not_followed(temporary: Path) -> None:
    elsewhere = left(temporary / "elsewhere")
    (temporary / "specllama-trial-a").symlink_to(elsewhere)
    os.utime(temporary / "specllama-trial-a", (0, 0), follow_symlinks=False)
    with paths.scratch("trial"):
        assert (elsewhere / "model").exists()

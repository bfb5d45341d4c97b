"""Limits of the kernel, read from recorded ``/proc`` and ``/sys``."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from specllama.errors import DoesNotFit
from specllama.models import kernel_limits, memory
from specllama.models.memory import ModelMemory

TREES = tomllib.loads(
    (Path(__file__).parents[2] / "data" / "kernel_limits.toml").read_text("utf-8")
)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    monkeypatch.setattr(memory, "_from_sysconf", lambda: 0)
    monkeypatch.setattr(os, "sysconf", lambda name: 4096)  # these were written with small pages

    def record(name: str) -> dict[str, Any]:
        tree: dict[str, Any] = TREES[name]
        if total_and_free := tree.get("meminfo"):
            words = "MemTotal: {} kB\nMemFree: 1 kB\nMemAvailable: {} kB\n"
            tree["files"]["proc/meminfo"] = words.format(*total_and_free)
        for path, text in tree["files"].items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.removeprefix("\n"), "utf-8")
        return tree

    return record


@pytest.mark.parametrize("name", TREES)
def test_the_limit_that_leaves_the_least_counts(recorded: Any, tmp_path: Path, name: str) -> None:
    tree = recorded(name)
    limit = memory.room()
    assert (limit.free, limit.source) == (tree["free"], tree["source"])
    assert limit.total == tree["total"]
    assert memory.available_memory() == tree["free"]
    assert memory.total_memory() == min(tree["total"], memory.total_memory())
    assert kernel_limits.processors(tmp_path) == tree.get("processors")


def test_a_smaller_limit_bounds_the_ram_though_another_one_leaves_less(recorded: Any) -> None:
    recorded("systemd-user-slice-v2")
    assert memory.room().total == 2 << 30
    assert memory.total_memory() == 1 << 30


def test_what_is_left_to_other_engines_is_left_of_the_limit_too(
    recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded("docker-v1")
    monkeypatch.setattr(memory, "_beside", 43_718_400)
    assert memory.available_memory() == 900_000_000


def test_a_refusal_names_the_limit(recorded: Any) -> None:
    recorded("systemd-service-v2")
    need = ModelMemory(
        weights=800_000_000, repacked=0, kv=0, compute=0, output=0, tokenizer=0, n_ctx=256
    )
    with pytest.raises(DoesNotFit) as refused:
        memory.require_fit(need)
    assert "780 MB are free of the 839 MB that " in refused.value.message
    assert "specllama.service/memory.high allows" in refused.value.message
    assert refused.value.exit_code == 5


def test_this_process_moves_to_another_group(recorded: Any, tmp_path: Path) -> None:
    recorded("systemd-service-v2")
    before = memory.room()
    (tmp_path / "proc/self/cgroup").write_text("0::/system.slice\n", "utf-8")
    assert memory.room() != before
    assert memory.room().source == ""

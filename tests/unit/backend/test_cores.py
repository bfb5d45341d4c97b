"""Physical cores on systems that are not here: by what those systems say."""

from __future__ import annotations

import os
import sys

import pytest

from specllama.backend import cores


def test_hyper_threads_of_one_core_count_once() -> None:
    pairs = {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2", 3: "3"}
    assert cores.linux_cores(range(6), pairs.get) == 4
    assert cores.linux_cores([0, 4], pairs.get) == 1, "both threads of one core"
    assert cores.linux_cores([0, 1], pairs.get) == 2
    assert cores.linux_cores([0, 9], pairs.get) is None, "a kernel that does not say"
    assert cores.linux_cores([], pairs.get) is None


def test_apple_silicon_gives_its_performance_cores() -> None:
    m3 = {"hw.perflevel0.physicalcpu": 6, "hw.perflevel1.physicalcpu": 6, "hw.physicalcpu": 12}
    assert cores.macos_cores(m3.get) == 6
    assert cores.macos_cores({"hw.physicalcpu": 4}.get) == 4
    assert cores.macos_cores({}.get) is None


@pytest.mark.parametrize(
    ("platform", "name", "answer", "expected"),
    [
        ("darwin", "_sysctl", lambda name: 6 if "perflevel0" in name else 10, 6),
        ("darwin", "_sysctl", lambda name: None, 12),
        ("linux", "_siblings", lambda cpu: str(cpu % 6), 6),
        ("linux", "_siblings", lambda cpu: None, 12),
        ("linux", "_siblings", lambda cpu: "all of them", 1),
    ],
)
def test_each_system_is_asked_its_own_way(
    monkeypatch: pytest.MonkeyPatch, platform: str, name: str, answer: object, expected: int
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    if platform == "linux":
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    else:
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    monkeypatch.setattr(cores, name, answer)
    assert cores.physical_cores() == expected


def test_this_machine_says_something() -> None:
    assert 1 <= cores.physical_cores() <= (os.cpu_count() or 1)


def test_a_system_that_does_not_tell_its_load_is_not_crowded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown() -> tuple[float, float, float]:
        raise OSError("Load averages are unobtainable")

    monkeypatch.setattr(os, "getloadavg", unknown)
    assert not cores.crowded()
    monkeypatch.setattr(os, "getloadavg", lambda: (999.0, 0.0, 0.0))
    assert cores.crowded()

"""How many threads compute: choices on simulated machines, in simulated time."""

import os
import random
import sys
from collections.abc import Callable

import pytest

from specllama.backend import cores
from specllama.backend.threads import ThreadChoice, ladder

Machine = Callable[[int, float], float]  # (threads, time) -> seconds of a pass of one row


def run(
    machine: Machine, most: int, seconds: float, seed: int = 0, rows: tuple[int, ...] = (1,)
) -> float:
    """Passes a second, weighed by their rows."""
    choice, rng = ThreadChoice(most), random.Random(seed)
    now = done = 0.0
    while now < seconds:
        n = rng.choice(rows)
        took = machine(choice.choose(n), now) * n**0.7 * rng.uniform(0.95, 1.05)
        if rng.random() < 0.02:
            took *= rng.uniform(1.0, 10.0)  # somebody else's moment
        choice.took(n, took)
        now += took
        done += n**0.7
    return done / now


def fixed(machine: Machine, threads: int, seconds: float, seed: int = 0) -> float:
    rng = random.Random(seed)
    now = done = 0.0
    while now < seconds:
        took = machine(threads, now) * rng.uniform(0.95, 1.05)
        if rng.random() < 0.02:
            took *= rng.uniform(1.0, 10.0)
        now += took
        done += 1
    return done / now


def idle(threads: int, now: float) -> float:
    return 0.1 / threads


def beside_one(threads: int, now: float) -> float:
    """Two cores, one busy: two threads wait for the one that has to share."""
    return 0.19 if threads == 2 else 0.106


def of_eight(threads: int, now: float) -> float:
    """Eight cores, two busy."""
    return (0.1 / threads) * (1.9 if threads > 6 else 1.0)


def mean(speed: Callable[[int], float]) -> float:
    return sum(speed(seed) for seed in range(6)) / 6


@pytest.mark.parametrize("rows", [(1,), (1, 2, 4)])
@pytest.mark.parametrize("most", [2, 8])
def test_an_idle_machine_loses_two_hundredths_at_most(most: int, rows: tuple[int, ...]) -> None:
    ours = mean(lambda seed: run(idle, most, 60.0, seed, rows))
    assert ours > 0.98 * mean(lambda seed: fixed(idle, most, 60.0, seed))


@pytest.mark.parametrize("rows", [(1,), (1, 2, 4)])
@pytest.mark.parametrize(("machine", "most", "best"), [(beside_one, 2, 1), (of_eight, 8, 6)])
def test_beside_a_busy_core_the_best_count_is_found(
    machine: Machine, most: int, best: int, rows: tuple[int, ...]
) -> None:
    ours = mean(lambda seed: run(machine, most, 240.0, seed, rows))
    assert ours > 0.95 * mean(lambda seed: fixed(machine, best, 60.0, seed))


def test_a_neighbour_that_comes_and_goes_is_followed() -> None:
    def machine(threads: int, now: float) -> float:
        return (beside_one if now // 60.0 % 2 else idle)(threads, now)

    best = (fixed(idle, 2, 60.0) + fixed(beside_one, 1, 60.0)) / 2
    assert run(machine, 2, 240.0) > 0.85 * best
    assert run(machine, 2, 240.0) > 1.05 * fixed(machine, 2, 240.0)


def at_times_beside_one(threads: int, now: float) -> float:
    """Three tenths of a second in three, somebody else takes a core."""
    busy = threads == 2 and now % 3.0 > 2.7
    return (0.03 if threads == 2 else 0.045) * (8.0 if busy else 1.0)


def test_a_short_reply_beside_short_disturbances_is_as_fast_as_all_threads() -> None:
    def speed(seed: int, most: int | None) -> float:
        start = seed * 0.37
        machine: Machine = lambda threads, now: at_times_beside_one(threads, start + now)  # noqa: E731
        if most is None:
            return fixed(machine, 2, 2.0, seed)
        return run(machine, most, 2.0, seed)

    seeds = range(60)
    ours, all_threads = sum(speed(s, 2) for s in seeds), sum(speed(s, None) for s in seeds)
    assert ours > 0.98 * all_threads


def test_what_a_try_found_is_told_and_begun_with() -> None:
    told: list[int] = []
    choice = ThreadChoice(2, found=told.append)
    assert (choice.count, choice.choose(1)) == (2, 2), "nothing is measured before the first pass"
    for _ in range(12):
        choice.took(1, 0.19 if choice.choose(1) == 2 else 0.106)
    assert set(told) == {1}
    again = ThreadChoice(2, count=told[-1])
    assert again.choose(1) == 1
    for _ in range(200):  # nobody is busy any more
        again.took(1, 0.05 if again.choose(1) == 2 else 0.1)
    assert again.count == 2


@pytest.mark.parametrize("kept", [0, 2])
def test_all_threads_are_kept_where_fewer_lose(kept: int) -> None:
    told: list[int] = []
    choice, ones = ThreadChoice(2, kept, told.append), 0
    for _ in range(40):
        ones += choice.choose(1) == 1
        choice.took(1, 0.05 if choice.choose(1) == 2 else 0.1)
    assert ones == (0 if kept else 2), "first tries on a machine come at once, others are paid for"
    assert set(told) == (set() if kept else {2})


def test_one_slow_pass_changes_nothing() -> None:
    choice = ThreadChoice(2)
    for i in range(60):
        threads = choice.choose(1)
        choice.took(1, 0.3 if i == 0 else 0.03 if threads == 2 else 0.045)
        assert choice.count == 2


def test_a_try_does_not_wait_for_passes_that_no_longer_come() -> None:
    choice = ThreadChoice(2)
    for _ in range(8):
        choice.took(1, 0.030 if choice.choose(1) == 2 else 0.031)
    while choice.choose(15) == 2:  # prompts of fifteen tokens, each in one pass
        choice.took(15, 0.3)
    choice.took(15, 0.3)
    for _ in range(30):
        choice.took(1, 0.19 if choice.choose(1) == 2 else 0.045)
    assert choice.count == 1


def test_a_single_thread_has_no_choice() -> None:
    choice = ThreadChoice(1)
    for _ in range(1000):
        assert choice.choose(1) == 1
        choice.took(1, 0.1)


def test_counts_worth_trying() -> None:
    assert ladder(1) == (1,)
    assert ladder(2) == (2, 1)
    assert ladder(8) == (8, 7, 6, 4, 3, 2, 1)
    assert ladder(64)[:4] == (64, 63, 62, 46)


# -- physical cores on systems that are not here --


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

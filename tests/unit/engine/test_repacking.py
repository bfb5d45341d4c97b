"""Which layout of the weights is loaded: the exact one, else the faster one; measured once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specllama.engine import repacking
from specllama.engine.repacking import Speed
from specllama.events import Event
from specllama.settings.params import EngineOptions

SLOW, FAST = Speed(100, 10, 12), Speed(200, 10, 12)


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found = {"file": "f", "build": "b", "machine": "m"}
    monkeypatch.setattr(repacking.verdicts, "circumstances", lambda header: dict(found))
    monkeypatch.setattr(repacking, "repacked_bytes", lambda header: header.repacked)
    return found


def pair(*, repacked: int = 1 << 30, on_gpu: bool = False, **options: Any) -> Any:
    header = SimpleNamespace(repacked=repacked, path=Path("model.gguf"))
    return SimpleNamespace(target=header, on_gpu=on_gpu, options=EngineOptions(**options))


def both(repack: bool) -> bool:
    return True


def neither(repack: bool) -> bool:
    return False


class Measure:
    def __init__(self, stored: Speed, repacked: Speed) -> None:
        self.speeds = {False: stored, True: repacked}
        self.calls: list[bool] = []

    def __call__(self, repack: bool) -> Speed:
        self.calls.append(repack)
        return self.speeds[repack]


def test_the_faster_layout_is_taken_and_kept() -> None:
    said: list[Event] = []
    measure = Measure(stored=FAST, repacked=SLOW)
    assert not repacking.repacks(pair(), measure, both, said.append)
    assert len(said) == 1
    assert sorted(measure.calls) == [False, True]
    # a later day would measure something else: the text must not change with it
    later = Measure(stored=SLOW, repacked=FAST)
    assert not repacking.repacks(pair(), later, both, said.append)
    assert not later.calls
    assert repacking.line(pair()).startswith("as stored: repacked, 100 tok/s are read")


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("faster", [True, False])
def test_the_one_exact_layout_is_taken_whatever_it_costs(exact: bool, faster: bool) -> None:
    measure = Measure(*((FAST, SLOW) if exact is not faster else (SLOW, FAST)))
    assert repacking.repacks(pair(), measure, exact.__eq__, None) is exact
    told = repacking.line(pair())
    assert ("the layout in which passes are bitwise" in told) is not faster


def test_where_neither_is_exact_the_faster_one_is_taken() -> None:
    assert not repacking.repacks(pair(), Measure(stored=FAST, repacked=SLOW), neither, None)
    assert "bitwise" not in repacking.line(pair())


def test_a_layout_that_will_not_be_taken_is_not_compared() -> None:
    asked: list[bool] = []

    def bitwise(repack: bool) -> bool:
        asked.append(repack)
        return True

    repacking.repacks(pair(), Measure(stored=FAST, repacked=SLOW), bitwise, None)
    assert asked == [False]


def test_another_build_or_thread_count_is_measured_anew(file: dict[str, Any]) -> None:
    assert not repacking.repacks(pair(threads=2), Measure(FAST, SLOW), both, None)
    assert repacking.repacks(pair(threads=3), Measure(SLOW, FAST), both, None)
    file["build"] = "another"
    assert repacking.repacks(pair(threads=2), Measure(SLOW, FAST), both, None)


def test_where_both_are_alike_llama_cpps_own_stays() -> None:
    assert repacking.repacks(pair(), Measure(Speed(101, 10, 10), Speed(100, 10, 10)), both, None)


def test_a_turn_reads_and_writes() -> None:
    assert Speed(100, 10, 5).turn_s == pytest.approx(1000 / 100 + 200 / 10)
    assert Speed(100, 10, 20).turn_s == pytest.approx(1000 / 100 + 200 / 20)
    writes_slower = Speed(210, 40, 40)  # of Q4_K_M as stored, beside 142 and 50 repacked
    assert writes_slower.turn_s < Speed(142, 50, 50).turn_s


@pytest.mark.parametrize(
    "one",
    [pair(repacked=0), pair(repacked=1 << 20), pair(on_gpu=True)],
    ids=["none", "small", "gpu"],
)
def test_nothing_is_measured_where_nothing_can_be_gained(one: Any) -> None:
    measure = Measure(FAST, SLOW)
    assert repacking.repacks(one, measure, both, None)
    assert not measure.calls
    assert "gain nothing" in repacking.line(one)


@pytest.mark.parametrize(("wish", "repack"), [("on", True), ("off", False)])
def test_a_wish_is_followed_without_measuring(wish: str, repack: bool) -> None:
    measure = Measure(FAST, SLOW)
    assert repacking.repacks(pair(repack=wish), measure, both, None) is repack
    assert not measure.calls
    assert repacking.line(pair(repack=wish))


def test_what_was_not_measured_yet_is_said() -> None:
    assert "when the model is first loaded" in repacking.line(pair())

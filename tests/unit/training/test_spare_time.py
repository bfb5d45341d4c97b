"""When a training that waits for spare time may go on."""

import os
from pathlib import Path

import pytest

from specllama.backend import cores
from specllama.training import spare_time
from specllama.training.spare_time import LOOK_S, QUIET_S, SpareTime


class Machine:
    """A machine whose clock and load are set; ``share``: of a processor that others use."""

    def __init__(self) -> None:
        self.now, self.share, self.used, self.battery, self.crowded = 0.0, 0.0, 0.0, False, False
        self.told = True

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.used += self.share * seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    one = Machine()
    monkeypatch.setattr(spare_time.time, "monotonic", lambda: one.now)
    monkeypatch.setattr(cores, "used_by_others", lambda: one.used if one.told else None)
    monkeypatch.setattr(spare_time, "on_battery", lambda: one.battery)
    monkeypatch.setattr(cores, "crowded", lambda: one.crowded)
    return one


def test_it_waits_while_others_compute_and_goes_on_when_it_was_quiet(machine: Machine) -> None:
    spare = SpareTime()
    machine.share = 0.2
    machine.after(LOOK_S)
    assert spare() == ""
    machine.share = 1.5
    machine.after(LOOK_S / 2)
    assert spare() == ""  # too soon to tell
    machine.after(LOOK_S)
    assert spare() == "the machine is busy"
    machine.share = 0.0
    waited = 0.0
    while spare():
        machine.after(LOOK_S)
        waited += LOOK_S
    assert QUIET_S <= waited <= QUIET_S + 2 * LOOK_S


def test_it_waits_on_battery(machine: Machine) -> None:
    spare = SpareTime()
    machine.battery = True
    machine.after(LOOK_S)
    assert spare() == "on battery"
    machine.battery = False
    machine.after(LOOK_S)
    assert spare() == "on battery"  # a cable that was touched
    machine.after(QUIET_S)
    assert spare() == ""


def test_without_numbers_of_the_system_a_crowd_is_a_reason(machine: Machine) -> None:
    machine.told = False
    spare = SpareTime()
    machine.after(LOOK_S)
    assert spare() == ""
    machine.crowded = True
    machine.after(LOOK_S)
    assert spare() == "the machine is busy"


def test_ones_own_work_is_not_that_of_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  500 200 300 9999 0 0 0 0 0 0\n")
    monkeypatch.setattr(cores, "_STAT", stat)
    own, ticks = os.times(), os.sysconf("SC_CLK_TCK")
    wanted = 1000 / ticks - own.user - own.system
    assert cores.used_by_others() == pytest.approx(wanted, abs=0.5)
    for content in ("", "cpu\n", "cpu a b c d\n"):
        stat.write_text(content)
        assert cores.used_by_others() is None
    stat.unlink()
    assert cores.used_by_others() is None

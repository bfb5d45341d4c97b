"""A course of training over fake work, whose time is told."""

from collections.abc import Callable
from pathlib import Path

import pytest
from training_fakes import Clock, FakeWork

from specllama.training.course import (
    FIRST_S,
    LONGEST_S,
    SAVE_S,
    Course,
    cycle_s,
)
from specllama.training.training_card import NAME, TrainingCard, beside, read_training_card


class Told:
    """A course in a folder, and what it told."""

    def __init__(self, folder: Path, seconds: float, *, best: float = 2.0) -> None:
        self.clock, self.folder = Clock(), folder
        self.work = FakeWork(self.clock.pass_by, best=best)
        self.card = read_training_card(folder / NAME) or TrainingCard("t.gguf", "abc")
        self.out, self.news = folder / "eagle3-t.gguf", list[str]()
        self.stop_at: Callable[[], bool] = lambda: False
        self.course = Course(
            self.work,
            folder,
            self.card,
            self.out,
            seconds,
            stopped=lambda: self.stop_at(),
            tell=lambda news, course: self.news.append(news),
            clock=self.clock,
        )


def test_each_cycle_is_as_long_as_all_before_it() -> None:
    spent, cycles = 0.0, []
    while (left := 3600 - spent) > 0:
        cycles.append(cycle_s(spent, left))
        spent += cycles[-1]
    assert cycles == [FIRST_S, 60, 120, 240, 480, 960, 1680]
    assert cycle_s(1e6, 1e6) == LONGEST_S


@pytest.mark.parametrize(
    ("trained", "share"), [(0, 1 / 6), (500, 0.5), (250, 1 / 3), (10, 1 / 6), (9000, 2 / 3)]
)
def test_writing_takes_so_long_that_each_text_is_learned_from_five_times(
    tmp_path: Path, trained: int, share: float
) -> None:
    """Of tokens a second, where a hundred are written."""
    course = Told(tmp_path, 600).course
    assert course.writing_share == 1 / 3
    course.card.written, course.card.seconds["write"] = 1000, 10.0
    course.card.trained, course.card.seconds["train"] = 20 * trained, 20.0
    assert course.writing_share == pytest.approx(share)


def test_an_outlook_is_bounded_by_the_disk(tmp_path: Path) -> None:
    told = Told(tmp_path, 300)
    told.course.measure()
    (write_s, written, disk), there = told.course.outlook(10**7), told.work.written
    assert (write_s, disk) == (pytest.approx(200), 10**7)
    assert written == pytest.approx(there + 200 * 100, rel=0.02)
    assert told.course.outlook(10**9)[2] == 5000 * written


def test_it_ends_in_time_with_the_best_head(tmp_path: Path) -> None:
    told = Told(tmp_path, 600)
    told.course.measure()
    assert told.course.run() == "time"
    assert 590 < told.course.done_s < 602
    assert told.work.exported == sorted(told.work.exported)
    assert told.card.best is not None
    assert told.work.exported[-1] == told.card.best.per_pass > 1.5
    assert told.out.exists()
    assert beside(told.out).exists()
    # as much as a cycle may write: the fake learns fast
    assert told.card.seconds["write"] / 600 == pytest.approx(2 / 3, abs=0.02)
    assert told.news.count("began") == len(told.work.called)


def test_a_worse_head_is_not_written(tmp_path: Path) -> None:
    told = Told(tmp_path, 300)
    told.course.measure()
    told.course.run()
    n, told.work.best = len(told.work.exported), 1.1
    told.course.seconds = 400
    told.course.run()
    assert len(told.work.exported) == n
    assert told.card.latest is not None
    assert told.card.best is not None
    assert told.card.latest.per_pass < told.card.best.per_pass


def test_it_ends_by_itself_where_nothing_is_gained(tmp_path: Path) -> None:
    told = Told(tmp_path, 36_000)
    told.course.measure()
    assert told.course.run() == "gain"
    assert 900 < told.course.done_s < 18_000


def test_a_head_that_is_not_there_yet_does_not_end_it(tmp_path: Path) -> None:
    told = Told(tmp_path, 9000)
    told.work.train = lambda over, report, ahead: told.clock.pass_by(60)  # type: ignore[method-assign]
    told.course.measure()
    assert told.course.run() == "time"
    assert told.card.best is None


def test_a_stop_is_heard_in_every_phase(tmp_path: Path) -> None:
    for phase in ("write", "train"):
        told = Told(tmp_path / phase, 600)
        told.folder.mkdir()
        told.course.measure()
        asked = told.work.spent[phase] + 5

        told.stop_at = lambda told=told, asked=asked, phase=phase: (  # type: ignore[misc]
            told.work.spent[phase] > asked
        )
        assert told.course.run() == "stopped"
        assert told.work.spent[phase] - asked < 0.2


def test_it_waits_while_there_is_a_reason_and_that_time_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specllama.training.course.WAIT_S", 0.0)
    told, seen, steps = Told(tmp_path, 300), list[str](), 0

    def rest() -> str:
        nonlocal steps
        steps += 1
        if steps % 500 < 490:
            return ""
        told.clock.pass_by(100)
        kept = read_training_card(tmp_path / NAME)
        seen.append("" if kept is None else kept.doing)
        return "on battery"

    told.course.rest = rest
    told.course.measure()
    began = told.clock.now - told.course.done_s
    assert told.course.run() == "time"
    assert 290 < told.course.done_s < 302
    assert told.clock.now - began > 1500
    assert set(seen[1:]) == {"paused: on battery", told.card.doing, "writing"}
    assert seen.count("paused: on battery") > 0.8 * len(seen)
    assert told.card.doing == "training"


def test_a_stop_is_heard_in_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specllama.training.course.WAIT_S", 0.0)
    told, waits = Told(tmp_path, 300), 0

    def rest() -> str:
        nonlocal waits
        waits += 1
        return "the machine is busy"

    told.course.rest, told.stop_at = rest, lambda: waits > 20
    assert told.course.run() == "stopped"
    assert told.course.done_s < 1


def test_a_phase_that_fails_leaves_its_card(tmp_path: Path) -> None:
    told = Told(tmp_path, 600)
    told.course.measure()
    spent = told.card.spent_s

    def fails(seconds: float) -> None:
        told.clock.pass_by(seconds)
        if told.work.spent["write"] > 30:
            raise OSError("the disk is full")

    told.work._pass_by = fails
    with pytest.raises(OSError, match="full"):
        told.course.run()
    kept = read_training_card(tmp_path / NAME)
    assert kept is not None
    assert kept.spent_s > spent


def test_the_card_is_never_old(tmp_path: Path) -> None:
    told = Told(tmp_path, 600)
    told.course.measure()
    told.course.run()
    ages = []

    def looks(seconds: float) -> None:
        told.clock.pass_by(seconds)
        kept = read_training_card(tmp_path / NAME)
        assert kept is not None
        ages.append(told.card.spent_s - kept.spent_s)

    told.work._pass_by = looks
    told.course.seconds = 900
    told.course.run()
    assert 1 < max(ages) <= SAVE_S + 1


def test_what_lost_its_features_is_read_again(tmp_path: Path) -> None:
    told = Told(tmp_path, 300)
    told.course.measure()
    told.work.unread = 50
    told.course.run()
    assert told.work.called.count("read") == 1
    assert told.work.unread == 0


def test_a_training_goes_on(tmp_path: Path) -> None:
    first = Told(tmp_path, 300)
    first.course.measure()
    first.course.run()
    again = Told(tmp_path, 300)
    again.work.written, again.work.trained = first.work.written, first.work.trained
    again.course.measure()
    assert again.work.called == []  # the paces are known
    again.course.run()
    assert 590 < again.card.spent_s < 605
    assert again.card.best is not None
    assert first.card.best is not None
    assert again.card.best.per_pass > first.card.best.per_pass


def test_a_card_from_before_the_first_step_is_read(tmp_path: Path) -> None:
    told = Told(tmp_path, 600)
    told.work.train = lambda over, report, ahead: report(told.work.figures())  # type: ignore[method-assign]
    told.course.measure()
    assert told.card.best is not None
    assert told.card.best.loss is None
    assert read_training_card(tmp_path / NAME) == told.card


def test_a_damaged_card_is_none(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"target": 3')
    assert read_training_card(tmp_path / NAME) is None
    assert read_training_card(tmp_path / "nowhere") is None

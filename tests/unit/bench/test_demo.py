"""The pair that drafting pays for: what there is room for, what is left of it, how it is raced."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import Reply, ScriptedEngine

from specllama.bench import scaled_pair
from specllama.bench.outcome import RaceBoard, SpeedModel
from specllama.cancel import Cancel
from specllama.errors import SpecllamaError
from specllama.models import memory
from specllama.models.scale import DRAFT_PRESETS, PRESETS


def room(monkeypatch: pytest.MonkeyPatch, disk: float, ram: float) -> None:
    monkeypatch.setattr(
        scaled_pair.shutil, "disk_usage", lambda where: SimpleNamespace(free=int(disk))
    )
    monkeypatch.setattr(memory, "available_memory", lambda: int(ram))


@pytest.mark.parametrize(
    ("disk", "ram", "names"),
    [
        (80e9, 20e9, ["Q8_0", "BF16", "Q4_0"]),
        (80e9, 0, ["Q8_0", "BF16", "Q4_0"]),  # the system does not say
        (2e9, 20e9, ["Q8_0", "Q4_0"]),
        (80e9, 2.6e9, ["BF16", "Q4_0"]),
        (1.2e9, 20e9, ["Q4_0"]),
    ],
)
def test_what_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, disk: float, ram: float, names: list[str]
) -> None:
    room(monkeypatch, disk, ram)
    assert [kind.name for kind in scaled_pair.affordable()] == names


@pytest.mark.parametrize(("disk", "ram"), [(1e9, 20e9), (80e9, 1e9)])
def test_no_room_at_all_is_said_with_what_is_free(
    monkeypatch: pytest.MonkeyPatch, disk: float, ram: float
) -> None:
    room(monkeypatch, disk, ram)
    with pytest.raises(SpecllamaError, match="GB of memory are free") as caught:
        scaled_pair.affordable()
    assert "specllama demo" in (caught.value.hint or "")


def test_sizes_are_those_that_are_written() -> None:
    target, draft = (
        PRESETS[scaled_pair.TARGET].parameters,
        DRAFT_PRESETS[scaled_pair.DRAFT].parameters,
    )
    for kind in scaled_pair.KINDS:
        bits = {"BF16": 16, "Q8_0": 8.5, "Q4_0": 4.6}[kind.name]
        written = (target * bits + draft * 8.5) / 8
        assert kind.bytes == pytest.approx(written, rel=0.03)


def test_nothing_is_left_however_it_ends() -> None:
    for how in (None, KeyboardInterrupt, SpecllamaError):
        try:
            with scaled_pair.workshop() as own:
                (own / "target.gguf").write_bytes(b"weights")
                if how is not None:
                    raise how("ended")
        except (KeyboardInterrupt, SpecllamaError):
            pass
        assert not own.exists()


def test_what_was_killed_is_cleared_away_next_time_and_what_is_going_on_is_not() -> None:
    killed = scaled_pair.folder() / "killed"
    killed.mkdir(parents=True)
    (killed / "target.gguf").write_bytes(b"weights")
    with scaled_pair.workshop():
        assert not killed.exists()
    with scaled_pair.workshop() as going_on, scaled_pair.workshop():
        assert going_on.exists()
    assert not going_on.exists()


def test_the_files_are_made_of_the_bundled_pair(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}

    def scale_pair(target: Path, draft: Path, out: Path, **more: Any) -> tuple[Path, Path]:
        asked.update(more, names=(target.name, draft.name), out=out)
        return out / "t", out / "d"

    monkeypatch.setattr("specllama.models.scale.scale_pair", scale_pair)
    assert scaled_pair.make(scaled_pair.KINDS[0], tmp_path) == (tmp_path / "t", tmp_path / "d")
    assert asked["names"] == ("tiny-target-q4_0.gguf", "tiny-draft-q8_0.gguf")
    assert (asked["to"], asked["draft_to"], asked["kind"]) == ("1b", "20m", "Q8_0")


def test_it_is_raced_in_pairs_of_several_prompts_until_it_is_sure() -> None:
    engine, board, told = ScriptedEngine([Reply("one two three " * 20)] * 40), RaceBoard(), []
    way = scaled_pair.race(engine, board, Cancel(), told.append)
    assert way is not None
    assert [one.pairs for one in told] == list(range(1, way.pairs + 1))
    assert scaled_pair.LEAST <= way.pairs <= scaled_pair.MOST
    runs = board.runs["race"]
    assert len({str(run.prompt) for run in runs}) >= scaled_pair.LEAST
    first = {run.lap: run.name for run in reversed(runs)}
    assert {first[0], first[1]} == {"plain", "drafted"}  # they take turns at being first
    assert way.same == way.of
    report = scaled_pair.report("a pair", way, "because", "Q8_0", 1)
    assert report["answer"] in ("YES", "NO", "CANNOT TELL YET")


def test_time_ends_it_after_the_least_pairs() -> None:
    engine = ScriptedEngine([Reply("one two three " * 20)] * 40)
    way = scaled_pair.race(engine, RaceBoard(), Cancel(), seconds=0.0)
    assert way is not None
    assert way.pairs == scaled_pair.LEAST


def test_a_race_that_is_stopped_at_once_has_no_result() -> None:
    cancel = Cancel()
    cancel.set()
    assert scaled_pair.race(ScriptedEngine([Reply()] * 9), RaceBoard(), cancel) is None


def test_the_next_kind_is_tried_where_a_guess_would_cost_too_much() -> None:
    assert scaled_pair.promises(SpeedModel(alpha=0.8, c=0.05, beta=0.2))
    assert not scaled_pair.promises(SpeedModel(alpha=0.8, c=0.4, beta=0.6))
    assert not scaled_pair.promises(None)

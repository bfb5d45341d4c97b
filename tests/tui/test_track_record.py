"""The figures on the page of methods come from this machine's logs of this very pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Recipe
from fakes import DRAFT_MS, OTHER_MS, VERIFY_MS, Reply, ScriptedEngine, engine_info, model_info

from specllama.interface import EngineInfo, Message
from specllama.params import GenerateParams
from specllama.paths import rounds_dir
from specllama.store.rounds import RoundLog, logged
from specllama.tui.screens.methods import MethodsScreen
from specllama.tui.track_record import Achieved, TrackRecord, track_record

LONG = " ".join(f"word{i}" for i in range(150))
PLAIN_MS = VERIFY_MS + OTHER_MS


def log(info: EngineInfo, reply: Reply, **changes: Any) -> None:
    """One logged reply of a pair."""
    params = GenerateParams(seed=1, draft_max=4).replace(**changes)
    engine = ScriptedEngine([reply], info)
    writer = RoundLog.open(info, params)
    for _ in logged(engine.generate([Message("user", "Hi")], params), writer):
        pass
    writer.close()


def test_speed_and_length_follow_from_the_logged_rounds() -> None:
    info = engine_info()
    log(info, Reply(LONG), speculate=False)
    log(info, Reply(LONG, accept=(2,)), proposer="draft")
    log(info, Reply(LONG, accept=(2,)), proposer="draft")
    record = track_record(info)
    assert set(record.plain_ms) == {PLAIN_MS}
    drafted = record.by_method["draft"]
    assert drafted.replies == 2
    # Three tokens a round, all rounds but the last few of a reply alike.
    assert drafted.acceptance_length == pytest.approx(3.0, abs=0.1)
    speed = drafted.speedup(record.plain_ms)
    assert speed is not None
    assert speed.ratio == pytest.approx(3 * PLAIN_MS / (PLAIN_MS + DRAFT_MS), rel=0.05)
    assert record.words("draft").startswith(f"{speed.ratio:.2f}× plain, ")
    assert "tokens per drafted round (2 replies)" in record.words("draft")
    assert record.words("none") == f"{1000 / PLAIN_MS:.0f} tok/s (1 reply)"
    assert record.words("ngram") == ""


@pytest.mark.parametrize(
    "other",
    [
        {"target": model_info("target", file_bytes=1)},
        {"draft": None},
        {"device": "GPU"},
        {"threads": 7},
    ],
    ids=["target", "draft", "device", "threads"],
)
def test_logs_of_something_else_do_not_count(other: dict[str, Any]) -> None:
    log(engine_info(**other), Reply(LONG), proposer="draft")
    assert track_record(engine_info()).by_method == {}
    assert track_record(engine_info(**other)).by_method.keys() == {"draft"}


def test_without_plain_steps_there_is_no_speed_and_a_few_rounds_are_no_figure() -> None:
    info = engine_info()
    log(info, Reply(LONG, accept=(2,)), proposer="draft")
    log(info, Reply("Two words.", accept=(1,)), proposer="ngram")
    record = track_record(info)
    assert record.by_method["draft"].speedup([]) is None
    assert record.by_method["ngram"].speedup([PLAIN_MS] * 9) is None
    assert "plain" not in record.words("draft")
    assert "tokens per drafted round" in record.words("draft")
    assert record.words("ngram") == ""


def test_a_speed_up_that_is_not_sure_is_an_interval() -> None:
    steps = [20.0, 20.0, 20.0, 100.0] * 8
    unsure = Achieved(3, 32, 0, [(1, ms) for ms in steps], [])
    sure = Achieved(3, 32, 32, [(2, 20.0)] * 32, [])
    record = TrackRecord({"draft": unsure, "ngram": sure, "none": Achieved(1, plain_ms=steps)})
    low, _, high = record.words("draft").partition(" to ")
    assert float(low.rstrip("×")) < 1 < float(high.partition("×")[0])
    assert record.words("ngram").startswith("4.00× plain")


def test_damaged_logs_are_passed_over(tmp_path: Path) -> None:
    info = engine_info()
    assert track_record(info, tmp_path / "absent").by_method == {}
    log(info, Reply(LONG), proposer="draft")
    (rounds_dir() / "20990101-000000-abcdef.jsonl").write_bytes(b"\x00\xff{not json\n")
    (rounds_dir() / "20990101-000001-abcdef.jsonl").mkdir()
    assert track_record(info).by_method.keys() == {"draft"}


async def test_the_page_shows_what_was_measured_and_what_was_not(start: Any) -> None:
    engine = ScriptedEngine([Reply(LONG, accept=(2,))])
    params = GenerateParams(seed=1, draft_max=4, proposer="draft")
    async with start(recipe=Recipe(engine), params=params) as d:
        await d.say("q")
        await d.pilot.press("f5")
        await d.until(lambda: isinstance(d.app.screen, MethodsScreen))
        await d.until(lambda: "here: 3.0 tokens per drafted round (1 reply)" in d.shown)
        assert "not measured here yet" in d.shown

"""The figures on the page of methods come from this machine's logs of this very pair."""

from pathlib import Path
from typing import Any

import pytest
from app_driver import Recipe
from fakes import DRAFT_MS, OTHER_MS, VERIFY_MS, Reply, ScriptedEngine, engine_info, model_info

from specllama.bench import outcome
from specllama.interface import EngineInfo, Message
from specllama.paths import rounds_dir
from specllama.settings.params import GenerateParams
from specllama.store.rounds import Logged
from specllama.tui.screens.race_screen import RaceScreen
from specllama.tui.widgets.race_tables import raced, track_record
from specllama.verdict import words

LONG = " ".join(f"word{i}" for i in range(150))
PLAIN_MS = VERIFY_MS + OTHER_MS


def log(info: EngineInfo, reply: Reply, command: str = "chat", **changes: Any) -> None:
    """One logged reply of a pair."""
    params = GenerateParams(seed=1, draft_max=4).replace(**changes)
    logged = Logged(ScriptedEngine([reply], info), command=command)
    for _ in logged.generate([Message("user", "Hi")], params):
        pass
    logged.close()


def test_speed_and_length_follow_from_the_logged_rounds() -> None:
    info = engine_info()
    log(info, Reply(LONG), speculate=False)
    log(info, Reply(LONG, accept=(2,)), proposer="draft")
    log(info, Reply(LONG, accept=(2,)), proposer="draft")
    record = track_record(info)
    assert set(record.plain_ms) == {PLAIN_MS}
    assert record.by_method["draft"].replies == 2
    verdict = record.verdict("draft")
    # Three tokens a round, all rounds but the last few of a reply alike.
    assert verdict.ratio == pytest.approx(3 * PLAIN_MS / (PLAIN_MS + DRAFT_MS), rel=0.05)
    assert record.words("draft") == f"{words(verdict, '')} (2 replies)"
    assert record.words("none") == f"{1000 / PLAIN_MS:.0f} tok/s (1 reply)"
    assert record.words("ngram") == ""


def test_runs_of_races_are_no_replies() -> None:
    info = engine_info()
    log(info, Reply(LONG), speculate=False)
    for command in ("tui", "race", "race"):
        log(info, Reply(LONG, accept=(2,)), command, proposer="draft")
    achieved = track_record(info).by_method["draft"]
    assert (achieved.replies, achieved.raced) == (1, 2)
    assert track_record(info).words("draft").endswith("(1 reply, 2 raced runs)")


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


def test_plain_replies_are_the_measure_where_the_engine_had_none() -> None:
    info = engine_info()
    log(info, Reply(LONG, accept=(2,), plain_ms=None), proposer="draft")
    assert track_record(info).words("draft").startswith("Not known yet: too few rounds")
    log(info, Reply(LONG), speculate=False)
    found = track_record(info).verdict("draft")
    assert found.ratio == pytest.approx(3 * PLAIN_MS / (PLAIN_MS + DRAFT_MS), rel=0.05)


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
        await d.press("f5", until=lambda: isinstance(d.app.screen, RaceScreen))
        await d.until(lambda: "here: 2." in d.shown)
        assert "not measured here yet" in d.shown


async def test_the_page_shows_what_was_raced_a_moment_ago(start: Any) -> None:
    async with start(Reply(LONG, accept=(2,)), size=(120, 40)) as d:
        await d.press("f4", until=lambda: isinstance(d.app.screen, RaceScreen))
        await d.until(lambda: outcome.ways(d.app.chat.board, "race") and not d.app.screen._raced)
        await d.press("escape", until=lambda: d.app.screen is d.app.chat)
        way = outcome.ways(d.app.chat.board, "race")[0]
        method = way.run.params.proposer
        found = raced(d.app.chat.board)
        assert found[method] == (outcome.way_words(way), way.verdict.answer)
        assert found["none"][0] == f"raced: {way.plain:.0f} tok/s"
        await d.press("f5", until=lambda: isinstance(d.app.screen, RaceScreen))
        await d.until(lambda: found["none"][0] in d.shown)


async def test_the_page_is_wrapped_anew_in_other_columns(start: Any) -> None:
    async with start("Ok.", size=(60, 40)) as d:
        await d.press("f5", until=lambda: isinstance(d.app.screen, RaceScreen))
        whole = "itself, else the draft model."
        await d.until(lambda: "Automatic" in d.shown)
        lines = [line for line in d.shown.split("\n") if whole in line]
        await d.pilot.resize_terminal(140, 40)
        await d.until(lambda: any("What suits" in x and whole in x for x in d.shown.split("\n")))
        assert not any("What suits" in line for line in lines)

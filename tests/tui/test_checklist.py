"""The list of what to check before drafting is trusted."""

from __future__ import annotations

from typing import Any

import pytest
from app_driver import Driver
from fakes import Reply, engine_info
from textual.content import Content

from specllama.models import memory
from specllama.paths import checks_file
from specllama.settings.params import GenerateParams
from specllama.store import checks
from specllama.store.checks import Finding, newest
from specllama.tui.checklist import ChecklistLine, checklist, counted, draw, next_tab
from specllama.tui.screens.race import TABS, RaceScreen
from specllama.tui.themes import ASCII, DARK, UNICODE, ink_for

LONG = " ".join(f"word{i}" for i in range(80))
PARAMS = GenerateParams(seed=5, draft_max=4)
INFO = engine_info()
INK = ink_for(DARK)


def lines(*, logging: bool = True) -> dict[str, ChecklistLine]:
    return {line.title: line for line in checklist(INFO, list(TABS), logging=logging)}


def test_what_was_not_checked_names_the_key_and_the_command() -> None:
    found = lines()
    assert found["Same text"].words == "Not yet: press 1, then Enter, or run specllama prove"
    assert found["Draft length"].words == "Not yet: press 2, then Enter, or run specllama tune"
    assert found["Methods"].words == "Not yet: press 3, then Enter"
    assert next_tab(list(found.values())) == "race"
    assert counted(list(found.values())) == "2/7"  # memory and log


def test_what_was_checked_says_by_what_and_when() -> None:
    checks.add(INFO, "prove", {"text": Finding(True, "60 of 60 replies identical")})
    checks.add(INFO, "bench", {"speed": Finding(False, "0.90× (0.88 to 0.93)\x1b[31m")})
    text, speed = lines()["Same text"], lines()["Not slower"]
    assert text.state == "holds"
    assert text.words.startswith("60 of 60 replies identical (prove, today ")
    assert speed.state == "fails"
    assert "\x1b" not in speed.words
    assert next_tab([text, speed]) == ""


def test_damaged_lines_of_kept_checks_are_said() -> None:
    checks.add(INFO, "prove", {"text": Finding(True, "60 of 60 replies identical")})
    assert "Kept checks" not in lines()
    with checks_file().open("ab") as file:
        file.write(b'{"what": "speed", "by": "be\n')
    found = lines()
    assert found["Same text"].state == "holds"
    assert found["Kept checks"].words.startswith(f"1 damaged line in {checks_file()} skipped")


def test_an_upgrade_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checks.add(INFO, "tune", {"length": Finding(True, "k = 4")})
    versions = {"specllama": "0.1.0", "llama-cpp-python": "99.1"}
    monkeypatch.setattr(checks, "package_versions", lambda: versions)
    line = lines()["Draft length"]
    assert line.state == "again"
    assert line.words.startswith("Test again: llama-cpp-python changed from ")
    assert " to 99.1 since today " in line.words
    assert line.words.endswith("; press 2, then Enter")


def test_memory_and_log_are_looked_at_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: int(1e9))
    monkeypatch.setattr(memory, "total_memory", lambda: int(8e9))
    assert lines()["Memory"].words == (
        "1.0 of 8.0 GB free beside the pair, context 2048 of 2048 tokens"
    )
    monkeypatch.setattr(memory, "available_memory", lambda: int(3e8))
    assert lines()["Memory"].state == "fails"
    assert lines(logging=False)["Log"].state == "fails"


@pytest.mark.parametrize("width", [54, 74, 194])
def test_long_words_go_on_below_themselves(width: int) -> None:
    drawn = draw(list(lines().values()), UNICODE, INK, width)
    assert isinstance(drawn, Content)
    rows = drawn.plain.split("\n")
    assert max(map(len, rows[:-1])) <= width
    assert all(row[:3].strip() in ("✓", "✗", "!", "?", "") for row in rows[:-1])
    assert " ".join(drawn.plain.split()).count("then Enter") == 5
    assert drawn.plain.isprintable() or "\n" in drawn.plain
    assert draw(list(lines().values()), ASCII, INK, width).plain.isascii()


async def opened(d: Driver, *keys: str) -> RaceScreen:
    await d.pilot.press("f4")
    await d.until(lambda: isinstance(d.app.screen, RaceScreen))
    screen = d.app.screen
    assert isinstance(screen, RaceScreen)
    await d.until(screen.raced)
    await d.pilot.press(*keys)
    await d.pilot.pause()
    return screen


async def test_a_race_ticks_off_what_it_shows(start: Any) -> None:
    async with start(Reply(LONG, accept=(2,)), size=(120, 36), params=PARAMS) as d:
        screen = await opened(d, "6")
        assert "6 Checks 4/7" in d.shown
        assert "tokens identical (race, today " in d.shown
        assert "Not yet: press 2, then Enter" in d.shown
        await d.pilot.press("enter")  # the next one is made at once
        await d.until(lambda: screen.tab == "sweep" and screen.raced())
        found = newest(d.engine.info)
        assert set(found) == {"text", "speed", "length"}
        assert found["length"].finding.words.startswith("best is k = ")
        for tab, what in (("methods", "methods"), ("slices", "kinds")):
            await d.pilot.press("6", "enter")
            await d.until(lambda tab=tab: screen.tab == tab and screen.raced())
            assert what in newest(d.engine.info)
        await d.pilot.press("6", "enter")
        await d.until(lambda: "Everything holds." in d.shown or "fails in" in d.shown)
        assert "7/7" in d.shown


async def test_a_text_that_differs_is_no_tick(start: Any) -> None:
    async with start(
        Reply(LONG), Reply(LONG), Reply(LONG), Reply("Other words."), params=PARAMS
    ) as d:
        screen = await opened(d)
        assert {line.title: line.state for line in screen.list}["Same text"] == "fails"
        assert "run specllama prove" in newest(d.engine.info)["text"].finding.words


async def test_a_reply_that_is_too_short_says_so(start: Any) -> None:
    async with start("A", params=PARAMS.replace(max_tokens=1), size=(120, 36)) as d:
        screen = await opened(d)
        await d.pilot.pause()
        found = newest(d.engine.info)
        assert found["text"].finding.ok
        assert not found["speed"].finding.known
        assert {line.title: line.state for line in screen.list}["Not slower"] == "open"


async def test_a_rule_that_keeps_only_the_law_proves_no_text(start: Any) -> None:
    async with start(Reply(LONG), params=PARAMS.replace(verify="rejection")) as d:
        await opened(d)
        assert "text" not in newest(d.engine.info)


async def test_what_was_checked_yesterday_stands_in_the_next_app(start: Any) -> None:
    async with start(Reply(LONG), params=PARAMS) as d:
        await opened(d)
    async with start(Reply(LONG), params=PARAMS) as d:
        await d.pilot.press("f4")
        await d.until(lambda: isinstance(d.app.screen, RaceScreen))
        screen = d.app.screen
        assert isinstance(screen, RaceScreen)
        assert counted(screen.list) == "4/7"

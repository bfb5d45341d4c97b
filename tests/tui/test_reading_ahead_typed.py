"""What is typed is told to the engine while it is idle: words, pastes and files, not every key."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from app_driver import Driver, Recipe
from fakes import Reply, ScriptedEngine, engine_info

from specllama.engine.host import InlineHost
from specllama.events import PrefillProgress, Started
from specllama.interface import Message
from specllama.models import power
from specllama.settings.params import GenerateParams
from specllama.tui import idle
from specllama.tui.record import ReadAhead

read: list[Sequence[Message]] = []
STARTED = Started(0, 0, 4096, 0, "none", "match", 0, "")


class Reading(InlineHost):
    def read_ahead(
        self, conversation: Sequence[Message], params: GenerateParams, on_message: Any
    ) -> None:
        read.append(conversation)
        n = len(conversation[-1].content)
        on_message(("events", [replace(STARTED, prompt_n=n, cached_n=max(0, n - 10))]))
        on_message(("events", [PrefillProgress(n, n, max(0, n - 10))]))


@pytest.fixture
def reader(start: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    read.clear()
    monkeypatch.setattr(idle, "PAUSE_S", 3600.0)
    engine = ScriptedEngine([Reply("Yes."), Reply("No.")])
    engine.info = engine_info(reads_ahead=True)
    return lambda **more: start(
        recipe=Recipe(engine), host_class=Reading, **{"read_ahead": "on", **more}
    )


async def keys(d: Driver, text: str) -> None:
    await d.pilot.press(*["space" if c == " " else c for c in text])
    await d.pilot.pause()


def said() -> list[str]:
    return [one[-1].content for one in read]


async def test_words_are_told_and_not_every_key(reader: Any) -> None:
    async with reader() as d:
        await keys(d, "one two thr")
        assert said() == ["one ", "one two "]
        assert [m.role for m in read[-1]] == ["user"]
        await d.pilot.press("enter")
        await d.idle()
        await keys(d, "and ")
        assert [m.role for m in read[-1]] == ["user", "assistant", "user"]


async def test_a_pause_is_told(reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "PAUSE_S", 0.01)
    async with reader() as d:
        await keys(d, "one")
        await d.until(lambda: said()[-1:] == ["one"])


async def test_pastes_and_files_are_told_at_once(
    reader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.md").write_text("words " * 20)
    monkeypatch.chdir(tmp_path)
    async with reader() as d:
        await d.type("x" * 60)
        assert said() == ["x" * 60]
        await d.type("")
        await keys(d, "@a.md")
        assert len(said()) == 1  # its name may go on
        await keys(d, " ")
        assert said()[1].startswith("```a.md\nwords ")


async def test_commands_are_not_told(reader: Any) -> None:
    async with reader() as d:
        await keys(d, "/retry now ")
        assert said() == []


@pytest.mark.parametrize(
    ("when", "battery", "told"),
    [("off", False, False), ("auto", False, True), ("auto", True, False), ("on", True, True)],
)
async def test_when_it_is_read(
    reader: Any, monkeypatch: pytest.MonkeyPatch, when: str, battery: bool, told: bool
) -> None:
    monkeypatch.setattr(idle, "on_battery", lambda: battery)
    async with reader(read_ahead=when) as d:
        await keys(d, "one ")
        assert bool(said()) is told


async def test_what_was_read_in_vain_is_bounded_and_shown(reader: Any) -> None:
    async with reader(size=(140, 40)) as d:
        await d.type("x" * 600)
        ahead = d.app.chat.ahead
        for n in range(40):
            await d.type("ab " * (100 if n % 2 else 1))
        assert ahead.now.in_vain <= ahead.now.stands + 2 * idle.IN_VAIN
        assert len(said()) < 30
        await d.pilot.press("enter")
        await d.idle()
        assert "tokens were read while you typed," in d.shown
        assert " vain" in d.shown


def test_counting() -> None:
    now = ReadAhead()
    now.goes_on(100)
    now.read, now.end = 60, 160
    now.goes_on(150)
    assert (now.stands, now.in_vain) == (50, 10)
    now.goes_on(20)
    assert (now.begin, now.in_vain) == (20, 60)


def test_a_battery_that_is_emptied(tmp_path: Path) -> None:
    def supply(name: str, **told: str) -> None:
        (tmp_path / name).mkdir()
        for key, value in told.items():
            (tmp_path / name / key).write_text(f"{value}\n")

    supply("AC", type="Mains", online="1")
    supply("mouse", type="Battery", scope="Device", status="Discharging")
    supply("BAT0", type="Battery", status="Charging")
    assert not power.discharging(tmp_path)
    supply("BAT1", type="Battery", status="Discharging")
    assert power.discharging(tmp_path)
    assert not power.discharging(tmp_path / "none")

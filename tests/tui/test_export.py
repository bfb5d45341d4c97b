"""Saving what is seen: one key on every screen, files that can be attached to an issue."""

import json
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from app_driver import Driver, Recipe
from fakes import Reply, ScriptedEngine, engine_info, model_info
from textual.widgets import Input, OptionList

from specllama.settings.params import GenerateParams
from specllama.tui.pages import self_contained
from specllama.tui.screens.export_screen import ExportScreen
from specllama.tui.screens.inspector_screen import InspectorScreen
from specllama.tui.screens.race_screen import RaceScreen

LONG = " ".join(f"word{i}" for i in range(80))
EVIL = 'A reply with <script>alert("x")</script> & ``` fences, @someone and | pipes.'
PARAMS = GenerateParams(seed=5, draft_max=4)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    out = tmp_path / "here"
    out.mkdir()
    monkeypatch.chdir(out)
    return out


async def asked(d: Driver) -> ExportScreen:
    await d.press("ctrl+s", until=lambda: isinstance(d.app.screen, ExportScreen))
    await d.pilot.pause()
    screen = d.app.screen
    assert isinstance(screen, ExportScreen)
    return screen


async def save(d: Driver, words: str) -> Path:
    screen = await asked(d)
    await d.pilot.press(*["down"] * next(i for i, row in enumerate(screen.rows) if words in row))
    await d.pilot.pause()
    path = Path(screen.query_one("#save-path", Input).value)
    path = path if path.is_absolute() else path.absolute()
    assert path.name in d.shown  # the name is seen before it is used
    await d.press("enter", until=lambda: not isinstance(d.app.screen, ExportScreen))
    return path


def parsed(path: Path) -> ElementTree.Element:
    text = path.read_text("utf-8")
    assert "@font-face" not in text
    assert "url(" not in text.replace("url(#", "")
    root = ElementTree.fromstring(text.partition("\n")[2] if text.startswith("<!D") else text)
    assert not {node.tag.rpartition("}")[2] for node in root.iter()} & {"script", "img", "a"}
    return root


async def test_a_chat_offers_all_of_it(start: Any, folder: Path) -> None:
    async with start(EVIL, params=PARAMS, size=(120, 36)) as d:
        await d.say("Export me <b>")
        assert "Export" in "".join(parsed(await save(d, "The screen as a picture")).itertext())
        chat = await save(d, "The conversation as Markdown")
        assert chat.name == "export-me-b.md"
        assert EVIL in chat.read_text()
        data = json.loads((await save(d, "The conversation as JSON")).read_text())
        assert data["title"] == "Export me <b>"
        again = await save(d, "The conversation as Markdown")
        assert again.name == "export-me-b-2.md"  # nothing is overwritten
        assert sorted(p.name for p in folder.iterdir()) == [
            "export-me-b-2.md",
            "export-me-b.json",
            "export-me-b.md",
            "specllama-chat.svg",
        ]
        assert str(again) in {note.message for note in d.app._notifications}


async def test_other_pages_are_saved_as_a_picture(start: Any) -> None:
    async with start(Reply(LONG, accept=(2,)), params=PARAMS, size=(120, 36)) as d:
        await d.say("What is it?")
        for key, page in (("f3", InspectorScreen), ("f4", RaceScreen)):
            await d.press(key, until=lambda page=page: isinstance(d.app.screen, page))
            assert list((await asked(d)).rows) == ["The screen as a picture (SVG)"]
            await d.press("escape", until=lambda page=page: isinstance(d.app.screen, page))
            assert parsed(await save(d, "The screen as a picture")) is not None


async def test_an_empty_chat_has_its_screen(start: Any) -> None:
    async with start() as d:
        assert list((await asked(d)).rows) == ["The screen as a picture (SVG)"]
        await d.pilot.press("ctrl+s", "escape")  # the sheet itself is not saved
        await d.until(lambda: not isinstance(d.app.screen, ExportScreen))


async def test_the_place_can_be_chosen(start: Any, folder: Path, tmp_path: Path) -> None:
    async with start("One.", size=(80, 24)) as d:
        await d.say("q")
        screen = await asked(d)
        field, problem = screen.query_one("#save-path", Input), screen.query_one("#save-problem")
        for given, said in (
            ("", "Give the name of a file"),
            (str(tmp_path), "Give the name of a file"),
            (str(tmp_path / "no" / "x.md"), "There is no folder"),
            ("~nobody-of-that-name/x.md", "There is no folder"),
            (str(folder) + "/x\0.md", "It cannot be saved there"),
        ):
            field.value = given
            await d.pilot.press("enter")
            await d.pilot.pause()
            assert said in str(problem.content)
        (folder / "mine.md").write_text("before")
        field.value = str(folder / "mine.md")
        await d.pilot.press("enter")
        await d.pilot.pause()
        assert "Enter again replaces it" in str(problem.content)
        assert (folder / "mine.md").read_text() == "before"
        field.value = str(tmp_path / "a.md")
        await d.pilot.press("down")  # the folder stays, the ending follows
        await d.pilot.pause()
        assert Path(field.value).parent == tmp_path
        assert field.value.endswith(".json")
        field.value = str(folder / "mine.md")
        await d.press("enter", "enter", until=lambda: not isinstance(d.app.screen, ExportScreen))
        assert (folder / "mine.md").read_text() != "before"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes everywhere")
async def test_a_folder_that_cannot_be_written_is_not_proposed(start: Any, folder: Path) -> None:
    folder.chmod(0o500)
    async with start("One.") as d:
        await d.say("q")
        assert "exports" in (await save(d, "Markdown")).parts


async def test_a_folder_that_is_gone_costs_nothing(start: Any, folder: Path) -> None:
    async with start("One.") as d:
        await d.say("q")
        folder.rmdir()
        path = await save(d, "The conversation as Markdown")
        assert path.parent.name == "exports"
        assert path.exists()


async def test_the_slash_command_opens_it(start: Any) -> None:
    async with start("One.") as d:
        await d.say("q")
        await d.send("/export", until=lambda: isinstance(d.app.screen, ExportScreen))
        assert d.app.screen.query_one(OptionList).option_count == 3


async def test_hostile_names_are_nothing_but_text(start: Any) -> None:
    name = "<img src=x>`|@all\x1b[31m"
    target = model_info("target", name=name, path=f"/m/{name}.gguf", quantization="<b>")
    engine = ScriptedEngine([EVIL], info=engine_info(target=target))
    async with start(recipe=Recipe(engine), params=PARAMS, size=(120, 36)) as d:
        await d.say("q")
        parsed(await save(d, "The screen as a picture"))


def test_a_picture_needs_nothing_from_elsewhere() -> None:
    svg = self_contained(
        '<svg xmlns="http://www.w3.org/2000/svg"><style>@font-face { src: url("https://x/y") }\n'
        ".m { font-family: Fira Code, monospace }</style><text>\ufffe</text></svg>"
    )
    assert "https" not in svg
    assert "monospace" in svg
    ElementTree.fromstring(svg)

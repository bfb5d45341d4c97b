"""Saving what is seen: one key on every screen, files that can be attached to an issue."""

import json
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from app_driver import Driver, Recipe
from fakes import Reply, ScriptedEngine, engine_info, model_info

from specllama import paths
from specllama.settings.params import GenerateParams
from specllama.tui.pages import self_contained
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


async def save(d: Driver, folder: Path, how: str = "") -> Path:
    """Save by key, or as the command says; return the new file."""
    before = {*folder.glob("*")}
    if how:
        await d.send(f"/export {how}", until=lambda: {*folder.glob("*")} > before)
    else:
        await d.press("ctrl+s", until=lambda: {*folder.glob("*")} > before)
    (path,) = {*folder.glob("*")} - before
    await d.until(lambda: str(path) in {note.message for note in d.app._notifications})
    return path


def parsed(path: Path) -> ElementTree.Element:
    text = path.read_text("utf-8")
    assert "@font-face" not in text
    assert "url(" not in text.replace("url(#", "")
    root = ElementTree.fromstring(text.partition("\n")[2] if text.startswith("<!D") else text)
    assert not {node.tag.rpartition("}")[2] for node in root.iter()} & {"script", "img", "a"}
    return root


async def test_a_chat_is_saved_whole(start: Any, folder: Path) -> None:
    async with start(EVIL, params=PARAMS, size=(120, 36)) as d:
        await d.say("Export me <b>")
        picture = await save(d, folder, "svg")
        assert "Export" in "".join(parsed(picture).itertext())
        chat = await save(d, folder)
        assert chat.name == "export-me-b.md"
        assert EVIL in chat.read_text()
        assert json.loads((await save(d, folder, "json")).read_text())["title"] == "Export me <b>"
        assert (await save(d, folder, "md")).name == "export-me-b-2.md"  # nothing is overwritten
        assert picture.name == "specllama-chat.svg"


async def test_other_pages_are_saved_as_a_picture(start: Any, folder: Path) -> None:
    async with start(Reply(LONG, accept=(2,)), params=PARAMS, size=(120, 36)) as d:
        await d.say("What is it?")
        for key, page in (("f3", InspectorScreen), ("f4", RaceScreen)):
            await d.press(key, until=lambda page=page: isinstance(d.app.screen, page))
            assert parsed(await save(d, folder)) is not None
        assert {path.name for path in folder.iterdir()} == {
            "specllama-inspector.svg",
            "specllama-race.svg",
        }


async def test_an_empty_chat_has_its_screen(start: Any, folder: Path) -> None:
    async with start() as d:
        assert parsed(await save(d, folder)) is not None


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes everywhere")
async def test_a_folder_that_cannot_be_written_is_not_proposed(start: Any, folder: Path) -> None:
    folder.chmod(0o500)
    async with start("One.") as d:
        await d.say("q")
        exports = paths.data_dir() / "exports"
        assert (await save(d, exports)).suffix == ".md"


async def test_a_folder_that_is_gone_costs_nothing(start: Any, folder: Path) -> None:
    async with start("One.") as d:
        await d.say("q")
        folder.rmdir()
        assert (await save(d, paths.data_dir() / "exports")).suffix == ".md"


async def test_a_disk_that_refuses_is_reported(
    start: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    async with start("One.") as d:
        await d.say("q")
        monkeypatch.setattr("specllama.tui.pages.write_new", full)
        told = "It cannot be saved: No space left on device"
        await d.press("ctrl+s", until=lambda: told in {n.message for n in d.app._notifications})


async def test_hostile_names_are_nothing_but_text(start: Any, folder: Path) -> None:
    name = "<img src=x>`|@all\x1b[31m"
    target = model_info("target", name=name, path=f"/m/{name}.gguf", quantization="<b>")
    engine = ScriptedEngine([EVIL], info=engine_info(target=target))
    async with start(recipe=Recipe(engine), params=PARAMS, size=(120, 36)) as d:
        await d.say("q")
        parsed(await save(d, folder, "svg"))


def test_a_picture_needs_nothing_from_elsewhere() -> None:
    svg = self_contained(
        '<svg xmlns="http://www.w3.org/2000/svg"><style>@font-face { src: url("https://x/y") }\n'
        ".m { font-family: Fira Code, monospace }</style><text>\ufffe</text></svg>"
    )
    assert "https" not in svg
    assert "monospace" in svg
    ElementTree.fromstring(svg)

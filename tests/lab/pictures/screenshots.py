"""Pictures of the app, drawn by the app itself: ``python -m pictures.screenshots FOLDER``.

With ``-m`` and ``-d`` they are of real runs of that pair; ``--first NAME`` draws its first reply.
Without, a demonstration engine stands in for a model, so that the pictures are the same on every
machine; they name it as such. ``--all`` draws every screen in every size and look, to be looked at.
What commands print is drawn from recordings of real runs in ``FOLDER/data`` (recordings.py).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from demo_engine import DemoFactory
from pictures.animation import MovingRace, animated
from pictures.recordings import Recording, picture
from textual.pilot import Pilot
from textual.widgets import Static

from specllama.engine.host import InlineHost
from specllama.errors import SpecllamaError
from specllama.paths import HOME_VARIABLE
from specllama.settings.params import GenerateParams
from specllama.tui.app import SpecllamaApp
from specllama.tui.bridge import FlushPace
from specllama.tui.pages import self_contained

LIMIT_S = 900.0  # a race of a large pair on a small machine
QUESTION = "What is speculative decoding?"
SIZES = ((60, 16), (80, 24), (100, 30), (120, 36), (160, 50), (200, 60))
README_SIZE = (110, 34)

Steps = Callable[[SpecllamaApp, Pilot[int]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Look:
    theme: str
    color: bool = True


LOOKS = {
    "dark": Look("specllama-dark"),
    "light": Look("specllama-light"),
    "mono": Look("specllama-dark", color=False),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """What is loaded for the pictures; no target: the demonstration engine."""

    target: str | None = None
    draft: str | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """How a screen is reached, and what is asked for on the way."""

    steps: Steps
    params: GenerateParams | None = None
    first_look: bool = False


async def until(pilot: Pilot[int], true: Callable[[], object]) -> None:
    """Wait for something to become true on the screen.

    Raises:
        TimeoutError: it did not.
    """
    async with asyncio.timeout(LIMIT_S):
        while not true():
            await pilot.pause(0.01)
    await pilot.pause()


def picture_app(pair: Pair, scene: Scene, look: Look = LOOKS["dark"]) -> SpecllamaApp:
    params = scene.params or GenerateParams()
    if pair.target is None:
        demo = DemoFactory(speed=0, tree=params.proposer == "tree")
        app = SpecllamaApp(
            target="demo",
            host_class=InlineHost,
            factory_for=lambda target, draft: demo,
            params=params.replace(seed=7, draft_max=4, proposer="auto"),
            pace=FlushPace(0.02),
        )
    else:
        app = SpecllamaApp(target=pair.target, draft=pair.draft, params=params.replace(seed=7))
    app.prefs.first_look = scene.first_look
    app.prefs.theme = look.theme
    return app


async def ask(app: SpecllamaApp, pilot: Pilot[int], text: str = QUESTION) -> None:
    await until(pilot, lambda: app.loader.ready)
    app.chat.prompt.put(text)
    await pilot.press("enter")
    await until(pilot, lambda: not app.chat.prompt.text)
    await until(pilot, lambda: not app.chat.busy)
    await _follow(app, pilot)


async def _chat(app: SpecllamaApp, pilot: Pilot[int]) -> None:
    await ask(app, pilot)


async def _drafted(app: SpecllamaApp, pilot: Pilot[int]) -> None:
    await ask(app, pilot)
    await pilot.press("f2", "f2")
    await until(pilot, lambda: app.chat.view == "ghosts")


async def _inspector(app: SpecllamaApp, pilot: Pilot[int]) -> None:
    await ask(app, pilot)
    await pilot.press("f3", *["n"] * 5, "right", "right")


async def _race(app: SpecllamaApp, pilot: Pilot[int]) -> None:
    from specllama.tui.screens.race_screen import RaceScreen

    await ask(app, pilot)
    await pilot.press("f4")
    await until(pilot, lambda: isinstance(app.screen, RaceScreen))
    screen = app.screen
    assert isinstance(screen, RaceScreen)
    await until(pilot, screen.raced)


async def _theory(app: SpecllamaApp, pilot: Pilot[int]) -> None:
    await _race(app, pilot)
    await pilot.press("3")


async def _empty(app: SpecllamaApp, pilot: Pilot[int]) -> None:
    await until(pilot, lambda: app.loader.ready)


async def _first_steps(app: SpecllamaApp, pilot: Pilot[int]) -> None:
    from specllama.tui.widgets.first_look import FirstLook

    await _empty(app, pilot)
    await app.screen.query_one(FirstLook).play(1e6)


async def _settle(app: SpecllamaApp, pilot: Pilot[int]) -> None:
    """No worker of a screen is busy, nor one that another's findings began."""

    def settled() -> bool:
        return all(worker.is_finished for worker in app.workers)

    await pilot.pause()
    while not settled():
        await until(pilot, settled)
    await _follow(app, pilot)


async def _follow(app: SpecllamaApp, pilot: Pilot[int]) -> None:
    """Wait until the conversation stands at its end, where it follows that; its bar too.

    Textual moves the bar of an anchored widget without drawing it anew.
    """
    shown = app.chat.transcript
    await until(pilot, lambda: not shown._follows or shown.scroll_offset.y >= shown.max_scroll_y)
    shown.vertical_scrollbar.refresh()
    await pilot.pause()


def _key(*keys: str) -> Steps:
    async def steps(app: SpecllamaApp, pilot: Pilot[int]) -> None:
        await ask(app, pilot)
        await pilot.press(*keys)
        await _settle(app, pilot)

    return steps


async def _models(app: SpecllamaApp, pilot: Pilot[int]) -> None:
    """Until the pair has been weighed: that begins when the choice stays for a moment."""
    await _key("f6")(app, pilot)
    await until(pilot, lambda: str(app.screen.query_one("#detail", Static).render()))
    await _settle(app, pilot)


TREE = GenerateParams(proposer="tree")
README = {
    "as-drafted": Scene(_drafted),
    "inspector": Scene(_inspector),
    "race": Scene(_race),
}
SCENES = README | {
    "chat": Scene(_chat),
    "tree": Scene(_inspector, TREE),
    "methods": Scene(_key("f5")),
    "theory": Scene(_theory),
    "first-look": Scene(_empty, first_look=True),
    "first-steps": Scene(_first_steps, first_look=True),
    "empty": Scene(_empty),
    "help": Scene(_key("f1")),
    "models": Scene(_models),
    "sessions": Scene(_key("f7")),
    "settings": Scene(_key("f8")),
}


@contextmanager
def surroundings(home: str, look: Look) -> Iterator[None]:
    """The app's own files in a folder of their own, and a terminal as ``look`` wants it."""
    wanted = {HOME_VARIABLE: home, "NO_COLOR": None if look.color else "1"}
    before = {name: os.environ.get(name) for name in wanted}

    def put(values: dict[str, str | None]) -> None:
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    put(wanted)
    try:
        yield
    finally:
        put(before)


@asynccontextmanager
async def staged(
    pair: Pair, scene: Scene, look: Look, size: tuple[int, int]
) -> AsyncIterator[tuple[SpecllamaApp, Pilot[int]]]:
    """An app of its own, at the end of the scene's steps."""
    with tempfile.TemporaryDirectory() as home, surroundings(home, look):
        app = picture_app(pair, scene, look)
        try:
            async with app.run_test(size=size) as pilot:
                await scene.steps(app, pilot)
                yield app, pilot
        finally:
            app.shut_down()


async def resize(app: SpecllamaApp, pilot: Pilot[int], size: tuple[int, int]) -> None:
    await pilot.resize_terminal(*size)
    app.clear_notifications()
    await pilot.pause(0.1)


async def draw(
    path: Path, pair: Pair, scene: Scene, sizes: dict[str, tuple[int, int]], look: Look
) -> list[Path]:
    """One run of a scene, drawn in every size: ``path`` + the size's name + ".svg"."""
    drawn: list[Path] = []
    async with staged(pair, scene, look, next(iter(sizes.values()))) as (app, pilot):
        for name, size in sizes.items():
            await resize(app, pilot, size)
            target = path.with_name(f"{path.name}{name}.svg")
            svg = app.export_screenshot(title="specllama")
            target.write_text(self_contained(svg), "utf-8")
            drawn.append(target)
    return drawn


async def draw_first(folder: Path, pair: Pair, name: str) -> list[Path]:
    """The first reply of a pair, in the sizes of ordinary terminals."""
    sizes = {f"-{w}x{h}": (w, h) for w, h in ((120, 36), (80, 24))}
    return await draw(folder / name, pair, Scene(_chat), sizes, LOOKS["dark"])


async def draw_readme(folder: Path, pair: Pair) -> list[Path]:
    drawn: list[Path] = []
    for name, scene in README.items():
        drawn += await draw(folder / name, pair, scene, {"": README_SIZE}, LOOKS["dark"])
    return drawn


async def draw_all(folder: Path, pair: Pair) -> list[Path]:
    drawn: list[Path] = []
    for name, scene in SCENES.items():
        for kind, look in LOOKS.items():
            sizes = {f"-{w}x{h}-{kind}": (w, h) for w, h in SIZES}
            drawn += await draw(folder / name, pair, scene, sizes, look)
    return drawn


def draw_recordings(folder: Path) -> list[Path]:
    """A picture of every recording in ``folder/data``."""
    drawn: list[Path] = []
    for path in sorted((folder / "data").glob("*.json")):
        target = folder / f"{path.stem}.svg"
        moves = path.stem.startswith("moving")
        svg = animated(MovingRace.load(path)) if moves else picture(Recording.load(path))
        target.write_text(svg, "utf-8")
        drawn.append(target)
    return drawn


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pictures.screenshots")
    parser.add_argument("folder", type=Path)
    parser.add_argument("-m", "--model", help="target of real runs; default: a demonstration")
    parser.add_argument("-d", "--draft-model")
    parser.add_argument("--all", action="store_true", help="every screen, size and look")
    parser.add_argument(
        "--first", metavar="NAME", help="only the first reply, as NAME-120x36.svg …"
    )
    chosen = parser.parse_args(arguments)
    folder: Path = chosen.folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("NO_COLOR", "LC_ALL"):
        os.environ.pop(name, None)
    os.environ["LANG"], os.environ["COLORTERM"] = "C.UTF-8", "truecolor"
    pair = Pair(chosen.model, chosen.draft_model)
    try:
        if chosen.first:
            drawn = asyncio.run(draw_first(folder, pair, chosen.first))
        elif chosen.all:
            drawn = asyncio.run(draw_all(folder, pair))
        else:
            drawn = [*asyncio.run(draw_readme(folder, pair)), *draw_recordings(folder)]
    except SpecllamaError as error:
        print(error.message, file=sys.stderr)
        return 1
    print(*drawn, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

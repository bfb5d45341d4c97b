"""Pictures of the app for the README, drawn by the app itself: ``python -m
specllama.tui.screenshots FOLDER``.

A demonstration engine stands in for a model, so that the pictures are the same on every machine;
the pictures name it as such. What commands print is drawn from recordings of real runs in
``FOLDER/data`` (recordings.py).
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from textual.pilot import Pilot

from specllama.errors import SpecllamaError
from specllama.params import GenerateParams
from specllama.paths import HOME_VARIABLE
from specllama.tui.app import SpecllamaApp
from specllama.tui.bridge import Pace
from specllama.tui.demo import DemoFactory, InlineHost
from specllama.tui.recordings import Recording, picture

LIMIT_S = 30.0
QUESTION = "What is speculative decoding?"

Steps = Callable[[SpecllamaApp, Pilot[int]], Awaitable[None]]


async def until(pilot: Pilot[int], true: Callable[[], object]) -> None:
    """Wait for something to become true on the screen.

    Raises:
        TimeoutError: it did not.
    """
    async with asyncio.timeout(LIMIT_S):
        while not true():
            await pilot.pause(0.01)
    await pilot.pause()


def demo_app(*, tree: bool = False, params: GenerateParams | None = None) -> SpecllamaApp:
    app = SpecllamaApp(
        target="demo",
        host_class=InlineHost,
        factory_for=lambda target, draft: DemoFactory(speed=0, tree=tree),
        params=params or GenerateParams(seed=7, draft_max=4),
        pace=Pace(0.02),
    )
    app.prefs.first_look = False
    return app


async def ask(app: SpecllamaApp, pilot: Pilot[int], text: str = QUESTION) -> None:
    await until(pilot, lambda: app.keeper.ready)
    app.chat.prompt.put(text)
    await pilot.press("enter")
    await until(pilot, lambda: not app.chat.prompt.text)
    await until(pilot, lambda: not app.chat.busy)


async def _chat(app: SpecllamaApp, pilot: Pilot[int]) -> None:
    await ask(app, pilot)


async def _drafted(app: SpecllamaApp, pilot: Pilot[int]) -> None:
    await ask(app, pilot)
    await pilot.press("f2", "f2")
    await until(pilot, lambda: app.chat.view == "ghosts")
    app.clear_notifications()


async def _inspector(app: SpecllamaApp, pilot: Pilot[int]) -> None:
    await ask(app, pilot)
    await pilot.press("f3", *["n"] * 5, "right", "right")


async def _race(app: SpecllamaApp, pilot: Pilot[int]) -> None:
    from specllama.tui.screens.race import RaceScreen

    await ask(app, pilot)
    await pilot.press("f4")
    await until(pilot, lambda: isinstance(app.screen, RaceScreen))
    screen = app.screen
    assert isinstance(screen, RaceScreen)
    await until(pilot, screen.raced)
    screen.action_skip()


async def _sweep(app: SpecllamaApp, pilot: Pilot[int]) -> None:
    from specllama.tui.screens.race import RaceScreen

    await _race(app, pilot)
    await pilot.press("2", "enter")
    screen = app.screen
    assert isinstance(screen, RaceScreen)
    await until(pilot, screen.raced)


async def _methods(app: SpecllamaApp, pilot: Pilot[int]) -> None:
    await ask(app, pilot)
    await pilot.press("f5")


PICTURES: dict[str, tuple[Steps, bool]] = {
    "chat": (_chat, False),
    "as-drafted": (_drafted, False),
    "inspector": (_inspector, False),
    "tree": (_inspector, True),
    "race": (_race, False),
    "sweep": (_sweep, False),
    "methods": (_methods, False),
}


async def draw(folder: Path, size: tuple[int, int] = (110, 34)) -> list[Path]:
    """Draw every picture; the app's own files go to a temporary folder."""
    drawn: list[Path] = []
    before = os.environ.get(HOME_VARIABLE)
    for name, (steps, tree) in PICTURES.items():
        with tempfile.TemporaryDirectory() as home:
            os.environ[HOME_VARIABLE] = home
            app = demo_app(tree=tree)
            try:
                async with app.run_test(size=size) as pilot:
                    await steps(app, pilot)
                    await pilot.pause()
                    path = folder / f"{name}.svg"
                    path.write_text(app.export_screenshot(title="specllama"), "utf-8")
                    drawn.append(path)
            finally:
                app.shut_down()
                if before is None:
                    del os.environ[HOME_VARIABLE]
                else:
                    os.environ[HOME_VARIABLE] = before
    return drawn


def draw_recordings(folder: Path) -> list[Path]:
    """A picture of every recording in ``folder/data``."""
    drawn: list[Path] = []
    for path in sorted((folder / "data").glob("*.json")):
        target = folder / f"{path.stem}.svg"
        target.write_text(picture(Recording.load(path)), "utf-8")
        drawn.append(target)
    return drawn


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1:
        print("usage: python -m specllama.tui.screenshots FOLDER", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("NO_COLOR", "LC_ALL"):
        os.environ.pop(name, None)
    os.environ["LANG"], os.environ["COLORTERM"] = "C.UTF-8", "truecolor"
    try:
        drawn = [*asyncio.run(draw(folder)), *draw_recordings(folder)]
    except SpecllamaError as error:
        print(error.message, file=sys.stderr)
        return 1
    print(*drawn, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

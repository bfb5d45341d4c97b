"""An app on a scripted engine in this process; no model, no child, no sleeping."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from app_driver import LIMIT_S, Driver, Recipe
from fakes import Reply, ScriptedEngine
from textual import _wait

from specllama import paths
from specllama.engine.host import InlineHost
from specllama.models import memory
from specllama.tui import clipboard
from specllama.tui.app import SpecllamaApp
from specllama.tui.bridge import FlushPace
from specllama.tui.screens import sessions_screen
from specllama.tui.state import Preferences
from specllama.tui.widgets import first_look

# A pause of the pilot ends when the app was idle for so long. There are thousands of pauses.
_wait.SLEEP_GRANULARITY = 0.01
_wait.SLEEP_IDLE = _wait.SLEEP_GRANULARITY / 20


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Colours on, one kind of terminal, no desktop clipboard, whatever the caller's shell says."""
    for name in ("NO_COLOR", "TMUX", "SSH_CONNECTION", "SSH_TTY", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.delenv("LC_ALL", raising=False)
    monkeypatch.setenv("COLORTERM", "truecolor")


@pytest.fixture(autouse=True)
def _used_before() -> None:
    """The app was started before."""
    paths.private_folder(Preferences.path().parent)
    Preferences(first_look=False).save()


@pytest.fixture
def start() -> Callable[..., Any]:
    @asynccontextmanager
    async def running(
        *replies: Reply | str,
        size: tuple[int, int] = (100, 30),
        recipe: Recipe | None = None,
        wait: bool = True,
        limit_s: float = LIMIT_S,
        toasts: bool = False,
        **options: Any,
    ) -> AsyncIterator[Driver]:
        recipe = recipe or Recipe(ScriptedEngine(list(replies) or [Reply()]))
        app = SpecllamaApp(
            target=options.pop("target", "scripted"),
            host_class=options.pop("host_class", InlineHost),
            factory_for=options.pop("factory_for", lambda target, draft: recipe),
            pace=FlushPace(0.02),
            **options,
        )
        try:
            async with app.run_test(size=size, notifications=toasts) as pilot:
                driver = Driver(app, pilot, recipe.engine, limit_s)
                await driver.until(lambda: len(app.screen_stack) > 1)
                if wait:
                    await driver.ready()
                yield driver
        finally:
            app.shut_down()

    return running


@pytest.fixture
def one_machine(monkeypatch: pytest.MonkeyPatch, nobody_else: Path) -> None:
    """What screens say of the machine and the day, the same everywhere."""
    monkeypatch.setattr(memory, "available_memory", lambda: int(6e9))
    monkeypatch.setattr(memory, "total_memory", lambda: int(16e9))
    monkeypatch.setattr(memory, "repacked_types", lambda: frozenset({"Q4_0"}))
    monkeypatch.setattr(sessions_screen, "age", lambda seconds: "just now")
    monkeypatch.setattr(sessions_screen, "date", lambda when_s: "12 November 2026, 09:30")
    monkeypatch.setattr(first_look, "FRAMES", 1 / 3600)
    monkeypatch.setattr(clipboard, "here", lambda: Path("/"))

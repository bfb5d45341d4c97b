"""An app on a scripted engine in this process; no model, no child, no sleeping."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fakes import Reply, ScriptedEngine
from textual import _wait
from textual.pilot import Pilot

from specllama import paths
from specllama.engine.inline import InlineHost
from specllama.events import Event, RoundDone
from specllama.interface import Message
from specllama.models import fit, memory
from specllama.settings.params import GenerateParams
from specllama.tui import checklist, clipboard
from specllama.tui.app import SpecllamaApp
from specllama.tui.bridge import Pace
from specllama.tui.screens import sessions
from specllama.tui.state import Preferences
from specllama.tui.widgets import first_look, sidebar
from specllama.tui.widgets.transcript import Note

LIMIT_S = 60.0
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


@dataclass
class Recipe:
    """Gives one engine; the test keeps it to see what was asked."""

    engine: Any = field(default_factory=ScriptedEngine)
    error: Exception | None = None
    gate: Callable[[], None] | None = None

    def __call__(self, progress: Callable[[Event], None], /) -> Any:
        if self.gate is not None:
            self.gate()
        if self.error is not None:
            raise self.error
        return self.engine


class GatedEngine(ScriptedEngine):
    """Stands still after so many rounds of each reply, until the gate is opened or it is
    cancelled: a reply in progress for as long as a test needs it."""

    def __init__(self, replies: Sequence[Reply | str], rounds: int = 3) -> None:
        super().__init__(replies)
        self.gate = threading.Event()
        self.rounds = rounds

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        params: GenerateParams,
        *,
        cancel: threading.Event | None = None,
    ) -> Iterator[Event]:
        seen = 0
        for event in ScriptedEngine.generate(self, prompt, params, cancel=cancel):
            yield event
            seen += isinstance(event, RoundDone)
            while seen == self.rounds and not self.gate.is_set():
                if cancel is not None and cancel.is_set():
                    break
                self.gate.wait(0.01)


class Driver:
    """A running app with what tests do to it."""

    def __init__(
        self,
        app: SpecllamaApp,
        pilot: Pilot[int],
        engine: ScriptedEngine,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.app, self.pilot, self.engine, self.limit_s = app, pilot, engine, limit_s

    async def until(self, true: Callable[[], object]) -> None:
        end = time.monotonic() + self.limit_s
        while not true():
            assert time.monotonic() < end, f"waited too long:\n{self.shown}"
            await self.pilot.pause()
            await asyncio.sleep(0.002)
        await self.pilot.pause()

    async def ready(self) -> None:
        await self.until(lambda: self.app.keeper.ready)

    async def idle(self) -> None:
        await self.until(lambda: not self.app.chat.busy and not self.app.chat.queue)

    async def type(self, text: str) -> None:
        prompt = self.app.chat.prompt
        prompt.put(text)
        await self.pilot.pause()

    async def say(self, text: str) -> None:
        await self.type(text)
        await self.pilot.press("enter")
        await self.until(lambda: not self.app.chat.prompt.text)
        await self.idle()

    @property
    def texts(self) -> list[tuple[str, str]]:
        return [(m.role, m.content) for m in self.app.session.messages]

    @property
    def rounds(self) -> int:
        """Of the reply that the strip is about."""
        record = self.app.chat.strip.record
        return 0 if record is None else len(record.rounds)

    @property
    def notes(self) -> list[str]:
        return [note.message for note in self.app.chat.query(Note)]

    @property
    def shown(self) -> str:
        """Everything on the screen as text."""
        return screen_text(self.app)


def screen_text(app: SpecllamaApp) -> str:
    width, height = app.size
    lines = app.screen._compositor.render_strips()
    return "\n".join("".join(s.text for s in line)[:width] for line in lines[:height])


@pytest.fixture
def start() -> Callable[..., Any]:
    @asynccontextmanager
    async def running(
        *replies: Reply | str,
        size: tuple[int, int] = (100, 30),
        recipe: Recipe | None = None,
        wait: bool = True,
        limit_s: float = LIMIT_S,
        **options: Any,
    ) -> AsyncIterator[Driver]:
        recipe = recipe or Recipe(ScriptedEngine(list(replies) or [Reply()]))
        app = SpecllamaApp(
            target=options.pop("target", "scripted"),
            host_class=options.pop("host_class", InlineHost),
            factory_for=options.pop("factory_for", lambda target, draft: recipe),
            pace=Pace(0.02),
            **options,
        )
        try:
            async with app.run_test(size=size) as pilot:
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
    monkeypatch.setattr(fit, "machine_memory", lambda: 16e9)
    monkeypatch.setattr(checklist, "day", lambda when_s, now_s: "12 Nov")
    for place in (sessions, sidebar):
        monkeypatch.setattr(place, "age", lambda seconds: "just now")
    monkeypatch.setattr(first_look, "STAGE_S", 3600.0)
    monkeypatch.setattr(clipboard, "here", lambda: Path("/"))

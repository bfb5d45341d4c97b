"""A running app with what tests do to it, and the engines that stand behind it."""

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fakes import Reply, ScriptedEngine
from textual._context import visible_screen_stack
from textual.pilot import Pilot

from specllama.events import Event, RoundDone
from specllama.interface import Message
from specllama.settings.params import GenerateParams
from specllama.told import news
from specllama.tui.app import SpecllamaApp
from specllama.tui.record import Record
from specllama.tui.widgets.message import AssistantMessage
from specllama.tui.widgets.transcript import Note

LIMIT_S = 60.0


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
        if isinstance(self.engine, ScriptedEngine):
            self.engine.closed = False  # it is opened anew
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
        self, app: SpecllamaApp, pilot: Pilot[int], engine: ScriptedEngine, limit_s: float = LIMIT_S
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
        await self.until(lambda: self.app.loader.ready)

    async def idle(self) -> None:
        await self.until(lambda: not self.app.chat.busy and not self.app.chat.queue)

    async def type(self, text: str) -> None:
        self.app.chat.prompt.put(text)
        await self.pilot.pause()

    async def press(self, *keys: str, until: Callable[[], object]) -> None:
        """Press keys, and wait for what they do."""
        await self.pilot.press(*keys)
        await self.until(until)

    async def send(self, text: str, until: Callable[[], object] | None = None) -> None:
        """Type a message and press Enter."""
        await self.type(text)
        await self.pilot.press("enter")
        if until is not None:
            await self.until(until)

    async def say(self, text: str) -> None:
        await self.send(text, until=lambda: not self.app.chat.prompt.text)
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


def shown_source(message: AssistantMessage) -> str:
    """The Markdown source of a message that is on the screen; its text where there is none."""
    markdown = message._markdown
    return message.text if markdown is None else markdown.source


def screen_text(app: SpecllamaApp) -> str:
    width, height = app.size
    # what Textual sets before it draws: a sheet that is drawn without it keeps an empty background
    visible_screen_stack.set(app._background_screens)
    lines = app.screen._compositor.render_strips()
    return "\n".join("".join(s.text for s in line)[:width] for line in lines[:height])


def record_of(title: str, events: Iterable[Event]) -> Record:
    """Take the events of a reply into a record of the app."""
    record = Record(title)
    for event in events:
        record.take(news(event))
    return record


# -- screens as text in several sizes, as they are kept in files --


PAGE = re.compile(r"^== (\S+)\n(.*?)\n(?=== |\Z)", re.MULTILINE | re.DOTALL)
PATIENCE_S, SETTLED_S = 60.0, 1.0
_PORT = re.compile(r"127\.0\.0\.1:\d{5}")


def read_pages(path: Path) -> dict[str, str]:
    return dict(PAGE.findall(path.read_text("utf-8")))


def write_pages(path: Path, drawn: Mapping[str, str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"== {name}\n{page}\n" for name, page in drawn.items()), "utf-8")


async def settled(app: SpecllamaApp, pilot: Pilot[int], expected: str | None) -> str:
    """Return the screen as expected; else the one that has its keys and moves no more."""
    return await at_rest(
        lambda: _page(app), pilot, expected, lambda shown: bool(shown.rpartition("\n")[2])
    )


async def at_rest(
    picture: Callable[[], str],
    pilot: Pilot[int],
    expected: str | None,
    whole: Callable[[str], bool] = bool,
) -> str:
    """Return a picture of the screen as expected; else one that is whole and moves no more."""
    end = time.monotonic() + PATIENCE_S
    shown, since = "", time.monotonic()
    while time.monotonic() < end:
        before, shown = shown, picture()
        if shown == expected:
            break
        if shown != before or not whole(shown):
            since = time.monotonic()
        elif expected is None and time.monotonic() - since > SETTLED_S:
            break
        await pilot.pause(0.02)
    return shown


def _page(app: SpecllamaApp) -> str:
    """Ports that a system gave are the same in every run."""
    text = "\n".join(line.rstrip() for line in screen_text(app).split("\n"))
    return _PORT.sub("127.0.0.1:50000", text)

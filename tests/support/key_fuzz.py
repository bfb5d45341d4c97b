"""Keys, pastes, clicks and resizes drawn from a seed, for an app on a machine that lags.

    found = await play(Draw(seed=7, size=(80, 24)), folder)

Whatever is pressed, in whatever order and at whatever speed, nothing may end the app, no worker
may fail, nothing that a person wrote may be lost, and the app must still answer keys. ``play``
returns what was broken of this.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from app_driver import Recipe
from fakes import Reply, ScriptedEngine
from textual import events
from textual.geometry import Size
from textual.message_pump import MessagePump
from textual.pilot import Pilot
from textual.widget import Widget
from textual.worker import Worker, WorkerState

from specllama.engine.host import InlineHost
from specllama.errors import EngineDied, ModelUnavailable, PromptTooLong, SpecllamaError
from specllama.events import Event
from specllama.settings.params import GenerateParams
from specllama.store.sessions import SessionStore
from specllama.tui import downloads, keymap
from specllama.tui.app import SpecllamaApp
from specllama.tui.bridge import FlushPace
from specllama.tui.screens.chat_screen import ChatScreen
from specllama.tui.widgets.message import MessageView
from specllama.tui.widgets.prompt import Prompt

SIZES = ((60, 16), (80, 24), (120, 36))
STEPS = 20
ANSWERS_S = 30.0  # how long the app may take to show a letter, on a busy machine
LETTERS = "bcdfghjklmnpqrstvwxz"
LEAVE = {"app.quit", "chat.editor"}  # they end the app, or give up the terminal
KEYS = [key for a in keymap.ACTIONS if a.id not in LEAVE for key in a.keys.split(",") if key]
OTHERS = (
    *("up", "down", "left", "right", "tab", "shift+tab", "enter", "escape", "home", "end"),
    *("pageup", "pagedown", "ctrl+end", "space", "backspace", "delete", "ctrl+z", "ctrl+y"),
    *("ctrl+u", "ctrl+j", "ctrl+c", "ctrl+p", "ctrl+f", "ctrl+e", "ctrl+w", "shift+left"),
    *("question_mark", "slash", "1", "2", "3", "alt+e", "alt+u", "alt+t", "alt+o", "alt+r"),
)
BURSTS = ("udr", "ed", "rr", "sx", "yb", "ti", "jk", "uuu", "cd", "Ri", "lpa", "drdrdr")
REPLIES = (
    Reply("Short."),
    Reply("# Title\n\n- one\n- two `code`\n\n```py\nprint('x')\n```\n\nAn end.", accept=(3, 0, 1)),
    Reply("<think>\nOne moment.\n</think>\n\nThe answer, with a [link](https://a.b) in it."),
    Reply(" ".join(f"word{i}" for i in range(80)), delay_s=0.004),
    Reply("| a | b |\n|---|---|\n| 1 | 2 |\n\n🦙 x² — ünïcödé", tree=True),
    Reply("It breaks off in the middle of all this.", raise_at_round=2),
    Reply("", reason="stop_token"),
    Reply("Too long.", raise_first=PromptTooLong("the prompt is too long", "shorten it")),
    Reply("It dies.", raise_first=EngineDied("the engine died", "it is started again")),
    Reply("Slowly read.", prefill_delay_s=0.03, delay_s=0.01),
)


@dataclass(frozen=True, slots=True)
class Draw:
    """One sequence: what is drawn, and on what.

    Attributes:
        lag: of timers, mounts, workers and answers; 0 is a fast machine.
        model: a file of a real model, instead of the scripted engine.
    """

    seed: int
    size: tuple[int, int] = (80, 24)
    lag: float = 1.0
    steps: int = STEPS
    model: str | None = None


@dataclass(slots=True)
class Found:
    """What was done and what went wrong."""

    draw: Draw
    steps: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([f"{self.draw}", *self.problems, " ".join(self.steps)])


class LaggingEngine(ScriptedEngine):
    """An engine that draws its replies, and takes its time."""

    def __init__(self, rng: random.Random, lag: float) -> None:
        super().__init__([Reply()])
        self.rng, self.lag = rng, lag

    def generate(self, prompt: Any, params: GenerateParams, **options: Any) -> Iterator[Event]:
        self.replies = [self.rng.choice(REPLIES)]
        time.sleep(self.rng.random() * 0.03 * self.lag)
        yield from ScriptedEngine.generate(self, prompt, params, **options)


@contextmanager
def lagging(rng: random.Random, lag: float, problems: list[str]) -> Iterator[None]:
    """Delay mounts, timers and workers, and note the workers and threads that fail."""
    mount, dispatch, work = MessagePump._pre_process, MessagePump._dispatch_message, Worker._run

    async def slow_mount(self: MessagePump) -> bool:
        if isinstance(self, Widget) and rng.random() < 0.2:
            await asyncio.sleep(rng.random() * 0.02 * lag)
        return await mount(self)

    async def slow_dispatch(self: MessagePump, message: Any) -> None:
        if rng.random() < 0.03 and not isinstance(message, events.Unmount):
            await asyncio.sleep(rng.random() * 0.02 * lag)
        await dispatch(self, message)

    async def slow_work(self: Worker[Any], app: Any) -> None:
        await asyncio.sleep(rng.random() * 0.05 * lag)
        await work(self, app)
        if self.state == WorkerState.ERROR and self._error is not None:
            problems.append(f"worker {self.name}: {_told(self._error)}")

    def thread_failed(failed: Any) -> None:
        problems.append(f"thread: {_told(failed.exc_value)}")

    with ExitStack() as stack:
        stack.enter_context(patch.object(threading, "excepthook", thread_failed))
        stack.enter_context(patch.object(Worker, "_run", slow_work))
        if lag:
            stack.enter_context(patch.object(MessagePump, "_pre_process", slow_mount))
            stack.enter_context(patch.object(MessagePump, "_dispatch_message", slow_dispatch))
        yield


def _told(error: BaseException) -> str:
    """The error and where it was raised, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f"{Path(f.filename).name}:{f.name}" for f in frames if "specllama" in f.filename
            or "/tui/" in f.filename]  # fmt: skip
    return f"{type(error).__name__}: {str(error)[:120]} [{' > '.join(ours[-4:])}]"


class _Hub:
    """A hub that cannot be reached, slowly."""

    def __init__(self, **_: Any) -> None: ...

    def reach(self) -> None:
        time.sleep(0.02)
        raise ModelUnavailable("the hub cannot be reached", "try again")


def _pull(self: downloads.Downloads, download: downloads.Download) -> None:
    """A download that takes a moment, and may be stopped."""
    download.state, download.total = "running", 50
    for done in range(50):
        if download.stop.is_set():
            raise downloads._Stopped
        time.sleep(0.01)
        self.counted(download, done)
    raise ModelUnavailable("the hub broke off", "try again")


class Player:
    """A person at the keys of one app, who remembers all they wrote."""

    def __init__(self, app: SpecllamaApp, pilot: Pilot[int], rng: random.Random, found: Found):
        self.app, self.pilot, self.rng, self.found = app, pilot, rng, found
        self.owed: dict[str, str] = {}  # words that were typed at the prompt
        self.seen: dict[tuple[str, str], None] = {}  # turns that were on the screen
        self.deleted: list[str] = []
        delete = app.store.delete

        def deleting(session: str) -> Any:
            with suppress(SpecllamaError):
                tree = app.store.get(session).tree
                self.deleted += [m.content for m in tree.messages.values()]
            return delete(session)

        app.store.delete = deleting  # type: ignore[method-assign]

    @property
    def alive(self) -> bool:
        return self.app._exception is None and not self.app._exit and self.app.is_running

    # -- what is done

    def key(self, name: str) -> None:
        char = name if len(name) == 1 else {"space": " ", "enter": "\r", "question_mark": "?",
                                            "slash": "/"}.get(name)  # fmt: skip
        self.app.post_message(events.Key(name, char))

    def mouse(self, kind: type[events.MouseEvent], x: int, y: int) -> None:
        self.app.post_message(kind(None, x, y, 0, 0, 1, False, False, False, x, y))

    @property
    def at_prompt(self) -> bool:
        """True if what is typed belongs to the prompt: nothing else could take it."""
        app = self.app
        return isinstance(app.screen, ChatScreen) and isinstance(app.focused, Prompt | MessageView)

    async def write(self, text: str, word: str, how: str) -> None:
        for _ in range(3):  # what was pressed before has had its effect
            await self.settle()
            await asyncio.sleep(0.02 * self.found.draw.lag)
        before = self.at_prompt
        if how == "paste":
            self.app.post_message(events.Paste(text))
        else:
            for letter in text:
                self.key({" ": "space"}.get(letter, letter))
        await self.settle()
        if before and self.at_prompt and self.alive:
            self.owed[word] = how
            pieces = {word[i : i + 3] for i in range(len(word) - 2)}
            places = self.places()
            for _ in range(50):  # the machine lags
                if any(word in place for place in places) or not self.alive:
                    break
                await asyncio.sleep(0.02)
                await self.settle()
                places = self.places()
            if not any(piece in place for place in places for piece in pieces):
                where = f"{self.app.focused!r}, {self.app.chat.prompt.text[-60:]!r}"
                self.found.problems.append(f"text swallowed: {how} of {text!r} {where}")
                del self.owed[word]
            elif not any(word in place for place in places):
                del self.owed[word]  # something was put between its letters

    def word(self) -> str:
        return "".join(self.rng.choices(LETTERS, k=7))

    async def step(self) -> None:
        rng, app = self.rng, self.app
        kind = rng.choices(
            ("key", "keys", "other", "burst", "word", "paste", "send", "slash", "click", "size",
             "wait", "message"),
            (14, 6, 22, 14, 10, 4, 12, 8, 8, 5, 6, 6),
        )[0]  # fmt: skip
        done = kind
        if kind == "key":
            self.key(done := rng.choice(KEYS))
        elif kind == "keys":
            done = ",".join(rng.choices([*KEYS, *OTHERS], k=rng.randint(2, 5)))
            for one in done.split(","):
                self.key(one)
        elif kind == "other":
            self.key(done := rng.choice(OTHERS))
        elif kind == "burst":
            for letter in (done := rng.choice(BURSTS)):
                self.key(letter)
        elif kind in ("word", "paste"):
            word = self.word()
            done = f"{kind}:{word}"
            text = f"{word} " if rng.random() < 0.8 else f"{word}\nu d r\n"
            if kind == "paste" and rng.random() < 0.2:
                text = (text + "x" * 50 + "\n") * 60
            await self.write(text.replace("\n", " ") if kind == "word" else text, word, kind)
        elif kind == "send":
            word = self.word()
            done = f"send:{word}"
            await self.write(f"{word} ", word, "word")
            self.key("enter")
        elif kind == "slash":
            done = f"/{rng.choice(sorted(keymap.SLASH.keys() - {'quit'}))}"
            for letter in done:
                self.key({"/": "slash"}.get(letter, letter))
            self.key("enter")
        elif kind == "click":
            x, y = rng.randrange(app.size.width), rng.randrange(app.size.height)
            done = f"click({x},{y})"
            if rng.random() < 0.7:
                self.mouse(events.MouseDown, x, y)
                self.mouse(events.MouseUp, x, y)
            else:
                kind_of = rng.choice((events.MouseScrollDown, events.MouseScrollUp))
                self.mouse(kind_of, x, y)
        elif kind == "size":
            width, height = rng.choice(SIZES)
            done = f"{width}x{height}"
            app._driver._size = Size(width, height)  # type: ignore[union-attr]
            app.post_message(events.Resize(Size(width, height), Size(width, height)))
        elif kind == "message":
            done = "tab,up"
            for one in ("tab", *["up"] * rng.randint(0, 2)):
                self.key(one)
        self.found.steps.append(done)
        if "ctrl+z" in done:  # a person's own undo, which other text may then take the place of
            await self.settle()
            places = self.places(undone=False)
            self.owed = {w: how for w, how in self.owed.items() if any(w in p for p in places)}
        if kind == "wait" or rng.random() < 0.25:
            await self.settle()
        else:
            await asyncio.sleep(rng.choice((0, 0, 0.002, 0.02)))
        self.look()

    async def settle(self) -> None:
        """Let the app answer what was pressed."""
        if self.alive:
            with suppress(Exception):  # an app that has ended tells by itself
                await self.pilot.pause()

    def look(self) -> None:
        """Remember the turns on the screen: a reply that is being written grows."""
        messages = self.app.session.messages
        for message in messages[:-1] if self.app._chat and self.app.chat.busy else messages:
            if message.content.strip():
                self.seen[message.role, message.content] = None

    # -- what must hold

    def places(self, undone: bool = True) -> list[str]:
        """Every place where something that was written may be."""
        app = self.app
        if not isinstance(app._chat, ChatScreen) or not app._chat.is_attached:
            return []
        prompt = app.chat.prompt
        found = [prompt.text, *prompt.pastes.values(), *app.chat.queue, *prompt.sent_before.entries]
        found += [m.content for m in app.session._tree.messages.values()]
        for summary in app.store.summaries(limit=1000):
            found += [m.content for m in app.store.get(summary.id).tree.messages.values()]
        if undone:
            found += ["".join(e.text for e in batch) for batch in prompt.history.redo_stack]
        return [*found, *self.deleted]

    async def check(self) -> None:
        """Find what is lost, and whether the app still answers."""
        if not self.alive:
            return
        self.app.chat.loader.skip()
        for _ in range(12):
            await self.settle()
            if isinstance(self.app.screen, ChatScreen) and self.app.focused is self.app.chat.prompt:
                break
            self.key("escape")
        await self.until(lambda: isinstance(self.app.screen, ChatScreen), "the chat is not reached")
        if not self.alive:
            return
        self.look()
        await self.until(lambda: not self.app.chat.busy, "a reply does not end", stop=True)
        if not self.alive:
            return
        await self.settle()
        prompt = self.app.chat.prompt
        places = self.places()
        for _ in range(60):  # back through all that can be undone
            before = prompt.text
            prompt.undo()
            places.append(prompt.text)
            if prompt.text == before and not prompt.history.undo_stack:
                break
        for word, how in self.owed.items():
            if not any(word in place for place in places):
                self.found.problems.append(f"text lost: {how} {word}")
        for role, content in self.seen:
            if not any(place.startswith(content.rstrip()) for place in places):
                self.found.problems.append(f"{role} lost: {content[:40]!r}")
        prompt.empty()
        await self.settle()
        last = self.word()
        self.key("escape")
        self.key("escape")
        await self.settle()
        for letter in last:
            self.key(letter)
        await self.until(lambda: last in self.app.chat.prompt.text, "letters do not arrive")

    async def until(self, true: Callable[[], object], problem: str, *, stop: bool = False) -> None:
        end = time.monotonic() + ANSWERS_S
        while self.alive and not true():
            if stop:
                self.key("escape")
            if time.monotonic() > end:
                self.found.problems.append(problem)
                return
            await self.settle()
            await asyncio.sleep(0.01)


async def play(draw: Draw, folder: Path) -> Found:
    """Play one sequence in an app of its own; ``folder`` takes what it saves."""
    found, rng = Found(draw), random.Random(f"{draw.seed} {draw.size}")
    made: dict[str, Any] = {}
    if draw.model is None:
        engine = LaggingEngine(random.Random(draw.seed), draw.lag)
        recipe = Recipe(engine, gate=lambda: time.sleep(0.05 * draw.lag * rng.random()))
        made = {"host_class": InlineHost, "factory_for": lambda target, dr: recipe}
    clock = iter(range(0, 10**6, 10))  # no Ctrl+C is the second of two
    app = SpecllamaApp(
        target=draw.model or "scripted",
        params=None if draw.model is None else GenerateParams(max_tokens=24),
        pace=FlushPace(0.02),
        clock=lambda: float(next(clock)),
        store=SessionStore.open(),
        **made,
    )
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(
        lambda _, said: found.problems.append(
            f"task: {_told(said['exception']) if 'exception' in said else said['message']}"
        )
    )

    async def stay() -> None:
        """Do nothing in place of leaving."""

    with ExitStack() as stack:
        for where, name, instead in (
            (downloads.Downloads, "_pull", _pull),
            (SpecllamaApp, "action_quit", lambda self: stay()),
        ):
            stack.enter_context(patch.object(where, name, instead))
        stack.enter_context(patch("specllama.models.hub_client.HubClient", _Hub))
        stack.enter_context(patch("specllama.tui.clipboard.here", lambda: folder))
        stack.enter_context(lagging(random.Random(draw.seed), draw.lag, found.problems))
        try:
            async with app.run_test(size=draw.size, notifications=True) as pilot:
                await _begun(app, pilot)
                player = Player(app, pilot, rng, found)
                for _ in range(2):  # a conversation of two turns to begin with
                    await player.write(f"{(word := player.word())} ", word, "word")
                    player.key("enter")
                    await player.settle()
                for _ in range(draw.steps):
                    if not player.alive:
                        break
                    await player.step()
                await player.check()
                if app._exit and app._exception is None:
                    found.problems.append("the app has left")
        except Exception as error:
            found.problems.append(f"crash: {_told(error)}")
        finally:
            app.shut_down()
    return found


async def _begun(app: SpecllamaApp, pilot: Pilot[int]) -> None:
    end = time.monotonic() + ANSWERS_S
    while len(app.screen_stack) < 2 or not app.screen.query(Prompt):
        assert time.monotonic() < end, "the chat does not appear"
        await pilot.pause()


def kinds(problems: Sequence[str]) -> list[str]:
    """The problems without what differs from run to run."""
    return [p.partition(" of ")[0] if p.startswith("text") else p for p in problems]

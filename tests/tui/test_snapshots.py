"""Pictures of the screens. A new Textual may shift them: look at the report, then update with
``pytest tests/tui/test_snapshots.py --snapshot-update``."""

import os
import re
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import ggufs
import pytest
from app_driver import Recipe, at_rest, read_pages, settled, write_pages
from demo_engine import DemoFactory
from fakes import Reply, ScriptedEngine
from pictures.screenshots import LOOKS, SCENES, SIZES, Pair, ask, picture_app, staged, until
from pytest_textual_snapshot import normalize_svg
from textual.pilot import Pilot

from specllama.engine.host import InlineHost
from specllama.errors import DoesNotFit
from specllama.events import Event, LoadProgress
from specllama.settings.params import GenerateParams
from specllama.store.message_tree import StoredMessage
from specllama.store.sessions import SessionStore
from specllama.tui.app import SpecllamaApp
from specllama.tui.bridge import FlushPace
from specllama.tui.screens import sessions_screen

Steps = Callable[[Pilot[int]], Awaitable[None]]
WIDE, MIDDLE, USUAL, SMALL = (120, 36), (100, 30), (80, 24), (60, 16)


@pytest.fixture
def snap_compare(snap_compare: Any, request: pytest.FixtureRequest) -> Callable[..., bool]:
    """Compare the picture of a screen once it is as kept, or has not moved for a while."""
    kept = Path(__file__).parent / "__snapshots__" / "test_snapshots" / f"{request.node.name}.svg"
    draws_anew = request.config.option.update_snapshots
    expected = kept.read_text("utf-8") if kept.exists() and not draws_anew else None

    def compare(app: SpecllamaApp, run_before: Steps, terminal_size: tuple[int, int]) -> bool:
        def picture() -> str:
            return normalize_svg(app.export_screenshot(title=app.title, simplify=True))

        async def steps(pilot: Pilot[int]) -> None:
            await run_before(pilot)
            await at_rest(picture, pilot, expected)

        same: bool = snap_compare(app, run_before=steps, terminal_size=terminal_size)
        return same

    return compare


def make(recipe: Any = None, **options: Any) -> SpecllamaApp:
    chosen = recipe or DemoFactory(speed=0)
    return SpecllamaApp(
        target="demo",
        host_class=InlineHost,
        factory_for=lambda target, draft: chosen,
        params=GenerateParams(seed=7, draft_max=4),
        pace=FlushPace(0.02),
        **options,
    )


def after(*keys: str, question: bool = True) -> Steps:
    async def steps(pilot: Pilot[int]) -> None:
        app = pilot.app
        await until(pilot, lambda: len(app.screen_stack) > 1)
        if question:
            await ask(app, pilot)
        else:
            await until(pilot, lambda: app.loader.ready or app.loader.failed)
        await pilot.press(*keys)
        await pilot.pause()
        app.clear_notifications()
        await pilot.pause()

    return steps


@pytest.mark.parametrize("size", [USUAL, SMALL], ids=["80x24", "60x16"])
def test_figures(snap_compare: Any, size: tuple[int, int]) -> None:
    """In the place of the conversation, where there is no room beside it."""
    assert snap_compare(make(), run_before=after("f12"), terminal_size=size)


def test_ansi_theme(snap_compare: Any) -> None:
    app = make()
    app.prefs.theme = "ansi-dark"
    assert snap_compare(app, run_before=after("f2"), terminal_size=USUAL)


def test_error(snap_compare: Any) -> None:
    recipe = Recipe(
        error=DoesNotFit(
            "this needs about 9.1 GB of memory, 4.0 GB are free",
            "take a smaller quantisation, or a shorter context with -c",
        )
    )
    assert snap_compare(make(recipe), run_before=after(question=False), terminal_size=USUAL)


@pytest.mark.parametrize("size", [USUAL, SMALL], ids=["80x24", "60x16"])
def test_loading(snap_compare: Any, size: tuple[int, int]) -> None:
    """What is typed meanwhile stands in the prompt."""
    loaded = threading.Event()

    def recipe(progress: Callable[[Event], None]) -> ScriptedEngine:
        progress(LoadProgress("target", "llama-3.2-3b-q4_k_m.gguf", 0.5))
        assert loaded.wait(30)
        return ScriptedEngine()

    async def steps(pilot: Pilot[int]) -> None:
        app = pilot.app
        await until(pilot, lambda: app.loader.progress is not None)
        await pilot.press(*"Hello")
        await pilot.pause()

    assert snap_compare(make(recipe), run_before=steps, terminal_size=size)
    loaded.set()


def test_long_stream(snap_compare: Any) -> None:
    text = "\n\n".join(f"Paragraph {i} of a long reply that goes on and on." for i in range(60))
    engine = ScriptedEngine([Reply(text, accept=(3, 1, 0))])
    assert snap_compare(make(Recipe(engine)), run_before=after(), terminal_size=USUAL)


@pytest.mark.parametrize("size", [WIDE, USUAL, SMALL], ids=["120x36", "80x24", "60x16"])
def test_models(
    snap_compare: Any, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch, nobody_else: Path
) -> None:
    monkeypatch.setattr("specllama.models.memory.available_memory", lambda: 8_000_000_000)
    monkeypatch.setattr("specllama.models.memory.total_memory", lambda: 16_000_000_000)
    monkeypatch.setattr("specllama.models.memory.repacked_types", lambda: frozenset({"Q4_0"}))
    shelf = nobody_else / "shelf"
    shelf.mkdir()
    ggufs.write_llama(shelf / "other-F32.gguf")
    (shelf / "damaged.gguf").write_bytes(b"GGUF")
    for file in shelf.iterdir():
        os.utime(file, (0, 0))  # used long before the bundled model, whatever day it is
    monkeypatch.setenv("SPECLLAMA_MODEL_DIRS", str(shelf))

    async def steps(pilot: Pilot[int]) -> None:
        await after("f6", question=False)(pilot)
        screen = pilot.app.screen
        await until(pilot, lambda: len(screen.drafts.here) > 3)
        await until(pilot, lambda: all(row.fits is not None for row in screen.targets.here))
        await until(pilot, lambda: "needs about" in str(screen.query_one("#detail").render()))

    assert snap_compare(make(), run_before=steps, terminal_size=size)


@pytest.mark.parametrize("look", ["dark", "mono"])
@pytest.mark.parametrize(
    ("size", "typed"),
    [(USUAL, ""), (SMALL, "crow"), (WIDE, "a crow")],
    ids=["all", "small", "wide"],
)
def test_sessions(
    snap_compare: Any, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], typed: str, look: str
) -> None:
    """By day, and what a search found: marked without colours, too."""
    now_s = 1_800_014_400.0  # noon, so that it is the same day everywhere
    monkeypatch.setattr("specllama.store.sessions.time.time", lambda: now_s)
    monkeypatch.setattr(sessions_screen, "date", lambda when_s: "14 January 2027, 12:00")
    monkeypatch.setattr(
        sessions_screen, "moment", lambda when_s, now_s: sessions_screen.age(now_s - when_s)
    )
    if look == "mono":
        monkeypatch.setenv("NO_COLOR", "1")
    said = "A fox praised a crow: what a voice! The crow sang, and the cheese fell."
    with SessionStore.open() as store:
        for i, title in enumerate(("Fox and crow", "A regex for dates", "Translate: crow")):
            session = store.create(title=title)
            for seq in range(2 * i + 2):
                text = said if seq % 2 else title
                store.put(session, seq, StoredMessage("assistant" if seq % 2 else "user", text))
            now_s += 500.0 if i else 86400.0
    keys = ("f7", *("space" if key == " " else key for key in typed))
    assert snap_compare(make(), run_before=after(*keys, question=False), terminal_size=size)


@pytest.mark.usefixtures("one_machine")
@pytest.mark.parametrize("look", ["dark", "light", "mono"])
@pytest.mark.parametrize("name", SCENES)
def test_every_screen(
    snap_compare: Any, name: str, look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In colours; the other sizes are texts, below."""
    if not LOOKS[look].color:
        monkeypatch.setenv("NO_COLOR", "1")
    app = picture_app(Pair(), SCENES[name], LOOKS[look])

    async def steps(pilot: Pilot[int]) -> None:
        await SCENES[name].steps(app, pilot)
        app.clear_notifications()
        await pilot.pause()

    assert snap_compare(app, run_before=steps, terminal_size=MIDDLE)


# -- every screen in every size, as text --


KEPT = Path(__file__).parent / "__snapshots__" / "scenes"
DASHES = re.compile(r"(^|\s)[–-]( +[–-])+(\s|$)")


@pytest.mark.usefixtures("one_machine")
@pytest.mark.parametrize("name", SCENES)
async def test_every_size(name: str, request: pytest.FixtureRequest) -> None:
    kept = KEPT / f"{name}-dark.txt"
    draws_anew = request.config.option.update_snapshots
    pages = {} if draws_anew else read_pages(kept)
    drawn = {}
    async with staged(Pair(), SCENES[name], LOOKS["dark"], SIZES[0]) as (app, pilot):
        for width, height in SIZES:
            size = f"{width}x{height}"
            await pilot.resize_terminal(width, height)
            app.clear_notifications()
            drawn[size] = shown = await settled(app, pilot, pages.get(size))
            assert not DASHES.search(shown), shown
            if not draws_anew:
                assert shown == pages[size]
    if draws_anew:
        write_pages(kept, drawn)

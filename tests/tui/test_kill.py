"""``kill -9`` of the engine's process while it writes, through the whole app."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable

import pytest
from demo_engine import DEMO_REPLY
from stepped_demo import SteppedDemoFactory
from textual.pilot import Pilot

from specllama import paths
from specllama.settings.params import EngineOptions, GenerateParams
from specllama.tui.app import SpecllamaApp
from specllama.tui.bridge import FlushPace
from specllama.tui.widgets.message import AssistantMessage

KILLS = 3
REAL_KILLS = 8
LIMIT_S = 60.0


async def until(pilot: Pilot[int], true: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end, "waited too long"
        await pilot.pause()
        await asyncio.sleep(0.005)


async def kill_and_recover(kills: int, seed: int = 1) -> None:
    rng = random.Random(seed)
    app = SpecllamaApp(
        target="demo",
        factory_for=lambda target, draft: SteppedDemoFactory(speed=2.0),
        params=GenerateParams(seed=7),
        pace=FlushPace(0.02),
    )
    try:
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: app.loader.ready)
            chat = app.chat
            for i in range(kills):
                enough, before = rng.randint(1, 40), len(app.session.messages)
                chat.prompt.put(f"question {i}")
                await pilot.press("enter")
                # A busy machine may look only when all has been said.
                await until(
                    pilot,
                    lambda enough=enough, before=before: (  # type: ignore[misc]
                        (chat.live_record and len(chat.live_record.rounds) >= enough)
                        or len(app.session.messages) > before + 1
                    ),
                )
                assert app.loader.host.pid is not None  # type: ignore[attr-defined]
                os.kill(app.loader.host.pid, signal.SIGKILL)  # type: ignore[attr-defined]
                await until(pilot, lambda: not chat.busy)
                last = app.session.messages[-1]
                if last.role == "assistant":
                    assert DEMO_REPLY.startswith(last.content)
                    view = chat.query(AssistantMessage).last()
                    assert view.text == last.content
            chat.prompt.put("and now?")
            await pilot.press("enter")
            await until(pilot, lambda: app.session.messages[-1].content == DEMO_REPLY)
            await until(pilot, lambda: not chat.busy)
            assert app.is_running
    finally:
        app.shut_down()


async def test_the_app_outlives_its_engine() -> None:
    await kill_and_recover(KILLS)


@pytest.mark.e2e
@pytest.mark.timeout(600)
async def test_the_app_outlives_kills_of_the_bundled_pair() -> None:
    if not (paths.bundled_dir() / "tiny-target-q4_0.gguf").is_file():
        pytest.skip("the bundled pair is not there")
    await kill_real_engine(REAL_KILLS)


async def kill_real_engine(kills: int, seed: int = 2) -> None:
    """The moments are spread over the reply: reading the prompt, drafting, verifying, sending."""
    rng = random.Random(seed)
    params = GenerateParams(seed=7, max_tokens=400, ignore_eos=True)
    # one thread: a busy machine makes two of them wait for each other, at every start
    options = EngineOptions(threads=1)
    app = SpecllamaApp(target="tiny", params=params, options=options, pace=FlushPace(0.02))
    try:
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: app.loader.ready)
            chat = app.chat
            kept = 0
            for i in range(kills):
                chat.set_focus(chat.prompt)
                chat.prompt.put(f"Tell me about a fox, number {i}")
                await pilot.press("enter")
                # A fast machine may have answered before anyone looked.
                await until(
                    pilot,
                    lambda: app.loader.host.ready and (chat.busy or len(app.session.messages) > 1),  # type: ignore[attr-defined]
                )
                await asyncio.sleep(0.6 * (i + rng.random()) / kills)
                pid = app.loader.host.pid  # type: ignore[attr-defined]
                assert pid is not None
                shown = "".join(view.text for view in list(chat.query(AssistantMessage))[-1:])
                os.kill(pid, signal.SIGKILL)
                await until(pilot, lambda: not chat.busy)
                last = app.session.messages[-1]
                if last.role == "assistant":
                    kept += 1
                    view = chat.query(AssistantMessage).last()
                    assert view.text == last.content
                    assert last.content.startswith(shown)
                    assert last.content
                await pilot.press("ctrl+n")
                await until(pilot, lambda: not app.session.messages)
            assert kept, "every kill came before the first token: nothing was tested"
            app.session.params = params.replace(max_tokens=8)
            chat.prompt.put("and now?")
            await pilot.press("enter")
            await until(pilot, lambda: [m.role for m in app.session.messages][1:] == ["assistant"])
            await until(pilot, lambda: not chat.busy)
            assert app.is_running
    finally:
        app.shut_down()

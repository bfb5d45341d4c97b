"""Every screen in every size, as text: what is where. The colours are in test_snapshots.py.

After looking at what changed (``make gallery`` draws all of it as pictures):
``pytest tests/tui/test_scenes.py --snapshot-update``.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from app_driver import screen_text
from pictures.screenshots import LOOKS, SCENES, SIZES, Pair, staged
from textual.pilot import Pilot

from specllama.tui.app import SpecllamaApp

KEPT = Path(__file__).parent / "__snapshots__" / "scenes"
PAGE = re.compile(r"^== (\d+x\d+)\n(.*?)\n(?=== \d|\Z)", re.MULTILINE | re.DOTALL)
PATIENCE_S, SETTLED_S = 60.0, 1.0
DASHES = re.compile(r"(^|\s)[–-]( +[–-])+(\s|$)")


def _page(app: SpecllamaApp) -> str:
    return "\n".join(line.rstrip() for line in screen_text(app).split("\n"))


async def _settled(app: SpecllamaApp, pilot: Pilot[int], expected: str | None) -> str:
    """The screen as expected; else what is shown when nothing moves any more, keys and all."""
    end = time.monotonic() + PATIENCE_S
    shown, since = "", time.monotonic()
    while time.monotonic() < end:
        before, shown = shown, _page(app)
        if shown == expected:
            break
        if shown != before or not shown.rpartition("\n")[2]:
            since = time.monotonic()
        elif expected is None and time.monotonic() - since > SETTLED_S:
            break
        await pilot.pause(0.02)
    return shown


@pytest.mark.usefixtures("one_machine")
@pytest.mark.parametrize("look", ["dark", "ascii"])
@pytest.mark.parametrize("name", SCENES)
async def test_every_size(name: str, look: str, request: pytest.FixtureRequest) -> None:
    kept = KEPT / f"{name}-{look}.txt"
    draws_anew = request.config.option.update_snapshots
    pages = {} if draws_anew else dict(PAGE.findall(kept.read_text("utf-8")))
    drawn = {}
    async with staged(Pair(), SCENES[name], LOOKS[look], SIZES[0]) as (app, pilot):
        for width, height in SIZES:
            size = f"{width}x{height}"
            await pilot.resize_terminal(width, height)
            app.clear_notifications()
            drawn[size] = shown = await _settled(app, pilot, pages.get(size))
            assert not DASHES.search(shown), shown
            assert look != "ascii" or shown.isascii(), {c for c in shown if not c.isascii()}
            if not draws_anew:
                assert shown == pages[size]
    if draws_anew:
        kept.parent.mkdir(exist_ok=True)
        kept.write_text("".join(f"== {k}\n{v}\n" for k, v in drawn.items()), "utf-8")

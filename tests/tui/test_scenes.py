"""Every screen in every size, as text: what is where. The colours are in test_snapshots.py.

After looking at what changed (``make gallery`` draws all of it as pictures):
``pytest tests/tui/test_scenes.py --snapshot-update``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pictures.screenshots import LOOKS, SCENES, SIZES, Pair, staged
from text_pages import read_pages, settled, write_pages

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

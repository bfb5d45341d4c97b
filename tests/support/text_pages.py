"""Screens as text in several sizes, as they are kept in files: what is where."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path

from app_driver import screen_text
from textual.pilot import Pilot

from specllama.tui.app import SpecllamaApp

PAGE = re.compile(r"^== (\S+)\n(.*?)\n(?=== |\Z)", re.MULTILINE | re.DOTALL)
PATIENCE_S, SETTLED_S = 60.0, 1.0
_PORT = re.compile(r"127\.0\.0\.1:\d{5}")


def read_pages(path: Path) -> dict[str, str]:
    return dict(PAGE.findall(path.read_text("utf-8")))


def write_pages(path: Path, drawn: Mapping[str, str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"== {name}\n{page}\n" for name, page in drawn.items()), "utf-8")


async def settled(app: SpecllamaApp, pilot: Pilot[int], expected: str | None) -> str:
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


def _page(app: SpecllamaApp) -> str:
    """Ports that a system gave are the same in every run."""
    text = "\n".join(line.rstrip() for line in screen_text(app).split("\n"))
    return _PORT.sub("127.0.0.1:50000", text)

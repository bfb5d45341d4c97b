"""A short day of a server that is left running; ``tests/tools/day_in_life.py`` has longer ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from day_in_life import lived

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kills and /proc"),
]


def test_every_reply_is_the_one_of_a_fresh_engine(tmp_path: Path) -> None:
    told = lived(tmp_path, conversations=4, turns=2, events=1, seed=2)
    assert told["wrong"] == []
    assert told["equal"] == told["replies"] == 8
    for name in ("rests", "engines killed", "servers killed", "full disks", "sleeps"):
        assert told[name] == 1
    begin, *_, end = told["MB at rest"]
    assert end < begin + 30, "memory goes back to its floor"

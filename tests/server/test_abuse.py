"""A little abuse of a server without weights; ``tests/tools/abuse.py`` does more."""

from __future__ import annotations

from pathlib import Path

from abuse import figures
from servers import table


def test_who_leaves_or_does_not_read_leaves_nothing_behind(tmp_path: Path) -> None:
    found = figures(table(tmp_path), cancels=96, readers=24, asks=4)
    assert found["wrong"] == []
    assert found["cancels"]["after"]["going on"] == 0
    assert found["dead readers"]["after"]["cells"] <= 2048

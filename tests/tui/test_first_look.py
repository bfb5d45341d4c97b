"""The first launch: a demonstration that ends by itself, and says what to do next."""

from __future__ import annotations

from typing import Any

import pytest

from specllama.models import catalog, fit
from specllama.tui.state import Preferences
from specllama.tui.widgets import first_look
from specllama.tui.widgets.first_look import ROUNDS, STAGES, FirstLook, demo_rounds, real_pair
from specllama.tui.widgets.welcome import Welcome


@pytest.fixture(autouse=True)
def _never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    Preferences.path().unlink()
    monkeypatch.setattr(first_look, "STAGE_S", 3600.0)  # the test takes the steps


async def test_the_first_launch_shows_a_round_and_then_what_to_do(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "machine_memory", lambda: 16_000_000_000)
    async with start(size=(80, 24)) as d:
        look = d.app.chat.query_one(FirstLook)
        assert "Demonstration: invented text and times" in d.shown
        for name in STAGES:
            assert name in d.shown
        assert "reads them all in one pass" not in d.shown
        look.step()
        await d.pilot.pause()
        assert "reads them all in one pass" in d.shown
        for _ in range(3 * ROUNDS):
            look.step()
        await d.pilot.pause()
        assert look.over
        pair = real_pair(16e9)
        assert pair is not None
        assert f"specllama hub pull {pair.name}" in d.shown
        assert "(16 GB)" in d.shown
        assert "bundled pair" not in d.shown  # this pair is another
        look.bundled = True
        look.redraw()
        await d.pilot.pause()
        assert "drafting switches itself off" in d.shown
        await d.say("Hello")
        assert not d.app.chat.query(FirstLook)


async def test_it_is_shown_once(start: Any) -> None:
    async with start() as d:
        assert d.app.chat.query(FirstLook)
    async with start() as d:
        assert not d.app.chat.query(FirstLook)
        assert d.app.chat.query(Welcome)


def test_every_round_of_it_drafts_and_it_takes_about_ten_seconds() -> None:
    rounds = [done for done in demo_rounds() if done.drafted]
    assert 4 <= len(rounds) <= ROUNDS
    assert {len(done.drafted) for done in rounds} == {4}


@pytest.mark.parametrize("gigabytes", [4, 8, 16, 64])
def test_the_pair_fits_the_machine(gigabytes: int) -> None:
    pair = real_pair(gigabytes * 1e9)
    assert pair is not None
    assert pair.draft is not None
    assert pair.memory_gb <= gigabytes * 1.05
    assert catalog.find(pair.name) == pair
    assert real_pair(1e9) is None

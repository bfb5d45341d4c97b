"""The first launch: a demonstration that ends by itself, and says what to do next."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from specllama.backend import expected
from specllama.models import catalog, fit
from specllama.settings.params import GenerateParams
from specllama.store.sessions import SessionStore
from specllama.store.tree import StoredMessage
from specllama.tui.state import Preferences
from specllama.tui.widgets import first_look
from specllama.tui.widgets.first_look import (
    READABLE,
    ROUNDS,
    STAGES,
    FirstLook,
    demo_rounds,
    real_pair,
)
from specllama.tui.widgets.stats_strip import gigabytes
from specllama.tui.widgets.welcome import EXAMPLES, Welcome


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
        pair = real_pair(16e9, partial(expected.plain_speed, cores=d.app.loader.info.threads))
        assert pair is not None
        assert f"specllama hub pull {pair.name}" in d.shown
        assert f"{gigabytes(pair.bytes)} to download" in d.shown
        assert "tokens a second, before drafting" in d.shown
        assert "bundled pair" not in d.shown  # this pair is another
        assert d.app.session.params == GenerateParams()
        await d.say("Hello")
        assert not d.app.chat.query(FirstLook)


async def test_the_first_chat_of_the_bundled_pair_shows_drafting(start: Any) -> None:
    async with start("Yes.", "No.", target="tiny", size=(80, 24)) as d:
        look = d.app.chat.query_one(FirstLook)
        look.at = len(look.rounds)
        look.redraw()
        await d.until(lambda: "drafting switches itself" in d.shown)
        await d.say("Hello")
        asked = d.engine.requests[0].params
        assert (asked.window, asked.draft_max) == ("fixed", 4)
        assert "demonstration: forced to draft" in d.shown
        # the conversation alone: nothing of it is stored, and the next one has the usual
        assert d.app.store.get(d.app.session.id).settings == {"set": {}}
        await d.pilot.press("ctrl+n")
        await d.until(lambda: not d.texts)
        await d.say("Hello")
        assert d.engine.requests[1].params == GenerateParams(owner=d.app.session.id)
        assert "demonstration" not in d.shown


async def test_what_was_asked_for_is_no_demonstration(start: Any) -> None:
    plain = GenerateParams(speculate=False)
    async with start("Yes.", target="tiny", params=plain) as d:
        assert d.app.session.params == plain


async def test_a_conversation_that_goes_on_is_not_the_first_look(start: Any) -> None:
    with SessionStore.open() as store:
        session = store.create(title="old")
        store.put(session, 0, StoredMessage("user", "q"))
        store.put(session, 1, StoredMessage("assistant", "a"))
    async with start(session_id=session, target="tiny") as d:
        await d.until(lambda: d.texts)
        assert d.app.session.params == GenerateParams()
    assert Preferences.load().first_look


async def test_tab_writes_what_could_be_asked(start: Any) -> None:
    async with start("Yes.") as d:
        for example in (*EXAMPLES, EXAMPLES[0]):
            await d.pilot.press("tab")
            await d.until(lambda example=example: d.app.chat.prompt.text == example)
        await d.type("my own words")
        await d.pilot.press("tab")
        assert d.app.chat.prompt.text == "my own words"
        await d.say("go")
        await d.pilot.press("tab")  # now there are messages to go to
        assert d.app.chat.prompt.text == ""


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (120, 36)])
async def test_the_headline_is_seen_and_what_is_short_stands_in_the_middle(
    start: Any, size: tuple[int, int]
) -> None:
    for first in (True, False):
        Preferences(first_look=first).save()
        async with start(target="tiny", size=size) as d:
            if first:
                look = d.app.chat.query_one(FirstLook)
                look.at = len(look.rounds)
                look.redraw()
            headline = "Guess, check, keep" if first else "A draft guesses"
            await d.until(lambda headline=headline: headline in d.shown)
            lines = [line.strip() for line in d.shown.split("\n")]
            if not first:
                await d.pilot.resize_terminal(120, 40)
                await d.pilot.resize_terminal(*size)
                await d.until(lambda: "F1 explains the keys" in d.shown)
                assert "more below" not in d.shown
                lines = [line.strip() for line in d.shown.split("\n")]
            above = next(i for i, line in enumerate(lines) if line.startswith(headline)) - 1
            assert above <= size[1] // 3, d.shown


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
    pair = real_pair(gigabytes * 1e9, partial(expected.plain_speed, cores=16))
    assert pair is not None
    assert pair.draft is not None
    assert pair.memory_gb <= gigabytes * 1.05
    assert catalog.find(pair.name) == pair
    assert real_pair(1e9, partial(expected.plain_speed, cores=16)) is None


def test_few_cores_are_offered_what_they_can_run() -> None:
    """By memory alone, 25 GB of a machine with two cores are offered a target of 27 B."""
    slow = real_pair(25e9, partial(expected.plain_speed, cores=2))
    fast = real_pair(25e9, partial(expected.plain_speed, cores=2, on_gpu=True))
    assert slow is not None
    assert fast is not None
    assert slow.target.params <= 8e9 < fast.target.params
    assert expected.plain_speed(slow.target.bytes, 2) >= READABLE

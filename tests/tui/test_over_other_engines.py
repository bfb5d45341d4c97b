"""The app over another engine: what it tells is shown, what it does not is not."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from other_engines import running, script
from text_pages import read_pages, settled, write_pages

from specllama.remote import foreign
from specllama.remote.address import Address
from specllama.settings.params import GenerateParams

TEXT = script("vllm-0.32.0-draft")["tells"]["text"]
PARAMS = GenerateParams(from_card=("min_p", "temperature", "top_k", "top_p"))

KEPT = Path(__file__).parent / "__snapshots__" / "scenes"
SIZES = ((60, 16), (80, 24), (120, 36))


def over(url: str, **more: Any) -> dict[str, Any]:
    return {"server": Address(url), "factory_for": None, "params": PARAMS, **more}


@pytest.mark.parametrize("size", [(80, 24), (140, 40)])
async def test_a_chat_over_vllm(start: Any, size: tuple[int, int]) -> None:
    with running("vllm-0.32.0-draft") as server:
        async with start(**over(server.url, size=size)) as d:
            await d.say("What is a draft model?")
            assert d.texts == [("user", "What is a draft model?"), ("assistant", TEXT)]
            await d.until(lambda: "31 of 36" in d.shown)
            assert " weights" not in d.shown  # nobody here knows its memory
            assert "0 rounds" not in d.shown
            await d.press("f6", until=lambda: "0 running, 0 waiting" in d.shown)
            assert "kept 71% (114 of 160)" in d.shown
            assert "A lane writes one reply" not in d.shown
            await d.pilot.press("escape")
            for key in ("f3", "f4", "f5"):  # they are made of rounds
                await d.pilot.press(key)
                await d.until(lambda: any("does not tell its rounds" in notice.message
                                          for notice in d.app._notifications))  # fmt: skip
                assert len(d.app.screen_stack) == 2
                d.app.clear_notifications()


async def test_a_reply_of_another_engine_is_stored_with_its_name(start: Any) -> None:
    with running("sglang-0.5.23") as server:
        async with start(**over(server.url)) as d:
            await d.say("What?")
            session = d.app.session
            [_, reply] = d.app.store.get(session.id).tree.messages.values()
            stored = reply.stats
            assert (stored["engine"], stored["counted"]) == ("SGLang 0.5.23", 7)
            assert (stored["draft_n"], stored["draft_at_most"]) == (9, True)
            assert stored["rounds"] is stored["seed"] is None
            identity = session.id
        async with start(**over(server.url, session_id=identity)) as d:
            await d.until(lambda: "4 of ≤ 9" in d.shown)
            record = d.app.chat.records[1]
            assert record.finished is not None
            assert record.finished.tokens == 7


@pytest.mark.usefixtures("one_machine")
@pytest.mark.parametrize("name", ["vllm-0.32.0-draft", "mlx-lm-0.32.2-draft"])
async def test_every_size(
    name: str, start: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat, its figures (F12) and the counters (F6): of one that tells all, and of one that
    tells nothing. After looking: ``pytest tests/tui --snapshot-update``."""
    ticks = itertools.count()
    monkeypatch.setattr(foreign, "perf_counter", lambda: next(ticks) * 0.05)
    monkeypatch.setattr(foreign, "EVERY_S", 3600.0)  # one look
    kept = KEPT / f"over-{name}.txt"
    draws_anew = request.config.option.update_snapshots
    pages, drawn = {} if draws_anew else read_pages(kept), {}
    with running(name) as server:
        async with start(**over(server.url, size=SIZES[0])) as d:
            await d.say("What is a draft model?")
            for place, key, back in (("chat", "", ""), ("figures", "f12", "f12"),
                                     ("counters", "f6", "escape")):  # fmt: skip
                for width, height in SIZES:
                    await d.pilot.resize_terminal(width, height)
                    if key:
                        await d.pilot.press(key)
                    d.app.clear_notifications()
                    page = f"{place}-{width}x{height}"
                    drawn[page] = shown = await settled(d.app, d.pilot, pages.get(page))
                    if back:
                        await d.pilot.press(back)
                    if not draws_anew:
                        assert shown == pages[page]
    if draws_anew:
        write_pages(kept, drawn)

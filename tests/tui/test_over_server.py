"""The app on the engine of a running server."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
import itertools
from pathlib import Path

import pytest
from app_driver import Driver, Recipe, read_pages, settled, write_pages
from fakes import Reply, ScriptedEngine
from other_engines import running, script
from servers import Serving, serving, table

from specllama.engine.host import LoadEngine
from specllama.errors import EngineDied
from specllama.interface import Message
from specllama.remote import foreign
from specllama.remote.address import Address
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams
from specllama.tui.screens.settings_screen import SettingsScreen
from specllama.tui.state import Preferences

PARAMS = GenerateParams(seed=4, max_tokens=40, sampling=SamplingParams(temperature=0.7))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with served(tmp_path_factory, table(tmp_path_factory.mktemp("tables"))) as running:
        yield running


@contextmanager
def served(factory: pytest.TempPathFactory, recipe: LoadEngine) -> Iterator[Serving]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(factory.mktemp("home")))
        with serving(recipe) as running:
            yield running


def over(server: Serving, **more: Any) -> dict[str, Any]:
    return {"server": Address(server.url), "factory_for": None, "params": PARAMS, **more}


def said(d: Driver, words: str) -> bool:
    return any(words in notice.message for notice in d.app._notifications)


async def begun(d: Driver) -> None:
    """At once, for the bundled pair is quick."""
    async with asyncio.timeout(d.limit_s):
        while not (d.app.chat.live_record and d.app.chat.live_record.rounds):
            await asyncio.sleep(0.002)


async def test_a_chat_over_a_server(start: Any, server: Serving) -> None:
    async with start(**over(server, size=(120, 30))) as d:
        await d.say("the rain")
        prompt = [Message("user", "the rain")]
        *_, here = server.host.generate(prompt, PARAMS.replace(proposer="none"))
        assert d.texts == [("user", "the rain"), ("assistant", here.text)]
        record = d.app.chat.records[1]
        assert len(record.rounds) == record.finished.rounds  # for strip, panel and inspector
        assert server.url.rpartition("/")[2] in d.shown
        assert d.app.loader.info == server.host.info
        assert "GB left" not in d.shown  # nobody here knows the memory there
    assert Preferences.load().last_target == ""


async def test_what_a_server_decides_is_not_offered(start: Any, server: Serving) -> None:
    async with start(**over(server)) as d:
        assert "Models" not in d.shown
        assert "f6" not in d.shown
        await d.press("f6", until=lambda: said(d, "specllama top"))
        await d.press("f8", until=lambda: isinstance(d.app.screen, SettingsScreen))
        assert not d.app.screen.query("#set-n_ctx")
        assert d.app.screen.query("#set-on_full")
        await d.pilot.press("ctrl+s")
        await d.say("still there?")


async def test_nobody_there_is_said_and_tried_again(start: Any) -> None:
    async with start(server=Address("http://127.0.0.1:9"), factory_for=None, wait=False) as d:
        await d.until(lambda: d.notes)
        await d.until(lambda: "no server" in d.shown)
        assert "no server answers" in d.notes[0]
        assert "F6 chooses" not in d.shown
        await d.send("kept", until=lambda: len(d.notes) == 2 and d.app.chat.prompt.text == "kept")


async def test_an_engine_that_died_is_back_with_the_next_message(start: Any) -> None:
    dies = Reply("Half of it was", raise_first=EngineDied("it ended"))
    recipe = Recipe(ScriptedEngine([dies, "Here again.", dies, "And again."]))
    async with start(recipe=recipe) as d:
        await d.say("one")
        await d.until(lambda: d.notes == ["it ended"])
        await d.until(lambda: "Ctrl+R asks again" in d.shown and "not loaded" in d.shown)
        recipe.error = EngineDied("not yet")
        await d.send("two", until=lambda: len(d.notes) == 2 and d.app.chat.prompt.text == "two")
        recipe.error = None
        await d.press("enter", until=lambda: d.texts[-1] == ("assistant", "Here again."))
        await d.until(lambda: "not loaded" not in d.shown)
        assert [text for _, text in d.texts] == ["one", "two", "Here again."]
        await d.say("three")
        await d.until(lambda: d.app.loader.failed)
        await d.press("ctrl+r", until=lambda: d.texts[-1] == ("assistant", "And again."))
        await d.until(lambda: d.app.loader.ready)


@pytest.mark.e2e
async def test_the_bundled_pair_over_a_server(
    start: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its text, a stop, and the death of the server's engine."""
    recipe = LoadEngine("tiny", None, EngineOptions(parallel=2, n_ctx=8192, threads=1))
    params = PARAMS.replace(max_tokens=8000, ignore_eos=True)
    prompt = [Message("user", "Explain what rain is.")]
    with served(tmp_path_factory, recipe) as server:
        async with start(**over(server, params=params, size=(120, 36))) as d:
            await asyncio.to_thread(server.chat, max_tokens=20)
            await d.send(prompt[0].content)
            await begun(d)
            d.app.chat.action_stop()
            await d.idle()
            await d.until(lambda: not server.queue.running)
            assert [*d.app.session.stored.values()][-1].state == "partial"
            [_, (_, first)] = d.texts
            await d.pilot.press("ctrl+r")
            await begun(d)
            assert server.host.pid is not None
            os.kill(server.host.pid, signal.SIGKILL)
            await d.until(lambda: d.notes)
            assert d.texts[0] == ("user", prompt[0].content)
            d.app.chat.set_params(params.replace(max_tokens=60))
            await d.press("ctrl+r", until=lambda: d.app.loader.ready and not d.app.chat.busy)
            *_, here = server.host.generate(prompt, params.replace(proposer="none", max_tokens=60))
            [_, (_, text)] = d.texts
            assert text == here.text
            assert first[:20] == text[:20]


# -- the app over another engine --


TEXT = script("vllm-0.32.0-draft")["tells"]["text"]
CARDED = GenerateParams(from_card=("min_p", "temperature", "top_k", "top_p"))

KEPT = Path(__file__).parent / "__snapshots__" / "scenes"
SIZES = ((60, 16), (80, 24), (120, 36))


def beside(url: str, **more: Any) -> dict[str, Any]:
    return {"server": Address(url), "factory_for": None, "params": CARDED, **more}


@pytest.mark.parametrize("size", [(80, 24), (140, 40)])
async def test_a_chat_over_vllm(start: Any, size: tuple[int, int]) -> None:
    with running("vllm-0.32.0-draft") as server:
        async with start(**beside(server.url, size=size)) as d:
            await d.say("What is a draft model?")
            assert d.texts == [("user", "What is a draft model?"), ("assistant", TEXT)]
            await d.until(lambda: "31 of 36" in d.shown)
            assert " weights" not in d.shown  # nobody here knows its memory
            assert "0 rounds" not in d.shown
            for key in ("f3", "f4", "f5"):  # they are made of rounds
                await d.pilot.press(key)
                await d.until(lambda: any("does not tell its rounds" in notice.message
                                          for notice in d.app._notifications))  # fmt: skip
                assert len(d.app.screen_stack) == 2
                d.app.clear_notifications()


async def test_a_reply_of_another_engine_is_stored_with_its_name(start: Any) -> None:
    with running("sglang-0.5.23") as server:
        async with start(**beside(server.url)) as d:
            await d.say("What?")
            session = d.app.session
            [_, reply] = d.app.store.get(session.id).tree.messages.values()
            stored = reply.stats
            assert (stored["engine"], stored["counted"]) == ("SGLang 0.5.23", 7)
            assert (stored["draft_n"], stored["draft_at_most"]) == (9, True)
            assert stored["rounds"] is stored["seed"] is None
            identity = session.id
        async with start(**beside(server.url, session_id=identity)) as d:
            await d.until(lambda: "4 of ≤ 9" in d.shown)
            assert d.app.chat.records[1].finished.tokens == 7


@pytest.mark.usefixtures("one_machine")
@pytest.mark.parametrize("name", ["vllm-0.32.0-draft", "mlx-lm-0.32.2-draft"])
async def test_every_size(
    name: str, start: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat and its figures (F12): of one that tells all, and of one that tells nothing. After
    looking: ``pytest tests/tui --snapshot-update``."""
    ticks = itertools.count()
    monkeypatch.setattr(foreign, "perf_counter", lambda: next(ticks) * 0.05)
    monkeypatch.setattr(foreign, "EVERY_S", 3600.0)  # one look
    kept = KEPT / f"over-{name}.txt"
    draws_anew = request.config.option.update_snapshots
    pages, drawn = {} if draws_anew else read_pages(kept), {}
    with running(name) as server:
        async with start(**beside(server.url, size=SIZES[0])) as d:
            await d.say("What is a draft model?")
            for place, key in (("chat", ""), ("figures", "f12")):
                for width, height in SIZES:
                    await d.pilot.resize_terminal(width, height)
                    if key:
                        await d.pilot.press(key)
                    d.app.clear_notifications()
                    page = f"{place}-{width}x{height}"
                    drawn[page] = shown = await settled(d.app, d.pilot, pages.get(page))
                    if key:
                        await d.pilot.press(key)
                    if not draws_anew:
                        assert shown == pages[page]
    if draws_anew:
        write_pages(kept, drawn)

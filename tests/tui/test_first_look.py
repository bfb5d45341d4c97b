"""The first launch: a demonstration that ends by itself, and says what to do next."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import ggufs
import pytest
from app_driver import GatedEngine, Recipe
from fakes import Reply, ScriptedEngine, engine_info, model_info
from packages import only_index, write_wheel

from specllama import paths
from specllama.models import catalog, memory, package_index
from specllama.models.judgement import FAST_ENOUGH, Machine
from specllama.settings.params import GenerateParams
from specllama.store.message_tree import StoredMessage
from specllama.store.sessions import SessionStore
from specllama.text import size
from specllama.tui.downloads import Download, DownloadTold
from specllama.tui.state import Preferences
from specllama.tui.widgets import first_look
from specllama.tui.widgets.drafted import RoundsRow
from specllama.tui.widgets.first_look import FirstLook, recording
from specllama.tui.widgets.welcome import BUNDLED_EXAMPLES, EXAMPLES, SHORT, Welcome, difference

RECORDED = Path(first_look.__file__).parents[1] / "recorded.jsonl"
FIVE = ("F1", "F2", "F3", "F4", "F6")


@pytest.fixture(autouse=True)
def _never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    Preferences.path().unlink()
    monkeypatch.setattr(first_look, "FRAMES", 1 / 3600)  # the test plays


async def test_the_first_launch_plays_a_recorded_reply_and_then_says_what_to_do(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "total_memory", lambda: 16_000_000_000)
    async with start(target="tiny", size=(80, 24)) as d:
        look = d.app.chat.query_one(FirstLook)
        assert "A recording: SmolLM2 135M Instruct with its head, BF16" in d.shown
        assert (
            size(json.loads(RECORDED.read_text("utf-8").splitlines()[0])["target"]["file_bytes"])
            in d.shown
        )
        assert recording().question in d.shown
        assert "reads them all in one pass" in d.shown
        half = recording().seconds / 2
        await look.play(half)
        await d.pilot.pause()
        # the same row of rounds and strip as for a reply
        played = look.record.rounds
        assert 0 < len(played) < len(recording().rounds)
        assert list(d.app.chat.query_one(RoundsRow)._rounds) == played
        assert "a recording" in d.shown
        assert "tok/s" in d.shown
        assert " ".join("".join(played[0].emitted_text).split()) in d.shown
        await look.play(recording().seconds + 2)
        await d.until(lambda: "Guess, check, keep" in d.shown)
        assert look.over
        assert not d.app.chat.query_one(RoundsRow)._rounds
        for words in (*BUNDLED_EXAMPLES, *FIVE, "kept", "refused"):
            assert words in d.shown
        pair = d.app.loader.machine.recommended()
        assert f"{pair.name}, {size(pair.bytes)} to download" in d.shown
        await d.say("Hello")
        assert not d.app.chat.query(FirstLook)


async def test_typing_ends_the_recording(start: Any) -> None:
    async with start("Yes.", size=(80, 24)) as d:
        await d.app.chat.query_one(FirstLook).play(1.0)
        await d.say("Hello")
        assert "Yes." in d.shown
        assert "a recording" not in d.shown
        assert d.app.chat.shown_record() is list(d.app.chat.records.values())[-1]
        await d.press("ctrl+n", until=lambda: not d.texts)
        assert d.app.chat.shown_record() is None
        assert not d.app.chat.query_one(RoundsRow)._rounds


async def test_another_conversation_ends_the_recording(start: Any) -> None:
    async with start(size=(80, 24)) as d:
        await d.app.chat.query_one(FirstLook).play(1.0)
        await d.press("ctrl+n", until=lambda: not d.app.chat.query(FirstLook))
        await d.until(lambda: "a recording" not in d.shown)
        assert d.app.chat.shown_record() is None


async def test_the_recording_ends_by_its_own_clock(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_look, "FRAMES", 20)
    monkeypatch.setattr(first_look, "PLAY_S", 0.3)
    async with start(target="tiny", size=(100, 30)) as d:
        await d.until(lambda: "drafts all the same" in d.shown)
        assert "Guess, check, keep" in d.shown
        assert "a recording" not in d.shown


async def test_the_app_may_end_while_it_plays(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_look, "FRAMES", 200)
    async with start() as d:
        look = d.app.chat.query_one(FirstLook)
        await d.until(lambda: look.record.rounds)
    assert not look.record.live


def test_the_recording_is_of_a_pair_that_drafting_helps() -> None:
    found = recording()
    assert found.finished.verdict.answer == "faster"
    assert found.result
    drafting = [done for done in found.rounds if done.drafted]
    assert len(drafting) > len(found.rounds) / 2
    assert sum(done.accepted for done in drafting) == found.finished.draft_n_accepted
    text = "".join(piece for done in found.rounds for piece in done.emitted_text)
    assert found.finished.text.startswith(text[:40])
    assert RECORDED.stat().st_size < 60_000
    assert "/" not in json.loads(RECORDED.read_text("utf-8").splitlines()[0])["target"]["path"]


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("size", [(60, 16), (80, 24), (120, 36)])
async def test_what_was_recorded_stands_beside_an_offer_of_that_very_file_only(
    start: Any, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], same: bool
) -> None:
    shown = replace(recording(), offered=same)
    monkeypatch.setattr(first_look, "recording", lambda: shown)
    async with start(target="tiny", size=size) as d:
        look, seen = d.app.chat.query_one(FirstLook), [d.shown]
        await look.play(shown.seconds)
        await d.pilot.pause()
        seen.append(d.shown)
        await look.play(1e6)
        await d.until(lambda: "Guess, check, keep" in d.shown)
        seen.append(d.shown)
        gain = shown.result.split()[0]
        beside = [text for text in seen if "Ctrl+L" in text and gain in text]
        assert bool(beside) == (same and size[1] >= SHORT)
        assert "Ctrl+L" in seen[-1], "the offer itself stays"


def test_the_recording_says_if_it_is_of_the_file_that_is_offered() -> None:
    told = json.loads(RECORDED.read_text("utf-8").splitlines()[0])["target"]
    offered = catalog.load()[catalog.FIRST].target
    assert recording().offered == (told["quantization"] == offered.hub.quant)


async def test_the_first_chat_of_the_bundled_pair_shows_drafting(start: Any) -> None:
    async with start("Yes.", "No.", target="tiny", size=(120, 30)) as d:
        await d.app.chat.query_one(FirstLook).play(1e6)
        await d.until(lambda: "drafting switch itself" in d.shown)
        await d.say("Hello")
        asked = d.engine.requests[0].params
        assert (asked.window, asked.draft_max) == ("fixed", 4)
        words = "demonstration: drafting is forced on, it does not pay for a model this small"
        assert words in d.shown
        # the conversation alone: nothing of it is stored, and the next one has the usual
        assert d.app.store.get(d.app.session.id).settings == {"set": {}}
        await d.press("ctrl+n", until=lambda: not d.texts)
        await d.say("Hello")
        assert d.engine.requests[1].params == GenerateParams(owner=d.app.session.id)
        assert "demonstration" not in d.shown


async def test_one_key_leads_from_the_demonstration_to_auto(start: Any) -> None:
    async with start("Yes.", "No.", target="tiny", size=(80, 24)) as d:
        await d.say("Hello")
        assert "F9 lets it decide" in d.shown
        await d.press("f9", until=lambda: "demonstration" not in d.shown)
        await d.say("Again")
        asked = d.engine.requests[1].params
        assert (asked.window, asked.draft_max, asked.speculate) == ("auto", None, True)
        assert d.app.store.get(d.app.session.id).settings == {"set": {}}


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (120, 30)])
async def test_the_label_leaves_room_for_the_speed(start: Any, size: tuple[int, int]) -> None:
    said = Reply("One two three four five six seven eight nine ten.", plain_ms=None)
    async with start(said, target="tiny", size=size) as d:
        await d.say("Hello")
        assert "demonstration" in d.shown
        assert re.search(r"F9 (lets it decide|decides)", d.shown)
        assert size[0] < 80 or "Not known yet" in d.shown
        assert re.search(r"\d tok/s", d.shown)


async def test_one_key_gets_a_real_model_and_opens_it(
    start: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nobody_else: Path
) -> None:
    data = ggufs.write_llama(tmp_path / "small.gguf", quant="F32").read_bytes()
    only_index(monkeypatch, tmp_path / "shelf", data)
    asked: list[tuple[str, str | None]] = []
    recipe = Recipe(ScriptedEngine(["Yes.", "No."]))

    def factory(target: str, draft: str | None) -> Recipe:
        asked.append((target, draft))
        recipe.engine.info = engine_info(target=model_info(path=target))
        return recipe

    async with start(recipe=recipe, factory_for=factory, target="tiny", size=(100, 30)) as d:
        await d.app.chat.query_one(FirstLook).play(1e6)
        offer = "Ctrl+L gets a real model: SmolLM2 135 M, 98 MB, Apache-2.0"
        await d.until(lambda: offer in d.shown)
        assert d.app.session.lent
        # without a network: a sentence, and the same key tries again
        await d.press("ctrl+l", until=lambda: "F6 s" in d.shown and "smollm2-135m" in d.shown)
        await d.until(lambda: not d.app.downloads.all[catalog.FIRST].active)
        assert "No matching distribution" in d.app.downloads.all[catalog.FIRST].error.message
        assert len(asked) == 1
        write_wheel(tmp_path / "shelf", data)
        await d.press("ctrl+l", until=lambda: len(asked) == 2 and d.app.loader.ready)
        assert asked[-1] == (f"{catalog.find(catalog.FIRST).target.ref}", "none")
        await d.until(lambda: EXAMPLES[0] in d.shown)
        assert "Ctrl+L" not in d.shown
        await d.say("Hello")  # guesses are still shown, until a new chat or F9
        assert d.engine.requests[-1].params.window == "fixed"
        assert d.app.session.lent
        await d.press("f9", until=lambda: not d.app.session.lent)
        await d.say("Hello again")
        assert d.engine.requests[-1].params.window == "auto"
    assert Preferences.load().last_target == asked[-1][0]


async def test_a_model_that_arrives_interrupts_nothing(start: Any) -> None:
    def arrived() -> Download:
        return Download("real", state="done", opens=True, target="real")

    engine = GatedEngine(["one two three four five six", "Yes."])
    async with start(recipe=Recipe(engine), target="tiny", size=(100, 30)) as d:
        await d.send("Hello", until=lambda: d.rounds == 3)
        d.app.downloads.all["real"] = arrived()
        d.app.post_message(DownloadTold(over=d.app.downloads.all["real"]))
        await d.until(lambda: "real is here: Ctrl+L loads it" in d.shown)
        engine.gate.set()
        await d.idle()
        assert d.app.loader.wanted == ("tiny", None)
        await d.press("ctrl+l", until=lambda: d.app.loader.wanted == ("real", "none"))
        await d.ready()
        # and another model that was chosen stays
        d.app.downloads.all["real"] = arrived()
        d.app.switch_model(("other", None))
        await d.until(lambda: d.app.loader.wanted == ("other", None) and d.app.loader.ready)
        d.app.post_message(DownloadTold(over=d.app.downloads.all["real"]))
        await d.until(lambda: "real is here: Ctrl+L loads it" in d.shown)
        assert d.app.loader.wanted == ("other", None)


async def test_the_app_that_ends_leaves_nothing_of_a_package(
    start: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nobody_else: Path
) -> None:
    only_index(monkeypatch, tmp_path, b"a model")
    monkeypatch.setattr(package_index, "_command", lambda *a: ["sh", "-c", "exec sleep 60"])
    async with start(target="tiny") as d:
        await d.press("ctrl+l", until=lambda: list(paths.models_dir().rglob(".package-*")))
    assert not list(paths.models_dir().rglob(".package-*"))


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
            await d.press("tab", until=lambda example=example: d.app.chat.prompt.text == example)
        await d.type("my own words")
        await d.pilot.press("tab")
        assert d.app.chat.prompt.text == "my own words"
        await d.say("go")
        await d.pilot.press("tab")  # now there are messages to go to
        assert d.app.chat.prompt.text == ""


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (120, 36)])
async def test_all_that_is_said_is_seen(start: Any, size: tuple[int, int]) -> None:
    for first in (True, False):
        Preferences(first_look=first).save()
        async with start(target="tiny", size=size) as d:
            if first:
                await d.app.chat.query_one(FirstLook).play(1e6)
            await d.until(lambda: "Guess, check, keep" in d.shown)
            await d.until(lambda: "to download" in d.shown)
            assert "more below" not in d.shown
            for words in (*FIVE, BUNDLED_EXAMPLES[0]):
                assert words in d.shown, d.shown
            lines = [line.strip() for line in d.shown.split("\n")]
            above = next(i for i, line in enumerate(lines) if line.startswith("Guess")) - 1
            assert above <= size[1] // 3, d.shown


async def test_it_is_shown_once(start: Any) -> None:
    async with start() as d:
        assert d.app.chat.query(FirstLook)
    async with start() as d:
        assert not d.app.chat.query(FirstLook)
        assert d.app.chat.query(Welcome)


@pytest.mark.parametrize("gigabytes", [4, 8, 16, 64])
def test_the_pair_fits_the_machine(gigabytes: int) -> None:
    pair = Machine(gigabytes * 1e9, cores=16).recommended()
    assert pair.draft is not None
    assert pair.memory_gb <= gigabytes * 1.05
    assert catalog.find(pair.name) == pair
    assert Machine(1e9, cores=16).recommended() is None


def test_few_cores_are_offered_what_they_can_run() -> None:
    """By memory alone, 25 GB of a machine with two cores are offered a target of 27 B."""
    slow, fast = Machine(25e9, cores=2), Machine(25e9, cores=2, on_gpu=True)
    small, large = slow.recommended(), fast.recommended()
    assert small.target.params <= 4e9 < 20e9 < large.target.params
    assert (slow.judge(small).plain or 0) >= FAST_ENOUGH > (slow.judge(large).plain or 99)


async def test_a_narrow_header_keeps_the_promise_and_what_the_draft_differs_in(start: Any) -> None:
    name = "qwen2.5-coder-{}b-instruct-q4_k_m"
    target, draft = (
        model_info(role, name=name.format(n), quantization="Q4_K_M")
        for role, n in (("target", 1.5), ("draft", 0.5))
    )
    engine = ScriptedEngine(["Yes."])
    engine.info = engine_info(target=target, draft=draft)
    async with start(recipe=Recipe(engine), size=(90, 24)) as d:
        assert "1.5b-instruct-q4_k_m + 0.5b  drafting: exact" in d.shown
        await d.pilot.resize_terminal(130, 36)
        await d.until(lambda: f"+ {draft.name}  drafting: exact" in d.shown)
    assert difference("a-q8_0", "b-q4_0") == "a-q8_0"
    assert difference("same-1b", "same-1b") == "1b"

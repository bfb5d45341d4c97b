"""The panel of live figures: what it shows, where it stands, what it leaves out."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from app_driver import Driver, GatedEngine, Recipe, record_of
from fakes import Reply, ScriptedEngine, engine_info

from specllama.events import PrefillProgress, RoundDone, Started
from specllama.figures import Figures
from specllama.settings.params import GenerateParams
from specllama.told import news
from specllama.tui.record import Record
from specllama.tui.themes import DARK, UNICODE, ink_for
from specllama.tui.widgets.panel import Drawing, LivePanel, Section, layout
from specllama.tui.widgets.stats_strip import StatsStrip, StripState, reading

INK = ink_for(DARK)
LONG = "The target reads all the guesses in a single pass and keeps those it agrees with. " * 4
TITLES = ("Kept by depth", "Time for a token", "First token after", "Context", "Memory")


def record(reply: Reply, **params: Any) -> Record:
    asked = GenerateParams(seed=1, draft_max=4, **params)
    return record_of("t", ScriptedEngine([reply]).generate("x y z", asked))


def text(sections: list[Section], width: int = 42) -> str:
    return "\n".join(line.plain for s in sections for line in s.draw(INK, width))


def drawn(reply: Record, width: int = 42, free: int = 0) -> str:
    info = engine_info(device="CPU")
    return text(Drawing(UNICODE, INK, width).all(reply, StripState(), info, free), width)


@pytest.mark.parametrize("rounds", [99, 100, 928, 9999])
def test_bars_stay_within_their_line(rounds: int) -> None:
    drawing = Drawing(UNICODE, INK, 42)
    assert drawing.bar("guess 1", rounds, rounds, f"100% of {rounds}", INK.good).cell_length == 42


# ---- figures


def of(record: Record) -> Figures:
    found = record.figures()
    assert found is not None
    return found


def test_the_figures_are_those_of_the_events() -> None:
    reply = record(Reply(LONG, accept=(3, 1)))
    done = reply.finished
    took = of(reply)
    assert tuple((at.accepted, at.drafted) for at in took.by_depth) == tuple(
        zip(done.accepted_per_position, done.drafted_per_position, strict=True)
    )
    assert took.token_ms == pytest.approx(done.timings.decode_ms / (len(done.token_ids) - 1))
    assert took.plain_ms == reply.rounds[-1].plain_ms
    assert reply.context() == (done.prompt_n + len(done.token_ids), done.n_ctx)


def test_the_first_token_is_the_same_before_and_after_the_end() -> None:
    reply = record(Reply(LONG))
    after = of(reply).first
    before = of(dataclasses.replace(reply, ends={})).first
    assert before is not None
    assert after.total == pytest.approx(after.tokenize + after.queue + after.prefill + after.step)
    assert dataclasses.astuple(before) == pytest.approx(dataclasses.astuple(after))


def test_the_figures_of_a_stored_reply_come_from_its_last_event() -> None:
    whole = record(Reply(LONG, accept=(2,)))
    assert whole.finished is not None
    stored = record_of("t", [whole.finished])
    assert of(stored).by_depth == of(whole).by_depth
    assert of(stored).token_ms == pytest.approx(of(whole).token_ms)
    assert "Kept by depth" in drawn(stored)
    assert "Round" not in drawn(stored)


def test_a_plain_step_is_known_from_the_engine_or_from_plain_steps() -> None:
    whole = record(Reply(LONG))
    assert of(whole).plain_ms == whole.rounds[-1].plain_ms
    unknown = [dataclasses.replace(done, plain_ms=None) for done in whole.rounds]
    assert of(dataclasses.replace(whole, rounds=unknown)).plain_ms is None
    plain = record(Reply(LONG), speculate=False).rounds
    assert of(dataclasses.replace(whole, rounds=[*unknown, *plain])).plain_ms == plain[1].took_ms
    assert of(dataclasses.replace(whole, rounds=[*unknown, *plain[:4]])).plain_ms is None
    assert of(dataclasses.replace(whole, rounds=plain)).plain_ms is None  # it is plain itself


def test_a_live_reply_fills_the_context_as_it_grows() -> None:
    whole = record(Reply(LONG))
    started, done = whole.starts[0][1], whole.rounds[0]
    live = Record("t", live=True)
    assert live.context() is None
    live.take(news(started))
    assert live.context() == (started.prompt_n, started.n_ctx)
    live.add([done])
    assert live.context() == (started.prompt_n + 1, started.n_ctx)


# ---- drawing


@pytest.mark.parametrize("width", [24, 36, 42, 60])
@pytest.mark.parametrize("tree", [False, True])
def test_nothing_is_wider_than_the_panel(width: int, tree: bool) -> None:
    reply = record(Reply(LONG, accept=(3, 0, 4), tree=tree))
    for done in reply.rounds:
        one = dataclasses.replace(reply, rounds=[done])
        info = engine_info(device="CPU")
        for section in Drawing(UNICODE, INK, width).all(one, StripState(), info, 9 << 30):
            for line in section.draw(INK, width):
                assert line.cell_length <= width, line.plain


def test_what_is_not_known_is_left_out() -> None:
    plain = drawn(record(Reply(LONG), speculate=False))
    assert "Kept by depth" not in plain
    assert "draft " not in plain.partition("Memory")[0]
    assert "Loss limit" not in plain
    assert "–" not in plain
    assert "3.2 GB left" in drawn(record(Reply(LONG)), free=3 << 30)
    assert "left" not in drawn(record(Reply(LONG)))


def test_the_balance_and_the_reason_for_the_window() -> None:
    reply = record(Reply(LONG))
    last = dataclasses.replace(
        reply.rounds[-1], balance=6.25, draft_max=0, window_reason="unsure: 12% likely"
    )
    reply.rounds[-1] = last
    shown = drawn(reply)
    assert "Loss limit left" in shown
    assert "6.2 plain steps" in shown
    assert "Not drafting: unsure: 12% likely." in shown
    reply.rounds[-1] = dataclasses.replace(last, window_reason="")
    assert "Not drafting." in drawn(reply)


def sections(*heights: int) -> list[Section]:
    line = Drawing(UNICODE, INK, 20).words("x")[0]
    return [Section(f"S{i}", "f", [line] * (n - 1)) for i, n in enumerate(heights)]


def test_sections_that_do_not_fit_are_left_out_whole() -> None:
    shown = layout(sections(4, 6, 2), INK, 20, 9, 1).plain.splitlines()
    assert [line.split()[0] for line in shown if line.startswith("S")] == ["S0", "S2"]
    assert len(shown) == 7  # with a blank line between


def test_columns_are_about_as_long() -> None:
    shown = layout(sections(4, 4, 4, 4), INK, 20, 40, 2).plain.splitlines()
    assert len(shown) == 9
    assert shown[0].split() == ["S0", "f", "S2", "f"]


# ---- in the app


async def shown_when(d: Driver, true: Callable[[str], bool]) -> str:
    await d.until(lambda: true(d.shown))
    return d.shown


async def test_it_stands_beside_the_conversation_from_120_columns(start: Any) -> None:
    async with start(Reply(LONG, accept=(3, 1)), size=(120, 36)) as d:
        panel = d.app.chat.query_one(LivePanel)
        assert not panel.display  # nothing to show yet
        await d.say("Hello?")
        assert panel.display
        for title in TITLES:
            assert title in d.shown
        await d.pilot.press("f12")
        assert not panel.display
        assert not d.app.prefs.show_panel
        await d.pilot.press("f12")
        assert panel.display


@pytest.mark.parametrize("size", [(80, 24), (119, 40)])
async def test_below_it_is_a_tab_and_the_strip_stays(start: Any, size: tuple[int, int]) -> None:
    async with start(Reply(LONG, accept=(3, 1)), size=size) as d:
        await d.say("Hello?")
        assert "Kept by depth" not in d.shown
        assert "Figures" in d.shown
        await d.pilot.press("f12")
        shown = d.shown
        for title in TITLES:
            assert title in shown
        assert "reads all the guesses" not in shown
        assert "tok/s" in shown
        await d.pilot.click("#panel-tabs", offset=(3, 0))
        assert "Kept by depth" not in d.shown
        await d.pilot.click("#panel-tabs", offset=(18, 0))
        assert "Kept by depth" in d.shown


async def test_it_follows_the_reply_that_is_being_written(start: Any) -> None:
    engine = GatedEngine([Reply(LONG, accept=(2,))], rounds=5)
    async with start(size=(120, 36), recipe=Recipe(engine)) as d:
        d.app.chat.prompt.put("Hello?")
        await d.pilot.press("enter")
        await shown_when(d, lambda shown: "Kept by depth" in shown)
        assert "First token after" in d.shown
        before = len(d.app.chat.records[1].rounds)
        engine.gate.set()
        await d.idle()
        (after,) = d.app.chat.records.values()
        assert len(after.rounds) > before
        assert f"of {of(after).by_depth[0].drafted}" in d.shown


async def test_the_prompt_is_read_before_anything_else_is_known(start: Any) -> None:
    async with start(Reply(LONG, prefill_delay_s=0.3), size=(120, 36)) as d:
        d.app.chat.prompt.put("Hello? " * 40)
        await d.pilot.press("enter")
        await shown_when(d, lambda shown: "Reading the prompt" in shown)
        await d.idle()
        assert "Reading the prompt" not in d.shown


def test_the_memory_is_not_looked_at_for_every_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr("specllama.models.memory.available_memory", lambda: looked.append(1) or 7)
    now = [0.0]
    panel = LivePanel(StripState(), lambda: None, lambda: None, clock=lambda: now[0])
    for _ in range(5):
        assert panel.free == 7
    assert len(looked) == 1
    now[0] += 10
    assert panel.free == 7
    assert len(looked) == 2


def test_events_say_what_the_panel_needs() -> None:
    started = next(
        event
        for event in ScriptedEngine([Reply()]).generate("x", GenerateParams(seed=1))
        if isinstance(event, Started)
    )
    assert started.tokenize_ms > 0
    assert {f.name for f in dataclasses.fields(RoundDone)} >= {"balance", "plain_ms", "chances"}


async def test_the_progress_of_a_prompt_says_how_long_it_takes(start: Any) -> None:
    words = " reading the prompt: 1,234 of 2,886 tokens"
    async with start() as d:
        strip = d.app.chat.query_one(StatsStrip)

        def drawn(progress: PrefillProgress, width: int) -> str:
            return reading(progress, width, strip.glyphs, strip.ink).plain

        some = PrefillProgress(1234, 2886, 361, left_ms=12_400.0)
        assert drawn(some, 120).endswith(f"{words}, about 12 s left, 361 were cached")
        assert drawn(some, 70).endswith(f"{words}, about 12 s left")
        assert drawn(PrefillProgress(1, 9, 0), 80).endswith(" reading the prompt: 1 of 9 tokens")


@pytest.mark.parametrize(("words", "said"), [(None, "403 MB weights"), (32768, "of 32,768 words")])
def test_the_memory_names_the_draft_model_that_runs(words: int | None, said: str) -> None:
    info = engine_info()
    draft = dataclasses.replace(info.target, file_bytes=398_000_000, draft_tokens=words)
    info = dataclasses.replace(info, draft=draft)
    *_, section = Drawing(UNICODE, INK, 42).room(None, info, 0)
    assert text([section]).startswith(f"Memory  398 MB draft  {said}")

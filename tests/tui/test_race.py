"""The race: what is run, what is shown of it, and what is advised."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from app_driver import Driver, GatedEngine, Recipe
from demo_engine import DemoEngine
from fakes import OTHER_MS, VERIFY_MS, Reply, ScriptedEngine

from specllama.bench import outcome
from specllama.bench.experiment import DRAFTED, PLAIN, Run, drafted, plain_and
from specllama.bench.outcome import RaceBoard, ratio_words
from specllama.errors import EngineError
from specllama.events import Event, PrefillProgress
from specllama.interface import Message
from specllama.settings.params import GenerateParams
from specllama.tui.race_runner import Advice, RaceEnded, Racing, advise, advise_among
from specllama.tui.screens.race_screen import RaceScreen
from specllama.tui.themes import DARK, Glyphs, ink_for
from specllama.tui.widgets import race_tables
from specllama.tui.widgets.playground import Playground, Slider, SpeedChart
from specllama.tui.widgets.race_tables import MethodList
from specllama.tui.widgets.race_tables import raced as raced_today

LONG = " ".join(f"word{i}" for i in range(80))
PARAMS = GenerateParams(seed=5, draft_max=4)
Shown = TypeVar("Shown")


def raced(engine: ScriptedEngine, runs: list[Run]) -> RaceEnded:
    told: list[Any] = []
    racing = Racing(engine, told.append)
    racing.start(runs)
    racing.thread.join(30)
    assert isinstance(told[-1], RaceEnded)
    return told[-1]


def race(
    reply: Reply, params: GenerateParams = PARAMS, laps: int = 1, **ways: GenerateParams
) -> list[Run]:
    chosen = ways or {DRAFTED: drafted(params)}
    runs = [
        run
        for lap in range(laps)
        for run in plain_and([Message("user", "q")], params, list(chosen.items()), lap)
    ]
    assert raced(ScriptedEngine([reply]), runs).error is None
    return runs


def way(reply: Reply, laps: int = 3, tab: str = "race") -> outcome.Way:
    (found,) = outcome.ways(RaceBoard({tab: race(reply, laps=laps)}), tab)
    return found


def test_runs_differ_in_nothing_but_how_they_draft() -> None:
    engine = ScriptedEngine([Reply(LONG)])
    runs = plain_and(
        [Message("user", "q")], PARAMS.replace(max_tokens=9), [(DRAFTED, drafted(PARAMS))]
    )
    raced(engine, runs)
    asked = [r.params for r in engine.requests if r.prompt != "."]
    assert [(p.seed, p.max_tokens, p.speculate) for p in asked] == [(5, 9, False), (5, 9, True)]
    # each of them begins with an empty cache
    assert [r.prompt == "." for r in engine.requests] == [True, False, True, False]


def test_without_a_seed_one_is_chosen_for_both() -> None:
    runs = race(Reply(LONG), GenerateParams())
    assert {run.finished.seed for run in runs if run.finished} == {1}


def test_drafting_is_on_in_a_race_even_where_it_is_off_today() -> None:
    for off in ({"speculate": False}, {"proposer": "none"}, {"draft_max": 0}):
        way = drafted(PARAMS.replace(**off))  # type: ignore[arg-type]
        assert way.speculate
        assert way.proposer != "none"
        assert way.draft_max != 0


def test_every_second_lap_goes_the_other_way_round() -> None:
    names = [run.name for run in race(Reply(LONG), laps=4)]
    assert names == [PLAIN, DRAFTED, DRAFTED, PLAIN, PLAIN, DRAFTED, DRAFTED, PLAIN]


def test_the_verdict_is_the_ratio_of_the_speeds_that_are_shown() -> None:
    """By the clock of whole runs, whatever the engine thinks of a plain step."""
    found = way(Reply(LONG, accept=(2,), plain_ms=1e9))
    one = VERIFY_MS + OTHER_MS
    assert found.verdict.answer == "faster"
    assert found.plain is not None
    assert found.speed is not None
    assert found.verdict.ratio == pytest.approx(found.speed / found.plain)
    assert found.verdict.ratio == pytest.approx(3 * one / (one + 3.0), rel=0.03)
    assert found.pairs == 3


def clocked(*seconds: tuple[float, float]) -> outcome.Way:
    """Pairs of runs that took so long behind their first token, plainly and drafted."""
    runs = race(Reply(LONG, accept=(2,)), laps=len(seconds))
    for run in runs:
        whole = seconds[run.lap][run.name == DRAFTED]
        begin, end = run.ttft_s, run.end_s
        scale = whole / (end - begin)
        run.rounds = [replace(done, t_s=begin + (done.t_s - begin) * scale) for done in run.rounds]
    (found,) = outcome.ways(RaceBoard({"race": runs}), "race")
    return found


def test_what_is_said_and_what_is_shown_point_in_one_direction() -> None:
    """Plain 0.14 s beside drafted 0.08 s was called 0.85 times as fast."""
    faster = clocked((1.40, 0.80), (1.44, 0.81), (1.39, 0.83))
    assert outcome.answer(faster) == ("YES", f"drafting is {faster.verdict.ratio:.2f}× faster here")
    assert outcome.decided(faster)
    slower = clocked((1.0, 1.3), (1.02, 1.31), (0.99, 1.3))
    assert outcome.answer(slower)[0] == "NO"
    assert outcome.answer(slower)[1].startswith("plain decoding is 1.3")
    unsure = clocked((1.0, 0.7), (0.7, 1.0), (1.0, 0.9))
    assert outcome.answer(unsure)[0] == "CANNOT TELL YET"
    assert not outcome.decided(unsure)
    for one in (faster, slower, unsure):
        assert one.verdict.low is not None
        assert one.verdict.high is not None
        assert 0 < one.verdict.low < (one.verdict.ratio or 0) < one.verdict.high
    assert not outcome.decided(clocked((1.0, 0.5)))  # one pair proves nothing
    assert clocked((1.0, 0.5)).verdict.answer == "unknown"


def test_off_that_lost_says_what_probing_cost() -> None:
    runs = race(Reply(LONG, accept=(2,)), laps=3)
    for run in runs:
        if run.name == DRAFTED:  # a third of the run drafted in vain, then it was off
            begin = run.ttft_s
            run.rounds = [
                replace(
                    done,
                    drafted=(),
                    parents=(),
                    accepted=0,
                    draft_max=0,
                    emitted=done.emitted[:1],
                    t_s=begin + done.index * (0.020 + 0.0001 * run.lap),
                )
                for done in run.rounds
            ]
    (found,) = outcome.ways(RaceBoard({"race": runs}), "race")
    assert found.verdict.answer == "off"
    assert found.verdict.ratio is not None
    lost = f"{1 - found.verdict.ratio:.0%}"
    tried = replace(found, verdict=replace(found.verdict, drafted=found.verdict.tokens))
    off = f"drafting switches itself off here, after probing that cost {lost}"
    assert outcome.answer(tried) == ("NO", off)


def test_the_proof_counts_from_the_start() -> None:
    plain, way = race(Reply(LONG, accept=(2,)))
    n = len(plain.tokens)
    assert way.same(plain) == (n, n)
    wrong = replace(way.rounds[3], emitted=(1, *way.rounds[3].emitted[1:]))
    way.rounds[3] = wrong
    before = sum(len(done.emitted) for done in way.rounds[:3])
    assert way.same(plain) == (before, n)
    way.rounds[3:] = []
    assert way.same(plain) == (before, n)


def test_the_advice() -> None:
    good = way(Reply(LONG, accept=(2,))).verdict
    assert advise(PARAMS, good) == Advice("leave it as it is: drafting pays here")
    taken = advise(PARAMS.replace(speculate=False, max_tokens=7), good)
    assert taken.said.startswith("Press A to draft: at least ")
    assert (taken.params.speculate, taken.params.max_tokens, taken.params.seed) == (True, 7, 5)
    run = replace(race(Reply(LONG, accept=(4,)))[1], name="k = 4")
    advice = advise_among(PARAMS, good, [(run, way(Reply(LONG, accept=(4,))).verdict)])
    assert advice.params == run.params.replace(max_tokens=None)
    assert advice.said.startswith("Press A to draft with k = 4: at least ")
    kept = advise_among(PARAMS, good, [(run, way(Reply(LONG, accept=(1,))).verdict)])
    assert kept.params is None
    assert kept.words == "leave it as it is: no method is surely faster than today's settings"


def test_the_advice_where_drafting_does_not_pay() -> None:
    off = PARAMS.replace(speculate=False)
    bad = way(Reply(LONG, accept=(0,))).verdict
    losing = advise(PARAMS, bad)
    assert losing.said == "Press A to turn drafting off: it loses time here"
    assert losing.params == off
    assert advise(off, bad) == Advice("leave drafting off: it does not pay here")
    stays = advise(PARAMS, replace(bad, answer="off"))
    assert stays.params is None
    assert stays.words.endswith("stays off by itself")
    assert advise(off, replace(bad, answer="off")).said.startswith("Leave drafting off")
    unknown = advise(PARAMS, None)
    assert unknown.params is None
    assert "L races a longer one" in unknown.said
    run = race(Reply(LONG))[1]
    assert advise_among(PARAMS, bad, [(run, bad)]).words == ("no method beats plain decoding here")


def test_an_engine_that_fails_ends_the_race_with_its_words() -> None:
    runs = plain_and("q", PARAMS, [])
    assert raced(ScriptedEngine([Reply(raise_first=EngineError("no"))]), runs).error.message == "no"


# ---------------------------------------------------------------------- the page


async def opened(d: Driver, *keys: str) -> RaceScreen:
    await d.press("f4", until=lambda: isinstance(d.app.screen, RaceScreen))
    screen = d.app.screen
    await d.until(lambda: screen.raced() and outcome.ways(screen.board, "race"))
    await d.pilot.press(*keys)
    await d.pilot.pause()
    return screen


async def test_the_race_is_run_and_judged(start: Any) -> None:
    async with start(Reply(LONG, accept=(2,)), size=(120, 36), params=PARAMS) as d:
        await d.say("a question")
        screen = await opened(d)
        plain = screen.board.plain("race")
        assert [m.content for m in plain.prompt] == ["a question"]
        assert "█ █ █▀▀ █▀▀" in d.shown
        n = 3 * len(plain.tokens)
        assert f"✓ {n} of {n} tokens identical" in d.shown
        (found,) = outcome.ways(screen.board, "race")
        assert outcome.answer(found)[1] in d.shown
        assert ratio_words(found.verdict) in d.shown
        assert '"a question"' in d.shown
        assert "3 pairs of runs, by the clock" in d.shown
        assert "of those checked" in d.shown
        assert "Leave it as it is: drafting pays here" in d.shown


async def test_methods_are_raced_where_they_are_listed(start: Any) -> None:
    async with start(Reply(LONG), size=(120, 36), params=PARAMS) as d:
        screen = await opened(d, "2", "home", "down", "r")
        await d.until(lambda: len(outcome.ways(screen.board, "methods")) == 1 and screen.raced())
        chosen = screen.query_one(MethodList).chosen
        assert [way.run.name for way in outcome.ways(screen.board, "methods")] == [chosen.label]
        await d.press(
            "R", until=lambda: len(outcome.ways(screen.board, "methods")) == 4 and screen.raced()
        )
        await d.until(lambda: d.shown.count("raced, ") >= 2)
        assert "N-gram lookup" in d.shown


async def test_methods_can_be_chosen_while_a_reply_is_written(start: Any) -> None:
    engine = GatedEngine([LONG])
    async with start(recipe=Recipe(engine), params=PARAMS) as d:
        await d.send("a question", until=lambda: d.app.chat.busy)
        await d.press("f5", until=lambda: isinstance(d.app.screen, RaceScreen))
        await d.pilot.press("R")
        await d.until(lambda: any("being written" in n.message for n in d.app._notifications))
        assert not d.app.screen.board.runs  # type: ignore[attr-defined]
        engine.gate.set()
        await d.pilot.press("escape")


async def test_one_key_applies_what_was_best(start: Any) -> None:
    off = PARAMS.replace(speculate=False)
    async with start(Reply(LONG, accept=(2,)), params=off) as d:
        await opened(d)
        await d.press("a", until=lambda: not isinstance(d.app.screen, RaceScreen))
        assert d.app.session.params.speculate


async def test_leaving_stops_the_race_and_the_chat_goes_on(start: Any) -> None:
    engine = GatedEngine([LONG])
    async with start(recipe=Recipe(engine), params=PARAMS) as d:
        await d.press("f4", until=lambda: isinstance(d.app.screen, RaceScreen))
        await d.until(lambda: len(engine.requests) == 2 and engine.requests[1].rounds_done == 3)
        await d.press("escape", until=lambda: not isinstance(d.app.screen, RaceScreen))
        engine.gate.set()
        await d.say("now")
        assert d.texts[-1] == ("assistant", LONG)
        assert d.app.chat.board.plain("race") is None


async def test_a_message_is_raced_with_its_own_question(start: Any) -> None:
    async with start("One.", "Two.", params=PARAMS) as d:
        await d.say("first")
        await d.say("second")
        await d.pilot.press("shift+tab", "up", "up", "f4")
        await d.until(lambda: isinstance(d.app.screen, RaceScreen))
        screen = d.app.screen
        await d.until(lambda: not screen.racing.busy)
        assert [m.content for m in screen.setup.prompt] == ["first"]  # type: ignore[union-attr]


# ---------------------------------------------------------------------- draft lengths


async def test_the_sliders_move_the_model(start: Any) -> None:
    async with start("Ok.", size=(120, 36)) as d:
        screen = (await opened(d, "3")).query_one(Playground)
        assert screen.query_one("#k", Slider).has_focus
        await d.press("end", until=lambda: screen.k == 16)
        screen.query_one("#alpha", Slider).focus()
        await d.press("home", until=lambda: screen.model.alpha == 0)
        assert "No guess would pay" in d.shown
        await d.press(*["shift+right"] * 9, until=lambda: screen.model.alpha == pytest.approx(0.9))
        assert "A guess would pay" in d.shown
        assert "imaginary pair" in d.shown
        await d.pilot.click("#c", offset=(4, 0))
        await d.until(lambda: screen.model.c == 0.0)


async def test_the_theory_begins_with_the_figures_of_the_pair(start: Any) -> None:
    async with start(recipe=Recipe(DemoEngine()), size=(120, 36), params=PARAMS) as d:
        playground = (await opened(d, "3")).query_one(Playground)
        assert playground.model.alpha == pytest.approx(min(0.99, playground.pair.alpha), abs=0.006)
        assert "In theory, with your pair's figures" in d.shown
        await d.pilot.press("end")
        assert len(playground.query_one(SpeedChart).values) == 17
        playground.query_one("#alpha", Slider).value = 0.1
        await d.until(lambda: "an imaginary pair" in d.shown)
        await d.press("m", until=lambda: "your pair's figures" in d.shown)


class WithoutGuesses(ScriptedEngine):
    """A target alone, in a text that repeats nothing."""

    def generate(self, prompt: Any, params: GenerateParams, **options: Any) -> Iterator[Event]:
        return super().generate(prompt, params.replace(draft_max=0), **options)


async def test_where_nothing_guesses_no_race_begins_by_itself(start: Any) -> None:
    engine = WithoutGuesses([Reply(LONG)])
    engine.info = replace(engine.info, draft=None, methods=())
    async with start(recipe=Recipe(engine), size=(120, 36), params=PARAMS) as d:
        await d.say("a question")
        assert "only text that repeats itself is guessed" in d.shown
        assert "drafting: exact" not in d.shown
        await d.press("f4", until=lambda: isinstance(d.app.screen, RaceScreen))
        await d.pilot.pause()
        screen = d.app.screen
        assert not screen.racing.busy
        assert not screen.board.runs
        assert "F6 chooses one" in d.shown
        await d.press(
            "enter", until=lambda: bool(outcome.ways(screen.board, "race")) and screen.raced()
        )


def drawn(found: outcome.Way) -> str:
    """The answer and the bars of a race, as they are on the page."""
    ink = ink_for(DARK)
    lines = race_tables.answer(found, ink, 80, tall=False) + race_tables.bars(found, ink, 80)
    return "\n".join(line.plain for line in lines)


@pytest.mark.parametrize("slow", [2, 8])
def test_where_nothing_was_guessed_a_busy_machine_makes_no_figures(slow: int) -> None:
    """A NO stood beside plain 4.7 and drafted 39.4 tok/s, "as long as 0.1 plain ones"."""
    laps = race(Reply(LONG, accept=(2,)), laps=3)
    for run in laps:
        begin, scale = run.ttft_s, slow if run.name == PLAIN else 1.0 + 0.001 * run.lap
        run.rounds = [
            replace(
                done, drafted=(), parents=(), accepted=0, emitted=done.emitted[:1],
                t_s=begin + done.index * 0.02 * scale,
            )
            for done in run.rounds
        ]  # fmt: skip
    board = RaceBoard({"race": laps})
    (found,) = outcome.ways(board, "race")
    assert (found.verdict.ratio or 0.0) > 1.5
    assert outcome.answer(found) == ("NO", outcome.IDLY)
    assert "tok/s" not in drawn(found)
    assert outcome.why(board, found) == ""
    assert "×" not in outcome.way_words(found)
    assert "too short" not in advise(PARAMS, found.verdict).said
    assert advise_among(PARAMS, None, [(found.run, found.verdict)]).params is None


def test_all_tabs_give_a_method_the_same_verdict() -> None:
    mine = race(Reply(LONG, accept=(2,)), laps=3)
    again = race(Reply(LONG, accept=(0,)), laps=2)
    board = RaceBoard({"race": mine, "methods": again})
    (here,), (there,) = outcome.ways(board, "race"), outcome.ways(board, "methods")
    assert here.pairs == there.pairs == 5
    assert outcome.answer(here) == outcome.answer(there)
    words = outcome.way_words(here)
    assert raced_today(board)[here.run.params.proposer][0] == words


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_run_shows_how_far_its_prompt_is_read_and_what_it_wrote(width: int) -> None:
    ink, glyphs = ink_for(DARK), Glyphs()
    plain, mine = plain_and("q", PARAMS, [(DRAFTED, drafted(PARAMS))])
    plain.take(PrefillProgress(1200, 3700, 0, 12_000.0))

    def shown() -> list[str]:
        lines = race_tables.present([plain, mine], glyphs, ink, width)
        assert max(line.cell_length for line in lines) <= max(width, 56)
        return [line.plain for line in lines]

    assert "1,200 of 3,700" in shown()[0]
    assert ("about 12 s left" in shown()[0]) == (width == 80)
    assert "waits for its turn" in shown()[1]
    plain.rounds += race(Reply(LONG))[0].rounds[:9]
    assert "9 of at most 128 tokens written" in shown()[0]
    assert "reading" not in shown()[0]


class GatedReading(ScriptedEngine):
    """Stands still in the middle of every prompt but the empty ones."""

    def __init__(self, replies: list[Reply | str]) -> None:
        super().__init__(replies)
        self.gate = threading.Event()

    def generate(self, prompt: Any, params: GenerateParams, **options: Any) -> Iterator[Event]:
        for event in super().generate(prompt, params, **options):
            yield event
            if isinstance(event, PrefillProgress) and prompt != ".":
                self.gate.wait(30)


async def test_a_race_moves_while_its_first_prompt_is_read(start: Any) -> None:
    engine = GatedReading([Reply(LONG, accept=(2,))])
    engine.gate.set()
    async with start(recipe=Recipe(engine), size=(80, 24), params=PARAMS) as d:
        await d.say("a question")
        engine.gate.clear()
        await d.press("f4", until=lambda: isinstance(d.app.screen, RaceScreen))
        await d.until(lambda: "reading the prompt: " in d.shown)
        assert "Pair 1 of at most 10" in d.shown
        engine.gate.set()
        await d.until(lambda: d.app.screen.raced())  # type: ignore[attr-defined]
        assert "reading the prompt: " not in d.shown


async def test_other_settings_are_another_race(start: Any) -> None:
    async with start(Reply(LONG, accept=(2,)), size=(120, 36), params=PARAMS) as d:
        screen = await opened(d)
        asked = len(d.engine.requests)
        await d.press("escape", until=lambda: not isinstance(d.app.screen, RaceScreen))
        d.app.session.params = d.app.session.params.replace(draft_max=2)
        screen = await opened(d)
        assert len(d.engine.requests) > asked
        drafts = {run.params.draft_max for run in screen.board.runs["race"] if run.name == DRAFTED}
        assert drafts == {2}


def test_a_race_in_which_nothing_is_guessed_ends_after_two_pairs() -> None:
    runs = [
        run for lap in range(2) for run in plain_and("q", PARAMS, [(DRAFTED, drafted(PARAMS))], lap)
    ]
    assert raced(WithoutGuesses([Reply(LONG)]), runs).error is None
    (found,) = outcome.ways(RaceBoard({"race": runs}), "race")
    assert found.verdict.drafted == 0
    assert outcome.decided(found)
    assert outcome.answer(found) == ("NO", "hardly anything was guessed in this text")
    assert not outcome.decided(way(Reply(LONG, accept=(2,)), laps=2))


def test_a_wide_range_is_no_figure() -> None:
    found = clocked((1.0, 0.5), (1.0, 2.5), (1.0, 0.6))
    assert found.verdict.low is not None
    assert found.verdict.answer == "unknown"
    assert outcome.answer(found) == ("CANNOT TELL YET", outcome.TOO_WIDE)
    assert not outcome.why(RaceBoard({"race": [one for lap in found.laps for one in lap]}), found)
    assert "tok/s" not in drawn(found)
    assert outcome.way_words(found) == f"raced, 3 pairs: {outcome.TOO_WIDE}"
    assert ratio_words(found.verdict) == ""


async def test_a_longer_reply_and_another_prompt(start: Any) -> None:
    async with start(Reply("Too short."), size=(120, 36), params=PARAMS) as d:
        await d.say("a question")
        screen = await opened(d)
        assert "CANNOT TELL YET" in d.shown or outcome.ways(screen.board, "race")
        asked = len(d.engine.requests)
        await d.press("l", until=lambda: len(d.engine.requests) > asked and screen.raced())
        params = d.engine.requests[-1].params
        assert params.ignore_eos
        assert params.max_tokens == 128
        await d.pilot.press("p")
        await d.press(*"why", "enter", until=lambda: '"why"' in d.shown and screen.raced())
        assert [m.content for m in d.engine.requests[-1].prompt] == ["why"]
        await d.press("p", "enter", until=lambda: '"why"' not in d.shown and screen.raced())
        assert screen.board.plain("race") is not None


async def test_enter_runs_more_pairs(start: Any) -> None:
    async with start(Reply(LONG, accept=(2,)), params=PARAMS) as d:
        screen = await opened(d)
        assert len(screen.board.laps("race")) == outcome.LEAST
        await d.press("enter", until=lambda: len(screen.board.laps("race")) == 3 + outcome.MORE)
        await d.until(screen.raced)
        assert f"{3 + outcome.MORE} pairs of runs" in d.shown
        await d.press("escape", until=lambda: not isinstance(d.app.screen, RaceScreen))
        n = len(d.engine.requests)
        await d.press("f4", until=lambda: isinstance(d.app.screen, RaceScreen))
        assert len(d.engine.requests) == n  # it stands as it was left

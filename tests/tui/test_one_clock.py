"""Every place that shows a figure of a reply shows the same: strip, panel, inspector, log,
``--json``, documents; of a reply that is being written, that was, and that was stored."""

import json
import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
from app_driver import Driver, record_of
from fakes import Reply, engine_info
from script import Move, ScriptedGuess, ScriptedReading, play

from specllama.cli.printer import Printer
from specllama.events import Event, Finished, RoundDone, Started
from specllama.figures import Figures
from specllama.settings.params import GenerateParams
from specllama.store.rounds import RoundLog, list_runs, read_run
from specllama.told import news
from specllama.tui.record import LAG, Record
from specllama.tui.themes import DARK, UNICODE, ink_for
from specllama.tui.widgets import walk
from specllama.tui.widgets.panel import Drawing
from specllama.tui.widgets.stats_strip import StatsStrip, StripState

INK = ink_for(DARK)
LOOK: Any = SimpleNamespace(ink=INK, glyphs=UNICODE)
LONG = "The target reads all the guesses in a single pass and keeps those it agrees with. " * 4
UNITS = {"ms": 1.0, "s": 1e3}
Shown = dict[str, float]


class Strip(StatsStrip):
    ink, glyphs = INK, UNICODE


def written(seed: int) -> list[Event]:
    """The events of some reply: long or short, quick or slow, drafted or plain, with gaps."""
    rng = random.Random(seed)
    scale = 10 ** rng.uniform(-2, 2.5)
    drafts = rng.random() < 0.75
    text = "".join(f" w{i}" for i in range(rng.randint(1, 90)))

    def ms(most: float) -> float:
        return scale * rng.uniform(0.0, most)

    def move(index: int, todo: Any) -> Move:
        n = rng.randint(0, min(4, len(todo))) if drafts and index else 0
        kept = rng.randint(0, n)
        return Move(
            [ScriptedGuess(todo[i] if i < kept else "?", i - 1, i < kept) for i in range(n)],
            source="draft" if n else "none",
            draft_max=n,
            draft_ms=ms(1.0) if n else 0.0,
            verify_ms=ms(2.0),
            other_ms=ms(0.3),
            wait_ms=ms(rng.choice([0.1, 3.0])),
            plain_ms=scale,
        )

    return list(
        play(
            text,
            move,
            info=engine_info(),
            params=GenerateParams(seed=seed, proposer="auto" if drafts else "none"),
            cut=lambda words: re.findall(r" \w+", words),
            prompt_n=rng.randint(1, 50),
            seed=seed,
            reading=ScriptedReading(ms(0.5), ms(0.2)),
        )
    )


# ---- what stands there, read back


def near(shown: str, value: float) -> bool:
    """Whether a printed number is this one, rounded as it is printed."""
    digits = len(shown.partition(".")[2])
    return abs(float(shown) - value) <= 0.5000001 * 10**-digits


def agree(place: str, text: str, want: Shown, expected: dict[str, str]) -> None:
    """``expected`` says how each figure is printed there; a time has its unit behind it."""
    for name, pattern in expected.items():
        found = re.search(pattern, text)
        assert found, (place, name, pattern, text)
        number, unit = found[1], (found[2] if found.re.groups > 1 else "ms")
        assert near(number, want[name] / UNITS[unit]), (place, name, found[0], want[name], text)


TIME = r"([\d.]+) (ms|s)"


def logged() -> Record:
    """All turns of the last run as one record."""
    record = Record("logged")
    for turn in read_run(list_runs()[0]).turns:
        record.take(turn)
    return record


def panel(record: Record, at: int = -1) -> str:
    sections = Drawing(UNICODE, INK, 60).all(record, StripState(), None, 0, at)
    return "\n".join(line.plain for one in sections for line in one.draw(INK, 60))


def parts(want: Shown) -> dict[str, str]:
    """Of the panel: those of a token, and of the first."""
    rows = {"first": rf"First token after +{TIME}"}
    if want["tokens"] > 1:
        rows["each"] = rf"Time for a token +{TIME}"
        rows |= {name: rf"\n{name} .* {TIME}" for name in ("verify", "waiting")}
        rows |= {"draft": rf"\ndraft .* {TIME}"} if want["draft"] else {}
    shown = ("tokenize", "queue", "prefill", "step")
    return rows | {name: rf"\b{name} {TIME}" for name in shown if want[name] >= 0.05}


def check_screens(place: str, record: Record, want: Shown) -> None:
    speed = {"tok_per_s": r"([\d.]+) tok/s"} if want["tokens"] > 1 else {}
    kept = {"kept": r"(\d+)% kept"} if want["drafted"] else {}
    state = StripState(record)
    strip = "  ".join(forms[0].plain for forms in Strip(state)._cells())
    agree(f"{place}: strip", strip, want, speed | kept)
    agree(f"{place}: panel", panel(record), want, parts(want))


def wanted(finish: dict[str, Any]) -> Shown:
    """What ``run --json`` says."""
    t, n = finish["timings"], len(finish["token_ids"])
    assert t["decode_ms"] == pytest.approx(t["draft_ms"] + t["verify_ms"] + t["waiting_ms"])
    each = max(n - 1, 1)
    return {
        "tokens": n,
        "drafted": finish["draft_n"],
        "kept": 100 * (finish["acceptance_rate"] or 0.0),
        "tok_per_s": t["tok_per_s"] or 0.0,
        "decode_s": t["decode_ms"] / 1e3,
        "all_draft": t["draft_ms"],
        "all_verify": t["verify_ms"],
        "all_waiting": t["waiting_ms"],
        "draft": t["draft_ms"] / each,
        "verify": t["verify_ms"] / each,
        "waiting": t["waiting_ms"] / each,
        "each": t["decode_ms"] / each,
        "first": t["ttft_ms"],
        "tokenize": t["tokenize_ms"],
        "queue": t["queue_ms"],
        "prefill": t["prefill_ms"],
        "step": t["first_decode_ms"],
    }


@pytest.mark.parametrize("seed", range(24))
def test_a_reply_has_one_set_of_figures(seed: int, cli: Any, capsysbinary: Any) -> None:
    events = written(seed)
    log = RoundLog(engine_info(), GenerateParams(), command="run")
    for event in events:
        log.write(event)
    Printer(as_json=True).show(iter(events))
    log.close()
    finish = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()][-1]
    want = wanted(finish)
    speed = {"tok_per_s": r"([\d.]+) tok/s"} if want["tokens"] > 1 else {}

    whole = record_of("here", events)
    check_screens("written", whole, want)
    live = record_of("live", [one for one in events if not isinstance(one, Finished)])
    live.live = True
    check_screens("being written", live, want)
    unstored = ("text", "reasoning", "seams", "token_ids")
    stored = Record("stored")
    stored.restore(json.loads(json.dumps({k: v for k, v in finish.items() if k not in unstored})))
    check_screens("stored", stored, want)
    check_screens("inspector", logged(), want)

    agree("log show", cli("log", "show").out, want, speed | {"first": r"first token ([\d.]+) ms"})
    agree("log stats", cli("log", "stats").out, want, speed | {"decode_s": r", ([\d.]+) s,"})
    if speed:
        agree("log ls", cli("log", "ls").out, want, {"tok_per_s": r"([\d.]+) *$"})
    totals = cli("log", "ls", "--json").json[0]["runs"][0]
    assert totals["generation_s"] == pytest.approx(want["decode_s"])
    if speed:
        assert totals["tok_per_s"] == pytest.approx(want["tok_per_s"])


@pytest.mark.parametrize("seed", range(12))
def test_a_round_takes_what_went_by_until_it_was_over(seed: int, cli: Any) -> None:
    """Its parts, on every place that shows them, are all of the time between two rounds."""
    record = record_of("t", written(seed))
    before = None
    for done in record.rounds:
        if before is not None:
            assert done.took_ms == pytest.approx(1e3 * (done.t_s - before))
        before = done.t_s
        want = {"draft": done.draft_ms, "verify": done.verify_ms, "waiting": done.waiting_ms}
        stages = walk.stage_bar(done, 0, INK, 200).plain
        agree("inspector", stages, want, {name: rf"{name} {TIME}" for name in want})


def test_rounds_are_counted_from_one_by_people() -> None:
    record = record_of("t", written(0))
    last = len(record.rounds)
    head = walk.headline(record.rounds[-1], last - 1, last, UNICODE, INK).plain
    assert head.startswith(f"Round {last} of {last}")


def test_a_plain_reply_is_beside_no_other_plain_step() -> None:
    for seed in range(12):
        events = written(seed)
        assert isinstance(events[0], Started)
        drafted = any(isinstance(one, RoundDone) and one.drafted for one in events)
        assert ("\nplain" in panel(record_of("t", events))) == drafted


def test_the_figures_of_a_log_of_several_replies_are_those_of_the_one_shown() -> None:
    log = RoundLog(engine_info(), GenerateParams(), command="chat")
    replies = [written(seed) for seed in (3, 4, 5)]
    for events in replies:
        for event in events:
            log.write(event)
    log.close()
    record = logged()
    at = 0
    for events in replies:
        want = wanted(events[-1].to_dict())
        for _ in (one for one in events if isinstance(one, RoundDone)):
            agree("inspector", panel(record, at), want, parts(want))
            at += 1


def test_the_figures_of_a_long_reply_are_not_computed_for_every_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = next(e for e in map(written, range(50)) if len(e) > 80)
    some = [one for one in events if isinstance(one, RoundDone)]
    made: list[int] = []
    real = Figures.of

    def counted(started: Any, rounds: Any, end: Any) -> Figures | None:
        made.append(len(rounds))
        return real(started, rounds, end)

    monkeypatch.setattr(Figures, "of", staticmethod(counted))
    record = Record("t", live=True)
    record.take(news(next(one for one in events if isinstance(one, Started))))
    for _ in range(20):
        for done in some:
            record.add([done])
            shown = record.figures()
            assert len(record.rounds) * (1 - 1 / LAG) - 1 <= shown.rounds
    assert len(made) < len(record.rounds) / 3
    record.take(news(next(one for one in events if isinstance(one, Finished))))
    record.figures()
    assert made[-1] == len(record.rounds), "in the end all of them count"


# ---- in the app


@pytest.mark.parametrize("end", ["version", "undo", "new"])
async def test_the_strip_belongs_to_the_reply_that_is_shown(start: Any, end: str) -> None:
    replies = [Reply("one two three four five six", accept=(2,)), Reply("seven", accept=(0,))]
    async with start(*replies, size=(120, 36)) as d:
        await d.say("first")
        before = strip(d)
        if end == "new":
            await d.pilot.press("ctrl+n")
        elif end == "undo":
            await d.send("/undo")
        else:
            await d.press("ctrl+r", until=lambda: len(d.engine.requests) == 2)
            await d.idle()
            assert strip(d) != before
            await d.pilot.press("alt+left")
        await d.pilot.pause()
        if end == "version":
            assert strip(d) == before
            return
        await d.until(lambda: d.app.chat.strip.record is None)
        assert "tok/s" not in strip(d)
        assert "PAYS" not in strip(d)


async def test_the_strip_follows_the_reply_in_focus(start: Any) -> None:
    replies = [Reply("one two three four five six", accept=(2,)), Reply("seven", accept=(0,))]
    async with start(*replies, size=(120, 36)) as d:
        await d.say("first")
        before = strip(d)
        await d.say("second")
        assert strip(d) != before
        await d.press("shift+tab", "up", "up", until=lambda: strip(d) == before)
        await d.press("escape", until=lambda: strip(d) != before)


async def test_a_race_leaves_the_strip_alone(start: Any) -> None:
    async with start(Reply(LONG, accept=(2,)), size=(120, 36)) as d:
        await d.say("first")
        before = strip(d)
        await d.press("f4", until=lambda: type(d.app.screen).__name__ == "RaceScreen")
        screen = d.app.screen
        await d.until(lambda: screen.board.plain("race") is not None)
        await d.until(lambda: not screen.racing.busy)
        await d.press("escape", until=lambda: d.app.screen is d.app.chat)
        assert strip(d) == before


def strip(d: Driver) -> str:
    return d.app.chat.query_one(StatsStrip).render().plain

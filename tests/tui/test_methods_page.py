"""The page of methods shows what races since the pair was loaded found."""

from typing import Any

from fakes import Reply

from specllama.bench import outcome
from specllama.tui.screens.race_screen import RaceScreen
from specllama.tui.widgets.race_tables import raced

LONG = " ".join(f"word{i}" for i in range(150))


async def test_the_page_shows_what_was_raced_a_moment_ago(start: Any) -> None:
    async with start(Reply(LONG, accept=(2,)), size=(120, 40)) as d:
        await d.press("f4", until=lambda: isinstance(d.app.screen, RaceScreen))
        await d.until(lambda: outcome.ways(d.app.chat.board, "race") and not d.app.screen._raced)
        await d.press("escape", until=lambda: d.app.screen is d.app.chat)
        way = outcome.ways(d.app.chat.board, "race")[0]
        method = way.run.params.proposer
        found = raced(d.app.chat.board)
        assert found[method] == (outcome.way_words(way), way.verdict.answer)
        assert found["none"][0] == f"raced: {way.plain:.0f} tok/s"
        await d.press("f5", until=lambda: isinstance(d.app.screen, RaceScreen))
        await d.until(lambda: found["none"][0] in d.shown)
        assert "not measured here yet" in d.shown


async def test_the_page_is_wrapped_anew_in_other_columns(start: Any) -> None:
    async with start("Ok.", size=(60, 40)) as d:
        await d.press("f5", until=lambda: isinstance(d.app.screen, RaceScreen))
        whole = "itself, else the draft model."
        await d.until(lambda: "Automatic" in d.shown)
        lines = [line for line in d.shown.split("\n") if whole in line]
        await d.pilot.resize_terminal(140, 40)
        await d.until(lambda: any("What suits" in x and whole in x for x in d.shown.split("\n")))
        assert not any("What suits" in line for line in lines)

"""Registers the method of ``repeat_line.py`` and prints, as JSON, where it shows up by itself.

``python shown.py FOLDER``: the folder holds ``target.gguf`` and takes what is written. A process of
its own, because the choices of the command line are read when they are imported.
"""

import asyncio
import contextlib
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from specllama.settings import method_list as registry
from specllama.speculative import drafting

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
drafting.__path__.append(str(Path(__file__).parent))  # as if the file lay in that folder
registry.FILES["repeat"] = "repeat_line"  # the one line

from engines import FakeContext, engine_over, fake_info  # noqa: E402
from table_model import FakeTable, FakeVocab  # noqa: E402

from specllama.cli import invoke  # noqa: E402
from specllama.engine.engine import Engine  # noqa: E402
from specllama.engine.profiles import Profile, Windows, band  # noqa: E402
from specllama.events import RoundDone  # noqa: E402
from specllama.interface import EngineInfo  # noqa: E402
from specllama.settings.params import GenerateParams, SamplingParams  # noqa: E402
from specllama.speculative.drafting.method import Kit, menu  # noqa: E402
from specllama.store.rounds import RoundLog  # noqa: E402
from specllama.tui.themes import UNICODE  # noqa: E402
from specllama.tui.widgets.inked import InkedApp  # noqa: E402
from specllama.tui.widgets.race_tables import MethodList  # noqa: E402

PROMPT = "eta"
ALPHABET = "etaoin \ns"
"""Of a vocabulary in which the table below writes the same few lines for ever."""


def said(*argv: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        invoke(list(argv))
    return out.getvalue()


def engine() -> Engine:
    target = FakeContext(FakeTable(10, seed=17, order=1, sharpness=6.0, eog_bias=-99.0))
    drafters, vocab = Kit(target), FakeVocab(10, ALPHABET)
    info = replace(fake_info(512, 10), methods=menu(drafters.facts))
    windows = Windows(Profile(), info)
    return engine_over(target, vocab, info=info, drafters=drafters.all(), make_window=windows)


def asked(proposer: str, temperature: float, **more: Any) -> GenerateParams:
    return GenerateParams(
        proposer=proposer,
        speculate=proposer != "none",
        sampling=SamplingParams(temperature=temperature),
        max_tokens=120,
        min_speculative_tokens=0,
        seed=1,
        **more,
    )


def reply(proposer: str, temperature: float, log: RoundLog | None = None) -> dict[str, Any]:
    params = asked(proposer, temperature, window="fixed", draft_max=4)
    with engine() as running:
        events = list(running.generate(PROMPT, params))
    for event in events if log is not None else ():
        log.write(event, params)
    rounds = [event for event in events if isinstance(event, RoundDone) and event.drafted]
    end = events[-1]
    return {
        "tokens": end.token_ids,
        "accepted": end.draft_n_accepted,
        "drafted": end.draft_n,
        "proposer": end.proposer,
        "sources": sorted({source for done in rounds for source in done.sources}),
    }


def booked() -> dict[str, list[str]]:
    """What is known after a reply whose window learns, and under which names."""
    params = asked("repeat", 0.0)
    with engine() as running:
        list(running.generate(PROMPT, params))
        windows = running.windows
    learned = windows.profile.learned(band(params))
    return {
        "balances": sorted(windows.profile.ledger.own),
        "sources": sorted(learned.sources),
        "tables": sorted(windows.profile.costs.own),
    }


def joined() -> list[str]:
    mixed = Kit(FakeContext(FakeTable())).drafter("mixed")
    return [source.name for source in mixed.sources]


class Screens(InkedApp):
    """The list of methods alone."""


async def page(info: EngineInfo) -> list[str]:
    app = Screens()
    async with app.run_test(size=(100, 40)) as pilot:
        rows = MethodList(info, "repeat")
        await app.mount(rows)
        await pilot.pause()
        return [str(rows.get_option(way.name).prompt) for way in rows.methods]


def main(folder: Path) -> None:
    with engine() as running:
        info = running.info
    log = RoundLog(info, GenerateParams(), folder=folder)
    replies = {
        f"{proposer} {temperature:g}": reply(
            proposer, temperature, log if (proposer, temperature) == ("repeat", 0.0) else None
        )
        for proposer in ("none", "repeat", "auto")
        for temperature in (0.0, 0.7)
    }
    log.close()
    glyphs = replace(UNICODE, methods=info.methods)
    shown = {
        "help": said("run", "--help"),
        "pair": said("pair", str(folder / "target.gguf"), "--json"),
        "stats": said("log", "stats", str(log.path)),
        "rounds": said("log", "show", str(log.path)),
        "page": asyncio.run(page(info)),
        "glyph": glyphs.source("repeat"),
        "label": glyphs.label("repeat"),
        "replies": replies,
        "booked": booked(),
        "mixed": joined(),
    }
    print(json.dumps(shown))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

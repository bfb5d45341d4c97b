"""``specllama demo``: plain against drafted decoding on this machine, in about a minute.

On the real models that are here, else on the bundled pair.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from specllama import signals
from specllama.cli import diagnostics, loading, output
from specllama.cli.listing import json_option, picked
from specllama.cli.options import GroupedCommand, resolve, settings_options
from specllama.errors import SpecllamaError

if TYPE_CHECKING:
    from specllama.bench.experiment import Run
    from specllama.bench.outcome import RaceBoard, Way
    from specllama.cancel import Cancel
    from specllama.interface import EngineLike, Prompt
    from specllama.settings.params import EngineOptions

BAR = 30  # cells of the faster of two bars
TOKENS = 64  # most of a reply
ASKED = 48  # cells of a question
# one of each kind, of the half that tune does not learn from, in ordinary words
PROMPTS = ("chat-01", "code-47", "rag-33", "json-27")
RACE_S = 60.0  # after which no further pair of runs begins

EPILOG = """\b
Examples:
  specllama demo                  the real models that are here, else the toy
  specllama demo -m FILE.gguf -d DRAFT.gguf
  specllama demo --json | jq .answer
"""


@click.command("demo", cls=GroupedCommand, epilog=EPILOG)
@settings_options(only=("model", "draft-model", "threads", "gpu-layers"))
@json_option
def command(as_json: bool, **flags: Any) -> None:
    """See whether drafting pays on this machine: in about a minute, without a download.

    It races plain against drafted decoding on some of the shipped prompts, and says YES, NO or
    CANNOT TELL YET and why: for the pair that -m names, else for smollm2-135m and the pair that
    was used last, as far as they are here, else for the bundled pair.
    """
    from specllama.models import catalog
    from specllama.settings.params import EngineOptions

    settings = resolve(flags)
    options = EngineOptions(
        n_ctx=2048, threads=settings["threads"], gpu_layers=settings["gpu-layers"]
    )
    pairs = _pairs(settings["model"], settings["draft-model"])
    for target, draft in pairs or [("tiny", None)]:
        _race(target, draft, options, as_json=as_json)
    if not (pairs or as_json):
        output.line("the bundled pair is too small for guesses to pay; a real model for this:")
        output.line(f"  specllama hub pull {catalog.FIRST}")


def _pairs(target: str | None, draft: str | None) -> list[tuple[str, str | None]]:
    """List the real pairs to race: the one that is named, else the first real model and the pair
    that was used last, where they are here. There is none if that is the bundled pair.

    Raises:
        ModelUnavailable: the pair that is named is not here.
    """
    from specllama.models import catalog, refs

    named = [(target, draft)]
    if target is None:
        named = [(catalog.FIRST, None), (loading.usual_pair() or ("tiny", None))[:2]]
    found = dict[Path, tuple[str, str | None]]()
    for ref, its in named:
        try:
            path = refs.resolve(str(ref))
        except SpecllamaError:
            if target is not None:
                raise
            continue
        if not refs.is_bundled(str(path)):
            found.setdefault(path, (str(ref), its))
    return list(found.values())


def _race(target: str, draft: str | None, options: EngineOptions, *, as_json: bool) -> None:
    """Race a pair, and show the result."""
    from specllama.bench import outcome
    from specllama.bench.experiment import ask_all, plain_and
    from specllama.bench.outcome import RaceBoard
    from specllama.settings.params import GenerateParams

    with loading.open_files(target, draft, options, quiet=as_json) as engine:
        model, its, board = engine.info.target, engine.info.draft, RaceBoard()
        what = model.label if its is None else f"{model.label} + {its.label}"
        if not as_json:
            diagnostics.say(f"{what}:")
        with signals.stopping() as cancel:  # the first reply after a load is slower than the next
            params = GenerateParams(max_tokens=TOKENS)
            ask_all(engine, plain_and(_prompts()[-1], params, []), cancel)
            way = race(engine, board, cancel, (lambda way: None) if as_json else _tell)
    if way is None:
        raise SpecllamaError("no pair of runs came to its end", "specllama demo tries again")
    because = outcome.why(board, way)
    if as_json:
        output.json_line(report(what, way, because, model.quantization, model.file_bytes))
    else:
        _show(way, because, what)


def _tell(way: Way) -> None:
    from textwrap import shorten

    from specllama.bench.experiment import question
    from specllama.text import rate

    if way.pairs == 1:
        diagnostics.say(f"{'tok/s':>7}  plain  drafted")
    plain, run = way.laps[-1]
    speeds = "  ".join(f"{rate(one.end.timings.tok_per_s):>7}" for one in (plain, run))
    asked = shorten(question(run.prompt), ASKED, placeholder=" …")
    diagnostics.say(f"{way.pairs:>5} {speeds}  {asked}")


def race(
    engine: EngineLike,
    board: RaceBoard,
    cancel: Cancel,
    told: Callable[[Way], object] = lambda way: None,
    seconds: float = RACE_S,
) -> Way | None:
    """Race plain and drafted runs in pairs; each pair swaps the order and takes the next of some
    prompts. Stop when the answer is sure or time is up; return None if no pair was completed.

    Args:
        told: called after every pair.
    """
    from specllama.bench import outcome
    from specllama.bench.experiment import DRAFTED, ask_all, drafted, plain_and
    from specllama.settings.params import GenerateParams

    prompts, began = _prompts(), perf_counter()
    params = drafted(GenerateParams(max_tokens=TOKENS))

    def lap(n: int) -> list[Run]:
        return plain_and(prompts[n % len(prompts)], params, [(DRAFTED, params)], lap=n)

    def enough(way: Way) -> bool:
        told(way)
        late = perf_counter() - began > seconds
        each = way.pairs >= len(prompts)  # one kind may copy where another does not
        return (each and outcome.decided(way)) or (late and way.pairs >= outcome.LEAST)

    ask_all(engine, outcome.race(board, lap, outcome.MOST, enough), cancel)
    return next(iter(outcome.ways(board, "race")), None)


def _prompts() -> list[Prompt]:
    """Return the shipped prompts that the race asks."""
    from specllama.bench.prompts import load_prompts

    shipped = {one.id: one.content for one in load_prompts()}
    return [shipped[name] for name in PROMPTS]


def report(what: str, way: Way, because: str, kind: str, n_bytes: int) -> dict[str, object]:
    """Return the results for machines."""
    from specllama.bench import outcome

    word, sentence = outcome.answer(way)
    return {
        "what": what, "answer": word, "words": sentence, "why": because,
        **picked(way.verdict, "ratio low high"),
        "plain_tok_per_s": way.plain, "drafted_tok_per_s": way.speed,
        "pairs": way.pairs, "same_tokens": way.same, "tokens": way.of,
        "type": kind, "bytes": n_bytes,
    }  # fmt: skip


def _show(way: Way, why: str, what: str) -> None:
    from specllama.bench import outcome
    from specllama.bench.outcome import ratio_words
    from specllama.cli.charts import bar
    from specllama.text import number_of, rate

    word, sentence = outcome.answer(way)
    output.line(f"{word}: {sentence}, with {what}")
    if way.plain and way.speed and way.comparable:
        most = max(way.plain, way.speed)
        output.line(f"plain    {bar(way.plain / most, BAR):<{BAR}} {rate(way.plain):>5} tok/s")
        output.line(f"drafted  {bar(way.speed / most, BAR):<{BAR}} {rate(way.speed):>5} tok/s")
        output.line(f"{ratio_words(way.verdict)} of plain")
    output.line(f"{number_of(way.pairs, 'pair')} of runs; {way.proof}")
    if why:
        output.line(why)

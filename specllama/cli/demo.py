"""``specllama demo``: drafting that pays on this machine, in a minute and without a download."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specllama import signals
from specllama.cli import diagnostics, loading, output
from specllama.cli.listing import json_option
from specllama.cli.options import GroupedCommand, resolve, settings_options
from specllama.cli.progress import shares
from specllama.text import size

if TYPE_CHECKING:
    from specllama.bench.outcome import RaceBoard, Way
    from specllama.bench.scaled_pair import WeightKind
    from specllama.engine.engine import Engine
    from specllama.settings.params import EngineOptions

BAR = 30  # cells of the faster of two bars

EPILOG = """\b
Examples:
  specllama demo                  make a pair, race it, delete it
  specllama demo --keep           keep the files, to chat with them
  specllama demo --json | jq .answer
"""


@click.command("demo", cls=GroupedCommand, epilog=EPILOG)
@click.option("--keep", is_flag=True, help="Keep the files of the pair.")
@settings_options(only=("threads", "gpu-layers"))
@json_option
def command(keep: bool, as_json: bool, **flags: Any) -> None:
    """See drafting pay on this machine: in about a minute, without a download.

    It writes a pair (1.1 GB; 2.0 or 0.6 GB where that is better), races plain against drafted
    decoding on some of the shipped prompts, says YES, NO or CANNOT TELL YET and why, and deletes
    the files.

    The pair is the bundled model at the cost of a 1 B model: padded with weights that change
    nothing and take as long as real ones. It shows what drafting gains here with a model of that
    size, not how well such a model writes.
    """
    from specllama.bench import scaled_pair
    from specllama.settings.params import EngineOptions

    settings = resolve(flags)
    options = EngineOptions(
        n_ctx=2048, threads=settings["threads"], gpu_layers=settings["gpu-layers"]
    )
    kinds = scaled_pair.affordable()
    with scaled_pair.workshop() as own:
        signals.leaving(lambda: scaled_pair.discard(own))
        _say(as_json, f"{scaled_pair.WHAT}: {size(kinds[0].bytes)} in {own}")
        way, why, kind, pair = _shown(kinds, own, options, quiet=as_json)
        if keep:
            scaled_pair.keep(own)
        report = scaled_pair.report(way, why, kind, pair if keep else None)
    if as_json:
        output.json_line(report)
        return
    _show(way, why)
    if keep:
        target, draft = pair
        output.line(f"kept: specllama chat -m {target} -d {draft}")
    else:
        output.line(f"{size(kind.bytes)} deleted; --keep leaves the files to chat with")


def _say(quiet: bool, text: str) -> None:
    if not quiet:
        diagnostics.say(text)


def _shown(
    kinds: list[WeightKind], own: Path, options: EngineOptions, *, quiet: bool
) -> tuple[Way, str, WeightKind, tuple[Path, Path]]:
    """Race the kinds until one should pay here, else keep the last; return its race, why it went
    so, its kind and files."""
    from specllama.bench import scaled_pair
    from specllama.bench.outcome import RaceBoard

    for kind in kinds:
        with shares(shown=not quiet) as writing:
            pair = scaled_pair.make(
                kind, own, lambda name, share: writing(f"writing {name}", share)
            )
        progress = loading.LoadingLine(shown=sys.stderr.isatty(), quiet=quiet)
        try:
            engine = loading.load(*pair, options, on_progress=progress)
            engine.measure(progress, times=False)  # longer guesses are tried where they are exact
        finally:
            progress.clear()
        with engine:
            engine.windows.profile.path = None  # what is learnt of it is of no use later
            board = RaceBoard()
            with signals.stopping() as cancel:
                promising = scaled_pair.promises(scaled_pair.trial(engine, board, cancel))
            if promising or kind is kinds[-1]:
                way = _raced(engine, board, quiet=quiet)
                return way, scaled_pair.why(board, way), kind, pair
        _say(quiet, f"{kind.name} weights: a guess would cost more than it saves here")
        for path in pair:
            path.unlink()
    raise AssertionError("the last kind is raced")


def _raced(engine: Engine, board: RaceBoard, *, quiet: bool) -> Way:
    from specllama.bench import scaled_pair
    from specllama.bench.experiment import question
    from specllama.errors import SpecllamaError
    from specllama.text import rate

    _say(quiet, f"{'tok/s':>7}  plain  drafted")

    def told(way: Way) -> None:
        plain, run = way.laps[-1]
        speeds = "  ".join(f"{rate(one.end.timings.tok_per_s):>7}" for one in (plain, run))
        asked = question(run.prompt).replace("\n", " ")
        _say(quiet, f"{way.pairs:>5} {speeds}  {asked[:48]}")

    with signals.stopping() as cancel:
        way = scaled_pair.race(engine, board, cancel, told)
    if way is None:
        raise SpecllamaError("no pair of runs came to its end", "specllama demo tries again")
    return way


def _show(way: Way, why: str) -> None:
    from specllama.bench import outcome
    from specllama.bench.outcome import ratio_words
    from specllama.bench.scaled_pair import WHAT
    from specllama.cli.charts import bar
    from specllama.text import number_of, rate

    word, sentence = outcome.answer(way)
    output.line(f"{word}: {sentence}, with {WHAT}")
    if way.plain and way.speed:
        most = max(way.plain, way.speed)
        output.line(f"plain    {bar(way.plain / most, BAR):<{BAR}} {rate(way.plain):>5} tok/s")
        output.line(f"drafted  {bar(way.speed / most, BAR):<{BAR}} {rate(way.speed):>5} tok/s")
        runs = number_of(way.pairs, "pair")
        output.line(f"{ratio_words(way.verdict)} of plain, {runs} of runs; {way.proof}")
    if why:
        output.line(why)

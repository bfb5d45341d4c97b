"""``specllama demo``: plain against drafted decoding on this machine, in about a minute.

On real models where some are here, else on the bundled pair at the cost of a larger one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specllama import signals
from specllama.cli import diagnostics, loading, output
from specllama.cli.listing import json_option
from specllama.cli.options import GroupedCommand, resolve, settings_options
from specllama.cli.progress import Meter
from specllama.errors import SpecllamaError
from specllama.text import size

if TYPE_CHECKING:
    from specllama.bench.outcome import RaceBoard, Way
    from specllama.bench.scaled_pair import WeightKind
    from specllama.engine.engine import Engine
    from specllama.settings.params import EngineOptions

BAR = 30  # cells of the faster of two bars

EPILOG = """\b
Examples:
  specllama demo                  the real models that are here, else the bundled pair
  specllama demo -m tiny          make a pair of the cost of 1 B, race it, delete it
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
    the app had open last, as far as they are here.

    Without a real model, or with -m tiny, it writes a pair (1.1 GB; 2.0 or 0.6 GB where that is
    better) and deletes it in the end: the bundled model at the cost of a 1 B model, padded with
    weights that change nothing and take as long as real ones. It shows what drafting gains here
    with a model of that size, not how well such a model writes.
    """
    from specllama.settings.params import EngineOptions

    settings = resolve(flags)
    options = EngineOptions(
        n_ctx=2048, threads=settings["threads"], gpu_layers=settings["gpu-layers"]
    )
    pairs = _real_pairs(settings["model"], settings["draft-model"])
    if not pairs:
        _race_scaled(options, as_json=as_json)
        return
    paid = [_race_real(target, draft, options, as_json=as_json) for target, draft in pairs]
    if not (as_json or any(paid)):
        output.line("beside a larger target a guess costs less: specllama demo -m tiny shows that")


def _real_pairs(target: str | None, draft: str | None) -> list[tuple[str, str | None]]:
    """List the real pairs to race: the one that is named, else the first real model and the app's
    last pair, where they are here. There is none if that is the bundled pair.

    Raises:
        ModelUnavailable: the pair that is named is not here.
    """
    from specllama.models import catalog, refs
    from specllama.tui.state import Preferences

    named = [(target, draft)]
    if target is None:
        prefs = Preferences.load()
        named = [(catalog.FIRST, None), (prefs.last_target or "tiny", prefs.last_draft or None)]
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


def _race_real(target: str, draft: str | None, options: EngineOptions, *, as_json: bool) -> bool:
    """Race a pair that is here, and show the result; True if drafting pays."""
    from specllama.bench import scaled_pair
    from specllama.bench.outcome import RaceBoard

    with loading.open_files(target, draft, options, quiet=as_json) as engine:
        model, its, board = engine.info.target, engine.info.draft, RaceBoard()
        what = model.label if its is None else f"{model.label} + {its.label}"
        _say(as_json, f"{what}:")
        with signals.stopping() as cancel:
            scaled_pair.warm_up(engine, cancel)
        way = _raced(engine, board, quiet=as_json, to_the_end=False)
        why = scaled_pair.why(board, way)
    if as_json:
        told = scaled_pair.report(what, way, why, model.quantization, model.file_bytes)
        output.json_line(told)
    else:
        _show(way, why, what)
    return way.verdict.answer == "faster"


def _race_scaled(options: EngineOptions, *, as_json: bool) -> None:
    """Make a pair, race it, show the result, and delete it."""
    from specllama.bench import scaled_pair

    kinds = scaled_pair.affordable()
    with scaled_pair.workshop() as own:
        signals.leaving(lambda: scaled_pair.discard(own))
        _say(as_json, f"{scaled_pair.WHAT}: {size(kinds[0].bytes)} in {own}")
        way, why, kind = _shown(kinds, own, options, quiet=as_json)
    if as_json:
        output.json_line(scaled_pair.report(scaled_pair.WHAT, way, why, kind.name, kind.bytes))
        return
    _show(way, why, scaled_pair.WHAT)
    output.line(f"{size(kind.bytes)} deleted; a pair to keep: specllama bench scale FOLDER")


def _say(quiet: bool, text: str) -> None:
    if not quiet:
        diagnostics.say(text)


def _shown(
    kinds: list[WeightKind], own: Path, options: EngineOptions, *, quiet: bool
) -> tuple[Way, str, WeightKind]:
    """Race the kinds until one should pay here, else keep the last; return its race, why it went
    so, and its kind."""
    from specllama.bench import scaled_pair
    from specllama.bench.outcome import RaceBoard

    for kind in kinds:
        with Meter("writing") as bar:
            pair = scaled_pair.make(kind, own, bar.share)
        # measured: longer guesses are tried where they are exact
        with loading.open_files(*pair, options, quiet=quiet, measured=True) as engine:
            engine.windows.profile.path = None  # what is learnt of it is of no use later
            board = RaceBoard()
            with signals.stopping() as cancel:
                promising = scaled_pair.promises(scaled_pair.trial(engine, board, cancel))
            if promising or kind is kinds[-1]:
                way = _raced(engine, board, quiet=quiet)
                return way, scaled_pair.why(board, way), kind
        _say(quiet, f"{kind.name} weights: a guess would cost more than it saves here")
        for path in pair:
            path.unlink()
    raise AssertionError("the last kind is raced")


def _raced(engine: Engine, board: RaceBoard, *, quiet: bool, to_the_end: bool = True) -> Way:
    from specllama.bench import scaled_pair
    from specllama.bench.experiment import question
    from specllama.text import rate

    _say(quiet, f"{'tok/s':>7}  plain  drafted")

    def told(way: Way) -> None:
        plain, run = way.laps[-1]
        speeds = "  ".join(f"{rate(one.end.timings.tok_per_s):>7}" for one in (plain, run))
        asked = question(run.prompt).replace("\n", " ")
        _say(quiet, f"{way.pairs:>5} {speeds}  {asked[:48]}")

    with signals.stopping() as cancel:
        way = scaled_pair.race(engine, board, cancel, told, to_the_end=to_the_end)
    if way is None:
        raise SpecllamaError("no pair of runs came to its end", "specllama demo tries again")
    return way


def _show(way: Way, why: str, what: str) -> None:
    from specllama.bench import outcome
    from specllama.bench.outcome import ratio_words
    from specllama.cli.charts import bar
    from specllama.text import number_of, rate

    word, sentence = outcome.answer(way)
    output.line(f"{word}: {sentence}, with {what}")
    if way.plain and way.speed:
        most = max(way.plain, way.speed)
        output.line(f"plain    {bar(way.plain / most, BAR):<{BAR}} {rate(way.plain):>5} tok/s")
        output.line(f"drafted  {bar(way.speed / most, BAR):<{BAR}} {rate(way.speed):>5} tok/s")
        runs = number_of(way.pairs, "pair")
        ratio = ratio_words(way.verdict)
        output.line(f"{ratio} of plain, {runs} of runs; {way.proof}".removeprefix(" of plain, "))
    if why:
        output.line(why)

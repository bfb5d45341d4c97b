"""``specllama tune``: measurements of a pair on this machine, and advice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specllama.cli import completion, diagnostics, loading, output
from specllama.cli.listing import Column, json_option, show_table
from specllama.cli.options import (
    LOADING,
    GroupedCommand,
    length_option,
    number_option,
    resolve,
    say_settings,
    settings_options,
    temperatures_option,
)
from specllama.cli.output import examples
from specllama.cli.progress import Bar
from specllama.errors import Cancelled, UsageError
from specllama.settings.params import GenerateParams
from specllama.signals import Interrupted

if TYPE_CHECKING:
    from specllama.bench.tuning import Tuning
    from specllama.engine.engine import Engine
    from specllama.engine.profiles import Profile

SHOWN = ("arm", "group", "tok/s", "ratio", "range", "accepted")  # columns of a report


@click.command("tune", cls=GroupedCommand, epilog=examples()["tune"])
@click.argument("pair", required=False, shell_complete=completion.models)
@temperatures_option("0, 0.7 and 1")
@number_option(
    "-n", "--per-slice", default=3, help="Number of prompts of each kind: chat, code, rag, json."
)
@length_option(64)
@number_option("-r", "--repetitions", default=1, help="Number of times that each is written.")
@click.option("--quick", is_flag=True, help="Use one prompt of each kind, once.")
@click.option(
    "--save/--no-save",
    default=True,
    show_default=True,
    help="Save what was measured in the profile of this pair.",
)
@settings_options(only=LOADING)
@json_option
def command(
    pair: str | None,
    temperatures: tuple[float, ...],
    per_slice: int,
    max_tokens: int,
    repetitions: int,
    quick: bool,
    save: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Measure a pair on this machine and choose the best settings.

    The first step is what a new model gets at rest: the check which passes compute the same bits
    as single steps. Each step says how long it takes; Ctrl-C stops, and what is done is kept.

    It times passes of 1 to 16 rows of the target and steps of the draft model. Then it writes
    replies plainly, with drafts of one length and with the adaptive window, and shows their speed
    and how many drafted tokens were accepted, by slice and temperature. It keeps all this as a
    profile, so that later runs start warm.

    It learns on one half of the shipped prompts; `specllama bench run` measures on the other.
    """
    from specllama.backend.cores import crowded
    from specllama.bench.prompts import half, load_prompts
    from specllama.bench.report import provenance
    from specllama.bench.tuning import tune
    from specllama.paths import barred, profiles_dir

    if pair is not None and flags["model"] is not None:
        raise UsageError("name the model once: as an argument or with -m")
    if pair is not None:
        flags["model"] = pair
    settings = resolve(flags)
    prompts = half(load_prompts(), "tune")  # bench measures on the others
    params, usual = settings.generate_params(), settings.given("temperature")
    if save and (why := barred(profiles_dir())):
        raise UsageError(
            f"the profile cannot be written to {profiles_dir()}: {why}",
            "--no-save measures without keeping anything",
        )
    say_settings(settings)
    if crowd := crowded():
        diagnostics.warn(f"{diagnostics.CROWDED}; tune again later")
    opened = loading.open_engine(settings, quiet=as_json, measured=True)
    with opened as engine, Bar("measuring") as bar, _kept(engine, save):
        profile = engine.windows.profile
        if profile.trouble:
            diagnostics.warn(profile.trouble)
        if not save:
            profile.path = None
        engine.measure()
        result = tune(
            engine, prompts,
            base=GenerateParams(sampling=params.sampling, from_card=params.from_card),
            temperatures=temperatures or ((0.0, 0.7, 1.0) if usual is None else (usual,)),
            per_slice=1 if quick else per_slice, max_tokens=max_tokens,
            repetitions=5 if quick else 9, checks=1 if quick else repetitions,
            progress=lambda share: bar.advanced(int(1000 * share)),
            say=lambda words: None if as_json else bar.waiting(words),
        )  # fmt: skip
        info = engine.info
        facts = provenance(info, hashes=not quick)
    where = _saved(profile, result, {"when": facts["when"], "crowded": crowd}) if save else None
    if as_json:
        output.json_line({**result.to_dict(), "provenance": facts, "profile": where and str(where)})
        return
    _show(result)
    output.line(f"weights: {info.target.layout}")
    if where is not None:
        output.line(f"profile kept: {where}")


def _saved(profile: Profile, result: Tuning, further: dict[str, Any]) -> Path | None:
    """Save the measurements; return the file, None if it cannot be written."""
    profile.refresh()  # another process may have saved meanwhile; what was timed here stays
    result.costs.store(profile.costs)  # timed alone, sharper than what replies left there
    profile.advice = {**result.advice, **further}
    if profile.save():
        return profile.path
    diagnostics.warn("the profile could not be written")
    return None


@contextmanager
def _kept(engine: Engine, save: bool) -> Iterator[None]:
    """Keep the measurements so far if Ctrl-C ends the measuring, and report that."""
    try:
        yield
    except (KeyboardInterrupt, Interrupted, Cancelled) as stopped:
        if save:
            engine.windows.profile.save()
        diagnostics.note("stopped; what was measured so far is kept, tune again for the rest")
        if isinstance(stopped, Cancelled):  # a pass heard of the signal first
            raise Interrupted from None
        raise


def _show(result: Tuning) -> None:
    """Show the advice, the costs, and the speed of replies."""
    from specllama.bench.report import COLUMNS
    from specllama.cli.charts import bar
    from specllama.rates import Remedy
    from specllama.verdict import remedy_words

    costs, advice = result.costs, result.advice
    better = [remedy_words(Remedy(**one)) for one in advice["remedies"]]
    title = f"target, a pass of n rows ({costs.context} tokens of context)"
    lines = [advice["words"], *better, "", title]
    top = max(costs.ratios.values())
    for n, ratio in costs.ratios.items():
        lines.append(f"{n:>5} {costs.target[n]:9.2f} ms {ratio:6.2f}×  {bar(ratio / top, 30)}")
    if costs.draft:
        step = costs.draft_step or 0.0
        lines += ["", f"draft model: {costs.draft[1]:.2f} ms a step, {step:.3f} of a plain step"]
    for line in (*lines, ""):
        output.line(line)
    columns = [Column(name, COLUMNS[name], right=i > 1) for i, name in enumerate(SHOWN)]
    show_table(result.check.summaries(), columns)

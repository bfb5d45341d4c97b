"""``specllama prove``: same seed, same text, shown on the user's own machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specllama.cli import diagnostics, loading, output
from specllama.cli.against_options import against_options
from specllama.cli.options import (
    LOADING,
    Finite,
    GroupedCommand,
    length_option,
    prompts_option,
    resolve,
    say_settings,
    seed_option,
    settings_options,
    temperatures_option,
)
from specllama.settings.methods import names
from specllama.settings.params import WINDOWS, GenerateParams, WindowKind
from specllama.speculative.drafting.method import methods

if TYPE_CHECKING:
    from specllama.bench.prompts import BenchPrompt
    from specllama.bench.proof import Case, RowProbe
    from specllama.cli.prove_views import ProofWatch
    from specllama.engine.engine import Engine
    from specllama.settings.config import Settings

ALL = names()

EPILOG = """\b
Examples:
  specllama prove                              the bundled pair, 20 prompts
  specllama prove -m target.gguf -d draft.gguf
  specllama prove --prompts mine.txt -n 5 --draft-max 4 --draft-max 8
  specllama prove -n 200 --proposer all        every method there is
  specllama prove --window auto --pauses 3     the clock must not change a token
  specllama prove -n 50 --skip 150             prompts 151 to 200
  specllama prove --parallel 8                 eight replies side by side
  specllama prove --json > proof.jsonl
  specllama prove --against http://box:8000 --plain http://box:8001 --report proof.md
  specllama prove --against http://box:8000 -m target.gguf

The pair, and how it is loaded and sampled, come from the settings, as for run.
Those that come from variables and files are named first.
"""


@click.command("prove", cls=GroupedCommand, epilog=EPILOG)
@prompts_option
@click.option("-n", "--count", default=20, show_default=True, help="Number of prompts.")
@click.option("--skip", default=0, help="Skip the first SKIP prompts, to continue an earlier run.")
@length_option(64)
@temperatures_option("0, 0.7 and 1")
@click.option(
    "--proposer",
    "proposers",
    multiple=True,
    type=click.Choice(["all", "auto", *ALL]),
    help="Method of drafting; repeatable. Default: the setting; else every method this pair has, "
    "except self. all adds self.",
)
@click.option(
    "--draft-max",
    "widths",
    multiple=True,
    type=int,
    help="Most tokens drafted per round; repeatable. Default: the setting; else 4, or with "
    "--window auto 15 or 6.",
)
@click.option(
    "--window",
    type=click.Choice(WINDOWS),
    help="How far to draft; auto goes by measured times. Default: the setting; else fixed.",
)
@click.option(
    "--pauses",
    "pauses_ms",
    type=Finite(0, 1000),
    default=0.0,
    metavar="MS",
    help="Make passes and drafts take up to MS milliseconds longer, at random.",
)
@click.option(
    "--parallel",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    metavar="N",
    help="Write N replies at the same time, with random arrivals and cancels.",
)
@seed_option
@settings_options(only=LOADING)
@against_options
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON Lines: the cases, then a summary."
)
def command(
    prompts: Path | None,
    count: int,
    skip: int,
    max_tokens: int,
    temperatures: tuple[float, ...],
    proposers: tuple[str, ...],
    widths: tuple[int, ...],
    window: WindowKind | None,
    pauses_ms: float,
    parallel: int,
    seed: int,
    as_json: bool,
    **flags: Any,
) -> None:
    """Prove that speculation does not change what the target writes.

    For every prompt, method and temperature, the speculative output must equal plain decoding with
    the same seed, token by token.

    When the model was loaded, passes of several rows were compared with single steps. Where they
    are equal bit for bit, no difference is accepted. Elsewhere floating point can flip a near-tie,
    which is shown with the gap of the two scores in logits.

    Every case is tried three ways: cold; after another prompt that begins alike and was read in
    other parts; and as the next turn of its own conversation, compared with the same turn of a
    plain one. The two warm ways write 8 tokens; where passes are bit-exact, all logprobs must be
    equal as well. --parallel writes all replies at the same time instead.

    Of the shipped prompts, some whose replies have to fit a JSON schema are added for the method
    forced, which drafts nothing elsewhere; a line of your own prompts may hold a "schema".

    The plain text of a prompt and temperature is computed once, for all methods. A method that this
    pair does not have is skipped, with the reason. Only unexplained differences end with status 1.
    --against proves another server: its greedy texts, and the law that its replies follow.
    """
    from specllama.bench.proof import probe_stated_rows, prove, random_pauses
    from specllama.bench.together import prove_together
    from specllama.cli.prove_views import ProofWatch

    settings = resolve(flags)
    base = settings.generate_params()
    wanted = _wanted(proposers or _as_set(settings, "proposer", but="none"))
    chosen = _chosen(prompts, skip, count, bound="forced" in wanted)
    temperatures = temperatures or _as_set(settings, "temperature") or (0.0, 0.7, 1.0)
    window = window or settings.given("window") or "fixed"
    with contextlib.ExitStack() as stack:
        say_settings(settings)
        engine = stack.enter_context(_opened(settings, parallel, quiet=as_json))
        widths = widths or _usual(settings, window, engine.info.exact_rows)
        names, skipped = _methods(engine, wanted, len(chosen), quiet=as_json)
        if pauses_ms:
            stack.enter_context(random_pauses(engine, pauses_ms, seed=seed))
        drafting = len(names) * len(widths)
        per_text = drafting if parallel > 1 else 3 * drafting + 1
        watch = ProofWatch(len(chosen), len(temperatures) * per_text)
        proof = Proof(engine, watch, skipped, as_json)
        wishes: dict[str, Any] = {
            "proposers": names,
            "temperatures": temperatures,
            "draft_max": widths,
            "max_tokens": max_tokens,
            "seed": seed + skip,  # the seed belongs to the prompt, wherever the run begins
            "base": base,
            "window": window,
        }
        try:
            if parallel > 1:
                proof.take(prove_together(engine, chosen, **wishes))
            else:
                proof.take(prove(engine, chosen, **wishes, warm=True, on_skip=proof.leave_out))
            proof.probes = probe_stated_rows(engine, chosen)
            proof.finished = True
        finally:
            proof.tell(skip, skip + count)
    told = proof.summary()
    if told["unexplained"] or told["rows_differ"]:
        raise SystemExit(1)


@dataclass
class Proof:
    """A proof in progress, and its reports."""

    engine: Engine
    watch: ProofWatch
    skipped: dict[str, str]
    as_json: bool
    cases: list[Case] = field(default_factory=list)
    probes: list[RowProbe] = field(default_factory=list)
    finished: bool = False

    def leave_out(self, name: str, reason: str) -> None:
        self.skipped[name] = reason
        self.watch.say(f"skipped {name}: {reason}")

    def take(self, cases: Iterable[Case]) -> None:
        """Show each comparison as it comes."""
        from specllama.cli.prove_views import show_difference

        for case in cases:
            self.cases.append(case)
            if self.as_json:
                output.json_line(case.to_dict())
            else:
                show_difference(case, self.watch)
            self.watch.advanced()

    def tell(self, skip: int, end: int) -> None:
        """Report the outcome, or how to continue; prompts ``skip`` to ``end`` were asked for."""
        from specllama.cli.prove_views import rows_alike, table, verdict

        self.watch.clear()
        summary = self.summary()
        if not self.finished and self.cases:
            done = skip + len({case.prompt for case in self.cases}) - 1
            diagnostics.say(f"ended early; continue with --skip {done} -n {end - done}")
        if self.as_json:
            output.json_line({**summary, "finished": self.finished})
        elif self.cases:
            table(self.cases)
            if self.finished:
                rows_alike(self.probes)
                verdict(summary)

    def summary(self) -> dict[str, object]:
        cases, info = self.cases, self.engine.info
        return {
            "type": "summary",
            "cases": len(cases),
            "identical": sum(c.identical for c in cases),
            "near_ties": sum(not c.identical and c.ok for c in cases),
            "unexplained": sum(not c.ok for c in cases),
            "tokens": sum(c.tokens for c in cases),
            "drafted": sum(c.drafted for c in cases),
            "accepted": sum(c.accepted for c in cases),
            "skipped": self.skipped,
            "bitwise": sum(c.bitwise for c in cases),
            "ways": {
                way: {"cases": len(found), "identical": sum(c.identical for c in found)}
                for way in dict.fromkeys(c.way for c in cases)
                for found in [[c for c in cases if c.way == way]]
            },
            "exactness": info.exactness,
            "measured": info.measured,
            "rows_differ": any(probe.difference > 0.0 for probe in self.probes),
            "rows": {str(probe.rows): probe.difference for probe in self.probes},
        }


def _chosen(path: Path | None, skip: int, count: int, *, bound: bool) -> list[BenchPrompt]:
    """Choose the prompts to prove with; ``bound`` adds shipped ones that constrain the reply."""
    from specllama.bench.prompts import load_prompts, schema_prompts

    if count < 1:
        raise click.BadParameter("give at least 1", param_hint="-n")
    loaded = load_prompts(path)
    if not 0 <= skip < len(loaded):
        raise click.BadParameter(f"there are {len(loaded)} prompts", param_hint="--skip")
    further = schema_prompts()[: max(count // 10, 1)] if bound and path is None else []
    return [*loaded[skip : skip + count], *further]


def _opened(settings: Settings, parallel: int, *, quiet: bool) -> Engine:
    from specllama.errors import UsageError

    engine = loading.open_engine(settings, quiet=quiet, parallel=parallel, measured=True)
    if (lanes := engine.info.lanes) < parallel:
        engine.close()
        raise UsageError(f"this model writes {lanes} at once", "prove it without --parallel")
    return engine


def _methods(
    engine: Engine, wanted: Sequence[str], prompts: int, *, quiet: bool
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Choose the methods that the pair has; note them, and why the others are missing."""
    from specllama.bench.proof import available
    from specllama.cli.prove_views import headline
    from specllama.errors import UsageError

    names, skipped = available(engine, wanted)
    if not names:
        why = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise UsageError(
            f"none of these can draft here ({why})",
            f"this pair has {', '.join(p for p in engine.drafters if p != 'none')}",
        )
    if not quiet:
        diagnostics.say(headline(engine, names, prompts))
        diagnostics.note(engine.info.measured)
    for name, reason in skipped.items():
        diagnostics.note(f"skipped {name}: {reason}")
    return names, skipped


def _wanted(proposers: tuple[str, ...]) -> tuple[str, ...]:
    """List the names to try, each once; ``all`` stands for every one there is.

    A method that first has to write a file is tried on request only.
    """
    usual = (m.name for m in methods() if not m.on_request)
    given = [p for name in proposers or usual for p in (ALL if name == "all" else (name,))]
    return tuple(dict.fromkeys(given))


def _as_set(settings: Settings, name: str, *, but: object = None) -> tuple[Any, ...]:
    """Return a setting as the one value to prove with; () if it is unset, or is ``but``."""
    value = settings.given(name)
    return () if value in (None, but) else (value,)


def _usual(settings: Settings, window: WindowKind, exact_rows: int) -> tuple[int, ...]:
    if most := _as_set(settings, "draft-max", but=0):
        return most
    return (GenerateParams().draft_limit(exact_rows) if window == "auto" else 4,)

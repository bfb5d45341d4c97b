"""``specllama prove``: same seed, same text, shown on the user's own machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specllama.cli import diagnostics, loading, output
from specllama.cli.listing import Column, number, show_table
from specllama.cli.options import (
    LOADING,
    Decorated,
    GroupedCommand,
    grouped,
    length_option,
    number_option,
    prompts_option,
    resolve,
    say_settings,
    seed_option,
    settings_options,
    temperatures_option,
    which_server,
    with_options,
)
from specllama.cli.output import examples
from specllama.cli.progress import Bar
from specllama.errors import UsageError
from specllama.rates import share
from specllama.settings.method_list import names
from specllama.settings.params import WINDOWS, GenerateParams, WindowKind
from specllama.speculative.drafting.method import methods
from specllama.text import number_of, percent, sanitize_line

if TYPE_CHECKING:
    from specllama.bench.prompts import BenchPrompt
    from specllama.bench.proof import Case, Way
    from specllama.bench.rounding import RowProbe
    from specllama.engine.engine import Engine
    from specllama.settings.config_file import Settings

ALL = names()
COUNTED = ("identical", "tokens", "drafted", "accepted", "bitwise")  # over all cases
_BOUND_EVERY = 10  # prompts, one of them with a schema
COLUMNS: dict[Way, str] = {
    "cold": "cold",
    "behind": "after another prompt",
    "turns": "second turn",
    "beside": "beside others",
}

_GROUP = "Another server"
_SERVER = (
    grouped("--against", metavar="URL", group=_GROUP,
            help="Prove a running server: vLLM, llama-server, mlx-lm or another engine."),
    grouped("--plain", metavar="URL", group=_GROUP,
            help="The same server without speculation, where a request cannot switch it off. "
            "With neither, -m FILE is compared with: the same weights in our own engine."),
    *reversed(which_server),
    grouped("--tokens", type=click.IntRange(1), default=4000, show_default=True, metavar="N",
            group=_GROUP, help="Tokens of replies without seeds to look at, at most."),
    grouped("--at-once", type=click.IntRange(1, 64), default=4, show_default=True,
            metavar="N", group=_GROUP,
            help="Ask for N replies at the same time, too; 1 does not."),
)  # fmt: skip
_GIVEN = ("plain", "remote_model", "api_key_file")  # unset by default
_OF_SERVER = ("against", "tokens", "at_once", "remote_kind", *_GIVEN)


def _server_options(function: Decorated) -> Decorated:
    return with_options(function, *reversed(_SERVER))


USUAL = ("model", "draft_model", "ctx_size", "gpu_layers", "threads", "prompts", "count",
         "max_tokens", "temperatures", "parallel", "against", "as_json", "set")  # fmt: skip


@click.command("prove", cls=GroupedCommand, epilog=examples()["prove"], usual=USUAL)
@prompts_option
@number_option("-n", "--count", default=20, help="Number of prompts.")
@click.option("--skip", default=0, help="Skip the first SKIP prompts, to continue an earlier run.")
@length_option(64)
@temperatures_option("0, 0.7 and 1")
@click.option("--proposer", "proposers", multiple=True, type=click.Choice(["all", "auto", *ALL]),
              metavar="METHOD",
              help="Method of drafting, or all, or auto; repeatable. Default: the setting; else "
              "every method this pair has, except self. all adds self.")  # fmt: skip
@click.option("--draft-max", "widths", multiple=True, type=int,
              help="Most tokens drafted per round; repeatable. Default: the setting; else 4, or "
              "with --window auto 15 or 6.")  # fmt: skip
@click.option("--window", type=click.Choice(WINDOWS),
              help="How far to draft; auto goes by measured times. Default: the setting; else "
              "fixed.")  # fmt: skip
@number_option("--parallel", default=1, most=64,
               help="Write N replies at once, with random arrivals and cancels.")  # fmt: skip
@seed_option
@settings_options(only=LOADING)
@_server_options
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

    Where the method forced is proved, one in ten of the shipped prompts asks for a reply that fits
    a JSON schema, since that method drafts nothing elsewhere; a line of your own prompts may hold a
    "schema".

    The plain text of a prompt and temperature is computed once, for all methods. A method that this
    pair does not have is skipped, with the reason. Only unexplained differences end with status 1.
    --against proves another server: its greedy texts, and the law that its replies follow.
    """
    from specllama.bench.proof import prove

    server = {name: flags.pop(name) for name in _OF_SERVER}
    settings = resolve(flags)
    if _is_server(server, (proposers, widths, window, parallel > 1)):
        from specllama.cli import prove_against

        request = GenerateParams(max_tokens=max_tokens, seed=seed + skip)
        return prove_against.run(
            server, settings, request, temperatures or (0.0, 1.0), prompts, (skip, skip + count),
            own_model=flags["model"] is not None, as_json=as_json,
        )  # fmt: skip
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
        drafting = len(names) * len(widths)
        total = len(chosen) * len(temperatures) * (drafting if parallel > 1 else 3 * drafting + 1)
        proof = Proof(engine, total, skipped, as_json=as_json)
        cases = prove(
            engine,
            chosen,
            proposers=names,
            temperatures=temperatures,
            draft_max=widths,
            max_tokens=max_tokens,
            seed=seed + skip,  # the seed belongs to the prompt, wherever the run begins
            base=base,
            window=window,
            warm=True,
            beside=parallel > 1,
            on_skip=proof.leave_out,
        )
        proof.run(cases, chosen, skip, skip + count)


def _is_server(server: Mapping[str, Any], own: Sequence[object]) -> bool:
    """True if another server is to be proved; ``own``: flags of a proof of our own pair."""
    if server["against"] is not None and any(own):
        raise UsageError(
            "methods, draft lengths and --parallel are the server's own here",
            "leave them out; --at-once N asks it for N replies at the same time",
        )
    given = any([server[name] for name in _GIVEN]) or server["remote_kind"] != "auto"
    if server["against"] is None and given:
        raise UsageError("which server is meant is not said", "add --against URL")
    return server["against"] is not None


def _chosen(path: Path | None, skip: int, count: int, *, bound: bool) -> list[BenchPrompt]:
    """Choose the prompts to prove with, ``count`` of them; ``bound`` puts shipped ones that
    constrain the reply among the others."""
    from specllama.bench.prompts import load_prompts, schema_prompts

    loaded = load_prompts(path)
    for n, one in enumerate(schema_prompts() if bound and path is None else ()):
        loaded.insert(_BOUND_EVERY * n + 1, one)
    if not 0 <= skip < len(loaded):
        raise click.BadParameter(f"there are {len(loaded)} prompts", param_hint="--skip")
    return loaded[skip : skip + count]


def _opened(settings: Settings, parallel: int, *, quiet: bool) -> Engine:
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


class Proof:
    """A proof in progress, and its reports: differences and progress on stderr, the table and the
    verdict on stdout.

    Args:
        total: comparisons to come.
        skipped: methods that are left out, and why.
    """

    def __init__(
        self, engine: Engine, total: int, skipped: dict[str, str], *, as_json: bool
    ) -> None:
        self.engine, self.skipped, self.as_json = engine, skipped, as_json
        self.cases: list[Case] = []
        self.probes: list[RowProbe] = []
        self.finished = False
        self._bar = Bar("comparing", total)

    def leave_out(self, name: str, reason: str) -> None:
        self.skipped[name] = reason
        self._bar.waiting(f"skipped {name}: {reason}")

    def run(
        self, cases: Iterable[Case], prompts: Sequence[BenchPrompt], skip: int, end: int
    ) -> None:
        """Show each comparison as it comes, and then the outcome; exit with status 1 if it is not
        lossless. Prompts ``skip`` to ``end`` were asked for."""
        from specllama.bench.rounding import probe_stated_rows

        try:
            with self._bar:
                for case in cases:
                    self.cases.append(case)
                    if self.as_json:
                        output.json_line(case.to_dict())
                    for line in () if self.as_json else differences(case):
                        self._bar.waiting(sanitize_line(line))
                    self._bar.advanced(len(self.cases))
                self.probes = probe_stated_rows(self.engine, prompts)
                self.finished = True
        finally:
            self._tell(skip, end)
        told = self.summary()
        if told["unexplained"] or told["rows_differ"]:
            raise SystemExit(1)

    def _tell(self, skip: int, end: int) -> None:
        """Report the outcome, or how to continue."""
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
            "near_ties": sum(not c.identical and c.ok for c in cases),
            "unexplained": sum(not c.ok for c in cases),
            **{name: sum(getattr(c, name) for c in cases) for name in COUNTED},
            "skipped": self.skipped,
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


def headline(engine: Engine, proposers: Sequence[str], prompts: int) -> str:
    """Write the pair, the machine and the coming comparison in one line."""
    info = engine.info
    draft = f" + {info.draft.label}" if info.draft else ""
    return sanitize_line(
        f"{info.target.label}{draft} on {info.device}, "
        f"{info.exactness}; {number_of(prompts, 'prompt')}, "
        f"methods {', '.join(proposers)}; "
        "one plain text per prompt and temperature for all of them"
    )


def differences(case: Case) -> Iterator[str]:
    """Describe a comparison whose texts differ; nothing for the others."""
    if (d := case.difference) is not None:
        kind = "near-tie" if d.explained and not case.bitwise else "DIFFERENT"
        exact = ", although its passes are bit-exact here" if case.bitwise else ""
        where = "" if case.way == "cold" else f", {COLUMNS[case.way]}"
        bound = f", rounding explains {d.bound:.2g} here" if d.bound else ""
        parted = (
            f"logprobs of {d.plain_text!r} differ by {d.gap:.2g}"
            if d.of_logprobs
            else f"{d.plain_text!r} or {d.spec_text!r}, gap {d.gap:.4f}{bound}"
        )
        yield (
            f"{kind}: prompt {case.prompt} ({case.slice}), {case.proposer}, "
            f"temperature {case.temperature:g}, draft-max {case.draft_max}{where}, "
            f"token {d.position}: {parted}{exact}"
        )
    if not case.law_holds:
        yield (
            f"COUNTERS: prompt {case.prompt}, {case.proposer}: "
            "emitted is not accepted + rounds - cut"
        )


def table(cases: Sequence[Case]) -> None:
    """Show one row per proposer and temperature, one column per way."""
    rows: dict[tuple[float, str], list[Case]] = {}
    for case in cases:
        rows.setdefault((case.temperature, case.proposer), []).append(case)
    ways = [way for way in COLUMNS if any(case.way == way for case in cases)]
    columns = [
        Column("proposer", lambda group: group[0].proposer),
        number("temperature", lambda group: f"{group[0].temperature:g}"),
        *(number(COLUMNS[way], partial(_identical, way)) for way in ways),
        number("tokens", lambda group: sum(case.tokens for case in group)),
        number("accepted", _accepted),
    ]
    order = sorted(rows, key=lambda row: (row[0], row[1] == "none"))
    show_table([rows[row] for row in order], columns)


def _accepted(cases: Sequence[Case]) -> str:
    drafted, accepted = (sum(getattr(c, name) for c in cases) for name in ("drafted", "accepted"))
    return percent(share(accepted, drafted))


def _identical(way: Way, cases: Sequence[Case]) -> str:
    found = [case.identical for case in cases if case.way == way]
    return f"{sum(found)}/{len(found)}" if found else "–"


def rows_alike(probes: Sequence[RowProbe]) -> None:
    """Show up to which width passes equal single steps bit for bit here, if that was measured."""
    differ = next((probe for probe in probes if probe.difference > 0.0), None)
    if differ is not None:
        exact = max((probe.rows for probe in probes if probe.rows < differ.rows), default=1)
        output.line(
            f"rows: a pass of {differ.rows} differs from single steps by up to "
            f"{differ.difference:.1g} here; --draft-max {exact - 1} stays exact"
        )
    elif probes:
        output.line(f"passes of up to {probes[-1].rows} tokens are bit-identical here")


def verdict(summary: Mapping[str, object]) -> None:
    """Show the last line: lossless, lossless up to near-ties, or not."""
    if summary["rows_differ"]:
        output.line("NOT bit-exact here: rows differ where passes were measured to be equal")
    elif summary["unexplained"]:
        output.line(f"NOT lossless here: {summary['unexplained']} unexplained differences")
    elif summary["near_ties"]:
        output.line(
            f"lossless up to {summary['near_ties']} near-ties of the target's own arithmetic"
        )
    else:
        output.line(
            f"lossless: {summary['identical']} of {summary['cases']} identical, token for token"
        )

"""``specllama bench``: speed with and without speculation, and against peers."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specllama import paths
from specllama.cli import diagnostics, loading, output
from specllama.cli.listing import Column, json_option, show_table
from specllama.cli.options import (
    LENGTH,
    LOADING,
    GroupedCommand,
    length_option,
    number_option,
    prompts_option,
    resolve,
    say_settings,
    seed_option,
    server_address,
    settings_options,
    temperatures_option,
)
from specllama.cli.output import examples
from specllama.cli.progress import Bar
from specllama.errors import UsageError
from specllama.settings.params import PROPOSERS

if TYPE_CHECKING:
    from specllama.bench.experiment import Arm
    from specllama.bench.prompts import BenchPrompt
    from specllama.bench.remote_arm import RemoteArm
    from specllama.bench.report import Comparison
    from specllama.engine.engine import Engine
    from specllama.engine.profiles import Profile
    from specllama.settings.params import GenerateParams

    Start = dict[str, Callable[[], Profile] | None]

# Columns of a report by name, those with titles of their own here, and the width below which a
# terminal has no room for one.
SHOWN = ("arm", "group", "tok/s", "ratio", "range", "p50 s", "p95 s", "TTFT ms", "TTFT ratio",
         "accepted", "same text", "own time", "in run")  # fmt: skip
TITLES = {"TTFT ms": "TTFT", "TTFT ratio": "TTFT×"}
DROPPED = {"range": 118, "p50 s": 126, "p95 s": 141, "TTFT ms": 133, "TTFT ratio": 96,
           "own time": 89}  # fmt: skip


@click.group("bench")
def command() -> None:
    """Measure speed with and without speculation."""


USUAL = ("model", "draft_model", "ctx_size", "gpu_layers", "threads", "prompts", "count",
         "max_tokens", "repetitions", "temperatures", "urls", "as_json", "set")  # fmt: skip


@command.command("run", cls=GroupedCommand, epilog=examples()["bench-run"], usual=USUAL)
@prompts_option
@click.option("--slice", "slices", multiple=True,
              help="Only prompts of these kinds: chat, code, rag, json; or schema: replies that "
              "have to fit a JSON schema.")  # fmt: skip
@number_option("-n", "--count", default=8, help="Number of prompts.")
@length_option(128, least=2)
@number_option(
    "-r", "--repetitions", default=3, help="Number of times that each prompt is measured."
)
@temperatures_option("0 and 1")
@seed_option
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="Always write --max-tokens tokens, so that every arm does the same work.",
)
@click.option("--proposer", "proposers", multiple=True, type=click.Choice(PROPOSERS),
              metavar="METHOD",
              help="Method of drafting; repeatable, one arm each. Default: the setting; else "
              "auto.")  # fmt: skip
@click.option("--length", "lengths", multiple=True, type=LENGTH,
              help="Add a fixed window of this length; repeatable.")  # fmt: skip
@click.option("--against", "urls", multiple=True, metavar="URL",
              help="A running server beside plain decoding (vLLM, SGLang, llama-server, mlx-lm, "
              "...); repeatable.")  # fmt: skip
@settings_options(only=(*LOADING, "verify", "window", "draft-max"))
@json_option
def run(
    prompts: Path | None,
    slices: tuple[str, ...],
    count: int,
    max_tokens: int,
    repetitions: int,
    temperatures: tuple[float, ...],
    seed: int,
    ignore_eos: bool,
    proposers: tuple[str, ...],
    lengths: tuple[int, ...],
    urls: tuple[str, ...],
    as_json: bool,
    **flags: Any,
) -> None:
    """Time plain decoding, speculation and peers.

    The arms take turns: each answers every prompt with the same tokens, limits and seeds. A run is
    compared with plain decoding of the same prompt in the same repetition; speeds and ratios are
    geometric means of these pairs.

    \b
    range        holds the ratio 19 of 20 times, from how much repetitions differ
    same text    replies that equal plain decoding, token by token
    own time     the share of the time that neither model took
    in run       the speed over the plain passes of that very run: the cost of
                 drafting alone, without the time of other programs

    With --window auto each method has two arms. "cold" begins every repetition knowing nothing of
    the pair; "warm" begins with what was learnt before, best with `specllama tune`, which learns on
    the other half of the shipped prompts. What a bench learns is not kept.

    A server named with --against is asked for the same messages, and puts them into its own
    template; its time to the first token is that of a prompt that it may have in its cache. Where
    a request can switch its drafting, it has two arms. Its texts are compared at temperature 0.

    """
    from specllama.bench.experiment import tasks_of
    from specllama.bench.report import Comparison, provenance

    chosen = _chosen(prompts, slices, count)
    settings = resolve(flags)
    base, usual = settings.generate_params(speculate=True), settings.given("temperature")
    temperatures = temperatures or ((0.0, 1.0) if usual is None else (usual,))
    proposers = proposers or (settings["proposer"],)
    say_settings(settings)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(loading.open_engine(settings, quiet=as_json, measured=True))
        start, facts = _start(engine, base.window)
        logs = stack.enter_context(paths.scratch("bench"))
        tasks = tasks_of(chosen, temperatures, max_tokens, seed, ignore_eos=ignore_eos)
        remote = _remote(urls, engine, base, ignore_eos=ignore_eos)
        arms = _arms(engine, base, proposers, lengths, remote, start, logs)
        for arm in arms:
            stack.callback(arm.close)
        _tell_apart(arms)
        with Bar("comparing") as bar:
            result = Comparison.of(arms, tasks, repetitions=repetitions, progress=bar.advanced)
        facts |= {"prompts": [p.id for p in chosen], "against": [arm.to_dict() for arm in remote]}
        result.provenance = provenance(engine.info) | facts
    _show(result, as_json)


def _arms(
    engine: Engine,
    base: GenerateParams,
    proposers: Sequence[str],
    lengths: Sequence[int],
    remote: Sequence[RemoteArm],
    start: Start,
    logs: Path,
) -> list[Arm]:
    """List plain decoding, our own ways to draft and other servers."""
    from specllama.bench.experiment import EngineArm

    arm = partial(EngineArm, engine=engine, logs=logs)
    arms: list[Arm] = [arm("plain", params=base.replace(speculate=False))]
    for proposer in proposers:
        own = base.replace(proposer=proposer)
        named = f"{proposer} " if len(proposers) > 1 else ""
        for state, begin in start.items():
            arms.append(arm((named + state).strip() or "specllama", params=own, begin=begin))
        for k in lengths:
            arms.append(arm(f"{named}fixed {k}", params=own.replace(window="fixed", draft_max=k)))
    return [*arms, *remote]


def _remote(
    urls: Sequence[str], engine: Engine, base: GenerateParams, *, ignore_eos: bool
) -> list[RemoteArm]:
    from specllama.bench.remote_arm import remote_arms

    count = engine.count_tokens
    params = base.on_card(engine.info.target.card)  # servers know no card
    return [
        arm
        for url in urls
        for arm in remote_arms(server_address(url), params, ignore_eos=ignore_eos, count=count)
    ]


def _start(engine: Engine, window: str) -> tuple[Start, dict[str, object]]:
    """Return the state that the arms of a method start from, empty or the pair's profile, and its
    description for a report."""
    from specllama.engine.profiles import Profile

    if window != "auto":
        return {"": None}, {}
    known = engine.windows.profile
    start: Start = {"cold": lambda: Profile(key=known.key)}
    if not known.warm:
        diagnostics.say(
            "nothing is known of this pair yet, so there is no warm arm; run specllama tune first"
        )
        return start, {}
    return start | {"warm": known.copy}, {"tuned": (known.advice or {}).get("when")}


def _tell_apart(arms: Sequence[Arm]) -> None:
    """Number arms that share a name: figures are gathered by name."""
    seen = Counter[str]()
    for arm in arms:
        seen[arm.name] += 1
        if (nth := seen[arm.name]) > 1:
            arm.name = f"{arm.name} #{nth}"


def _chosen(path: Path | None, slices: tuple[str, ...], count: int) -> list[BenchPrompt]:
    from specllama.bench.prompts import half, load_prompts, schema_prompts

    prompts = load_prompts(path)
    if path is None:  # tune learns on the others
        prompts = half(prompts, "bench")
        prompts += schema_prompts() if slices else []
    if slices:
        have = sorted({prompt.slice for prompt in prompts})
        unknown = [s for s in slices if s not in have]
        if unknown:
            raise UsageError(f"no prompts of slice {unknown[0]!r}", f"there are {', '.join(have)}")
        prompts = [prompt for prompt in prompts if prompt.slice in slices]
    return prompts[:count]


def _show(result: Comparison, as_json: bool) -> None:
    from specllama.bench import report

    if as_json:
        output.json_line(report.to_json(result))
        return
    summaries = result.summaries()
    columns = [
        Column(TITLES.get(name, name), cell, right=i > 1, drop=DROPPED.get(name, 0))
        for i, name in enumerate(SHOWN)
        if any(map(cell := report.COLUMNS[name], summaries))
    ]
    show_table(summaries, columns)
    diagnostics.note(
        "ratio: speed over plain · same text: replies that equal plain decoding · own time: share "
        "that neither model took · the others: specllama bench run --help"
    )
    output.line()
    for line in report.provenance_lines(result.provenance):
        output.line(line)

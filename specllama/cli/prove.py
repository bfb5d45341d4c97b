"""``specllama prove``: same seed, same text, shown on the user's own machine."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specllama.cli import diagnostics, loading
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
)
from specllama.errors import UsageError
from specllama.settings.method_list import names
from specllama.settings.params import WINDOWS, GenerateParams, WindowKind
from specllama.speculative.drafting.method import methods

if TYPE_CHECKING:
    from specllama.bench.prompts import BenchPrompt
    from specllama.engine.engine import Engine
    from specllama.settings.config_file import Settings

ALL = names()

EPILOG = """\b
Examples:
  specllama prove                              the bundled pair, 20 prompts
  specllama prove -m target.gguf -d draft.gguf
  specllama prove --prompts mine.txt -n 5 --draft-max 4 --draft-max 8
  specllama prove -n 200 --proposer all        every method there is
  specllama prove --window auto                draft lengths that follow measured times
  specllama prove -n 50 --skip 150             prompts 151 to 200
  specllama prove --parallel 8                 eight replies side by side
  specllama prove --json > proof.jsonl
  specllama prove --against http://box:8000 --plain http://box:8001 --report proof.md
  specllama prove --against http://box:8000 -m target.gguf

The pair, and how it is loaded and sampled, come from the settings, as for run.
Those that come from variables and files are named first.
"""


_GROUP = "Another server"
_SERVER = (
    grouped("--against", metavar="URL", group=_GROUP,
            help="Prove a running server: vLLM, llama-server, mlx-lm or another engine."),
    grouped("--plain", metavar="URL", group=_GROUP,
            help="The same server without speculation, where a request cannot switch it off. "
            "With neither, -m FILE is compared with: the same weights in our own engine."),
    grouped("--remote-kind", default="", metavar="KIND", group=_GROUP,
            help="What that server is, where that is not found out, such as vllm or openai."),
    grouped("--remote-model", default="", metavar="ID", group=_GROUP,
            help="Which of that server's models to prove, where it has several."),
    grouped("--api-key-file", type=click.Path(path_type=Path), metavar="FILE", group=_GROUP,
            help="Read the key of that server from a file; else SPECLLAMA_API_KEY holds it."),
    grouped("--tokens", type=click.IntRange(1), default=4000, show_default=True, metavar="N",
            group=_GROUP, help="Tokens of replies without seeds to look at, at most."),
    grouped("--at-once", type=click.IntRange(1, 64), default=4, show_default=True,
            metavar="N", group=_GROUP,
            help="Ask for N replies at the same time, too; 1 does not."),
    grouped("--report", type=click.Path(path_type=Path), metavar="FILE", group=_GROUP,
            help="Write a page of Markdown with the verdict and every difference."),
)  # fmt: skip
_GIVEN = ("plain", "report", "remote_kind", "remote_model", "api_key_file")  # unset by default
_OF_SERVER = ("against", "tokens", "at_once", *_GIVEN)


def _server_options(function: Decorated) -> Decorated:
    for option in reversed(_SERVER):
        function = option(function)
    return function


USUAL = ("model", "draft_model", "ctx_size", "gpu_layers", "threads", "prompts", "count",
         "max_tokens", "temperatures", "parallel", "against", "as_json", "set")  # fmt: skip


@click.command("prove", cls=GroupedCommand, epilog=EPILOG, usual=USUAL)
@prompts_option
@number_option("-n", "--count", default=20, help="Number of prompts.")
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

    Of the shipped prompts, some whose replies have to fit a JSON schema are added for the method
    forced, which drafts nothing elsewhere; a line of your own prompts may hold a "schema".

    The plain text of a prompt and temperature is computed once, for all methods. A method that this
    pair does not have is skipped, with the reason. Only unexplained differences end with status 1.
    --against proves another server: its greedy texts, and the law that its replies follow.
    """
    from specllama.bench.proof import prove
    from specllama.cli.prove_views import Proof

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
    if server["against"] is None and any([server[name] for name in _GIVEN]):
        raise UsageError("which server is meant is not said", "add --against URL")
    return server["against"] is not None


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

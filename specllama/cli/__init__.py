"""The command line. Each command is a module of its own, imported when it runs.

``specllama --help`` imports no command at all: the one-line summaries stand here, so that help and
completion answer at once.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click

from specllama import signals
from specllama.cli import diagnostics, output
from specllama.errors import UsageError

SUMMARIES = {
    "chat": "Chat with a model, in the terminal app or line by line.",
    "run": "Answer one prompt and print the text.",
    "demo": "See drafting pay on this machine, in a minute.",
    "hub": "Find, download and check models.",
    "log": "Look into the rounds of earlier runs.",
    "history": "List, search and delete stored conversations.",
    "pair": "Find a draft model that fits a target.",
    "prove": "Prove that speculation does not change the text.",
    "tune": "Measure this machine and choose the best settings.",
    "bench": "Measure speed with and without speculation.",
    "serve": "Answer clients over HTTP, many at once.",
    "rpc-worker": "Lend this machine's GPU or CPU to another one.",
    "ps": "List the models that a running server has loaded.",
    "stop": "Unload a model of a running server.",
    "top": "Show what a running server is doing.",
    "quantize": "Make a model file smaller.",
    "convert": "Turn published draft heads into loadable files.",
    "train-draft": "Train a draft head for any model file.",
    "doctor": "Check the installation and the machine.",
    "config": "Show and change settings.",
    "completion": "Print the completion script for a shell.",
}

_BESIDE = {"stop": "ps", "top": "ps"}  # commands in the module of another

# What people used to other tools type, and what it is called here.
SHORT = {
    "pull": ("hub", "pull"),
    "list": ("hub", "ls"),
    "ls": ("hub", "ls"),
    "show": ("hub", "info"),
    "rm": ("hub", "rm"),
    "search": ("hub", "search"),
}
ELSEWHERE = {
    "create": "to keep settings of your own: specllama config set, or specllama.toml in the folder",
    "push": "models can only be pulled; to make a file smaller: specllama quantize",
}

_HELP = ("-h", "--help")
_OWN = ("--offline", "-v", "--verbose")  # flags before a command

_KEEPS_NOTHING = ("completion", "doctor", "top", "ps", "stop", "rpc-worker", "quantize", "convert")

EPILOG = """\b
Examples:
  specllama                               open the terminal app
  specllama model.gguf                    open it on a model
  specllama run "What is a draft model?"  one answer, by the model used last
  specllama run -m model.gguf -d small.gguf "Tell me a story"
  specllama chat -m qwen3-8b              chat with a model from the catalog
  specllama prove                         same seed, same text: see it here

pull, list, show, rm and search are short for the commands of hub. help COMMAND
explains one, as COMMAND --help does.

Settings come from flags, SPECLLAMA_* variables, ./specllama.toml and the user's
config.toml; the first that has one wins (specllama config show --origin).
"""


class ReaderGone(Exception):
    """A closed output: its reader ended, as ``| head`` does, and nothing is wrong."""


class Commands(click.Group):
    """A group that finds commands by module name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUMMARIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUMMARIES:
            return None
        module = importlib.import_module(_module(cmd_name))
        command: click.Command = getattr(module, cmd_name if cmd_name in _BESIDE else "command")
        if not gc.isenabled():  # what was imported stays: it is not looked through
            gc.freeze()
            gc.enable()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(SUMMARIES.items()))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take ``-m FILE`` and ``FILE`` without a command for ``chat -m FILE``, and ``help
        COMMAND`` for ``COMMAND --help``."""
        at = next((i for i, word in enumerate(args) if word not in _OWN), len(args))
        if args[at : at + 1] == ["help"]:
            args = [*args[:at], *args[at + 1 :], "--help"]
        if chat := _chat_words(args[at:]):
            if not ctx.resilient_parsing:
                _need_terminal(chat)
            args = [*args[:at], "chat", *chat]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # click would call this a failure
            raise ReaderGone from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in SHORT:
            return super().resolve_command(ctx, [*SHORT[name], *args[1:]])
        if name in ELSEWHERE:
            raise click.UsageError(f"there is no command {name!r}; {ELSEWHERE[name]}", ctx)
        if not name.startswith("-") and name not in SUMMARIES:
            near = difflib.get_close_matches(name, SUMMARIES, n=1)
            also = f"; did you mean {near[0]}?" if near else ""
            if " " in name:
                also = '; to ask something: specllama run "…"'
            raise click.UsageError(f"there is no command {name!r}{also}", ctx)
        return super().resolve_command(ctx, args)


def _chat_words(words: Sequence[str]) -> list[str]:
    """Return the arguments of ``chat`` that a line without a command means, if it means any."""
    first = words[0] if words else ""
    if first.startswith("-"):
        chat = importlib.import_module(_module("chat")).command
        flags = {flag for param in chat.params for flag in (*param.opts, *param.secondary_opts)}
        known = first.partition("=")[0] in flags or first[:2] in flags
        return list(words) if known and first not in _HELP else []
    if not first or first in (*SUMMARIES, *SHORT, *ELSEWHERE):
        return []
    from specllama.models import refs

    is_model = refs.is_reference(first) or refs.parse_hub(first) is not None
    return ["-m", *words] if is_model else []


def _need_terminal(words: Sequence[str]) -> None:
    """Refuse to open the app where it cannot draw, and name the commands that can answer."""
    if not {"--plain", "--unstored"}.isdisjoint(words) or output.all_terminals():
        return
    import shlex

    line = shlex.join(words)
    raise UsageError(
        "the app needs a terminal", f'try: specllama run {line} "…", or specllama chat {line}'
    )


def _module(command: str) -> str:
    return f"{__name__}.{_BESIDE.get(command, command).replace('-', '_')}"


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from specllama import __version__
    from specllama.paths import package_versions

    known = package_versions()
    python, binding = known["python"], known["llama-cpp-python"]
    output.line(f"specllama {__version__} (llama-cpp-python {binding}, Python {python})")
    ctx.exit()


@click.group(
    cls=Commands,
    invoke_without_command=True,
    no_args_is_help=False,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version,
              help="Print versions and exit.")  # fmt: skip
@click.option("--offline", is_flag=True, help="Never use the network, whatever the command.")
@click.option("-v", "--verbose", is_flag=True, help="Print each decision and its reason on stderr.")
@click.pass_context
def group(ctx: click.Context, offline: bool, verbose: bool) -> Any:
    """Run quantized GGUF models on your own machine, sped up by speculative decoding.

    A small draft model guesses a few tokens, and the target checks them all in one pass. The text
    is what the target alone would have written.
    """
    if offline:
        # the variable reaches the engine's process too
        os.environ["SPECLLAMA_OFFLINE"] = "1"
    if verbose:
        diagnostics.tell_decisions()
    if ctx.invoked_subcommand not in _KEEPS_NOTHING:
        _say_where_nothing_is_kept()
    if ctx.invoked_subcommand is None:
        if output.all_terminals():
            chat = group.get_command(ctx, "chat")
            assert chat is not None
            return ctx.invoke(chat)
        output.line(ctx.get_help())
        ctx.exit(diagnostics.Exit.USAGE)
    return None


def _say_where_nothing_is_kept() -> None:
    from specllama import paths
    from specllama.errors import SpecllamaError

    lost = dict[str, list[str]]()  # by the reason
    with suppress(SpecllamaError):  # no home at all: the command says so where it needs one
        folders = (paths.data_dir(), paths.rounds_dir(), paths.profiles_dir(), paths.states_dir())
        names = ("conversations", "logs", "measurements", "states of models")
        whole = paths.barred(folders[0])
        for name, folder in zip(names, folders, strict=True):
            lost.setdefault(whole or paths.barred(folder), []).append(name)
    lost.pop("", None)
    for why, these in lost.items():
        diagnostics.warn(
            f"nothing can be kept ({why}): {', '.join(these)} of this run are lost; next: free "
            f"some space, or {paths.HOME_VARIABLE}=FOLDER specllama …, a folder that takes them"
        )


def invoke(args: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code. Nothing escapes as a traceback."""
    signals.install()
    output.prepare()
    try:
        result: Any = group.main(
            args=None if args is None else list(args), prog_name="specllama", standalone_mode=False
        )
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except ReaderGone:
        output.discard()
        return 0
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, click.Abort, signals.Interrupted)):
            signals.end_at_once()
        return diagnostics.report(error)


def main() -> None:
    """Run the console script."""
    raise SystemExit(invoke())

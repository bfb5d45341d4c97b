"""``specllama run``: one prompt, one answer."""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specllama import paths, signals
from specllama.cancel import Cancel
from specllama.cli import diagnostics, loading, output
from specllama.cli.listing import picked
from specllama.cli.options import (
    GroupedCommand,
    constraint_options,
    grouped,
    quiet_option,
    read_text,
    remote_options,
    request_params,
    resolve,
    settings_options,
)
from specllama.cli.output import examples
from specllama.errors import SpecllamaError, UsageError
from specllama.files import read_bounded
from specllama.interface import EngineLike, Message
from specllama.settings.params import GenerateParams

if TYPE_CHECKING:
    from specllama.cli.printer import Printer
    from specllama.remote.address import Address

WAITS_S = 1.0  # input that takes longer is named

USUAL = ("model", "draft_model", "ctx_size", "gpu_layers", "threads", "max_tokens", "temperature",
         "seed", "system", "think", "speculate", "json_schema", "file", "as_json", "remote",
         "set")  # fmt: skip


@click.command("run", cls=GroupedCommand, epilog=examples()["run"], usual=USUAL)
@click.argument("prompt", required=False)
@settings_options()
@constraint_options
@remote_options
@grouped(
    "-p", "--prompt", "typed", metavar="PROMPT", group="Prompt", help="The prompt, as an option."
)
@grouped("-f", "--file", type=click.Path(path_type=Path), metavar="FILE", group="Prompt",
         help="Read the prompt from a file.")  # fmt: skip
@grouped("--raw", is_flag=True, group="Output",
         help="Continue the prompt itself, without the chat template.")  # fmt: skip
@grouped("--json", "as_json", is_flag=True, group="Output",
         help="Print every event as a JSON line. The last one is the finish object.")  # fmt: skip
@quiet_option("Print no statistics and no notes on stderr.")
def command(
    prompt: str | None,
    typed: str | None,
    file: Path | None,
    raw: bool,
    as_json: bool,
    quiet: bool,
    server: Address | None,
    **flags: Any,
) -> int:
    """Answer PROMPT and print the text.

    With "-", or without PROMPT in a pipe, the prompt is read from standard input. What is piped
    in beside PROMPT stands before it: cat notes.md | specllama run "Summarize this." It is read to
    its end, however slowly it comes; a program that leaves a pipe open gives < /dev/null instead.
    """
    settings = resolve(flags, quiet=quiet)
    if not quiet:
        _say_model(prompt)
    params = request_params(settings, flags)
    given = [one for one in (prompt, typed, file) if one is not None]
    if len(given) > 1:
        raise UsageError("give one prompt: as an argument, with -p, or with -f")
    text = read_prompt(given[0] if given else None, raw=raw, quiet=quiet)
    request: str | Sequence[Message] = text
    if raw and settings.origin("system") == "flag":
        raise UsageError("a system prompt needs the chat template", "leave out --system or --raw")
    if not raw:
        system = settings["system"]
        head = [Message("system", system)] if system else []
        request = [*head, Message("user", text)]
    with loading.opened(settings, server, quiet=quiet) as engine:
        from specllama.cli.printer import Printer
        from specllama.store.rounds import Logged

        keeps = settings["log"] and not paths.barred(paths.rounds_dir())
        logged = Logged(engine, command="run")
        printer = Printer(
            as_json=as_json,
            quiet=quiet,
            close_line=not raw or output.is_terminal(),
            thoughts=settings["thoughts"],
        )
        try:
            return answer(logged if keeps else engine, request, params, printer)
        except SpecllamaError as error:
            if as_json:
                output.json_line({"type": "error", **picked(error, "message hint exit_code")})
            raise
        finally:
            logged.close()


def answer(
    engine: EngineLike, request: str | Sequence[Message], params: GenerateParams, printer: Printer
) -> int:
    """Generate and print one reply; returns the exit code."""
    cancel = Cancel()
    with signals.stop_on_signals(cancel) as received:
        printer.show(engine.generate(request, params, cancel=cancel))
    if received:
        return received[0]
    done = printer.finished
    if done is None or done.reason == "error":
        return diagnostics.Exit.FAILED
    if params.constrained and done.reason in ("length", "context"):
        what = "the JSON schema" if params.json_schema is not None else "the grammar"
        diagnostics.warn(
            f"the reply ended before {what} was satisfied; next: more room (-n, -c), another seed, "
            "or a schema with fewer choices (maxLength, maxItems)"
        )
        return diagnostics.Exit.FAILED
    return diagnostics.Exit.OK


def read_prompt(argument: str | Path | None, *, raw: bool, quiet: bool = False) -> str:
    """Read the prompt from the argument, a file or standard input.

    Input may hold any bytes: what is not UTF-8 becomes U+FFFD, NUL stays. The newline that ends a
    piped text is dropped, unless the prompt is to be continued as it is.

    Raises:
        UsageError: there is no prompt, or an empty one, or the file cannot be read.
    """
    if isinstance(argument, Path):
        text = _dropped(read_text(argument, "the prompt file"), raw)
    elif argument is not None and argument != "-":
        # Arguments that are not UTF-8 arrive with surrogates for the odd bytes.
        text = os.fsencode(argument).decode("utf-8", "replace")
    elif argument == "-" or not sys.stdin.isatty():
        text = _dropped(_piped("the prompt", quiet), raw)
    else:
        raise UsageError("there is no prompt", 'give one: specllama run "…", or pipe it in')
    if argument is not None and argument != "-" and _is_piped():
        piped = _piped("the input", quiet)
        text = f"{piped.rstrip()}\n\n{text}" if piped.strip() else text
    if not (text if raw else text.strip()):
        raise UsageError("the prompt is empty", 'give some text: specllama run "…"')
    return text


def _piped(what: str, quiet: bool) -> str:
    """Read all of standard input; show a note if it comes slowly."""
    said = f"reading {what} from standard input; end it with Ctrl-D, or use < {os.devnull}"
    waiting = threading.Timer(WAITS_S, diagnostics.note, [said])
    waiting.daemon = True
    if not quiet:
        waiting.start()
    try:
        return read_bounded(sys.stdin.buffer, what).decode("utf-8", "replace")
    finally:
        waiting.cancel()


def _is_piped() -> bool:
    """True if a pipe or a file was put before the program, not one that it inherited."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _say_model(prompt: str | None) -> None:
    """Show how to name a model if the prompt looks like one, as other tools have it there."""
    if prompt is None or not prompt or any(sign.isspace() for sign in prompt):
        return
    from specllama.models import refs

    if refs.is_reference(prompt):
        diagnostics.note(
            f"{prompt} is the prompt here; to use it as the model: specllama run -m {prompt} PROMPT"
        )


def _dropped(text: str, raw: bool) -> str:
    """Drop the newline that ends a piped text, unless it is to be continued as it is."""
    return text if raw else text.removesuffix("\n").removesuffix("\r")

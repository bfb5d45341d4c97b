"""stderr and exit codes: everything that is not data.

0 ok · 1 failed · 2 usage or settings · 3 model unavailable · 4 pair incompatible ·
5 cannot load or does not fit · 130 interrupted · 143 terminated
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from enum import IntEnum

import click

from specllama.cli import output
from specllama.cli.output import wrapped
from specllama.errors import SpecllamaError, UsageError, as_ours, out_of_memory
from specllama.paths import cannot_import, pip_install
from specllama.signals import Interrupted
from specllama.text import sanitize, sanitize_line

CROWDED = "other programs need the processors: times of such a minute are not this machine's"
DEBUG_VARIABLE = "SPECLLAMA_DEBUG"


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    CANNOT_LOAD = 5
    INTERRUPTED = 130
    TERMINATED = 143


def styled(text: str, *codes: str) -> str:
    """Paint text for stderr: only on a terminal, and not with NO_COLOR or a dumb terminal."""
    return f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if output.use_colour(sys.stderr) else text


DIM, RED, GREEN, YELLOW = "2", "31", "32", "33"


def say(text: str, *codes: str) -> None:
    """Write a line to stderr, safe for a terminal; ignore a closed stderr.

    It is one write: another thread's line (``serve``'s log) never comes between it and its end.
    """
    _put(f"{styled(sanitize(text), *codes)}\n")


def width() -> int:
    """Return the columns of the terminal that stderr is; 0 if it is none."""
    return shutil.get_terminal_size().columns if output.is_terminal(sys.stderr) else 0


def write(text: str, *codes: str) -> None:
    """Write a piece of text to stderr, without a new line."""
    _put(styled(sanitize(text), *codes))


def _put(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


def note(text: str) -> None:
    say(wrapped(text, columns) if (columns := width()) else text, DIM)


def tell_decisions() -> None:
    """Show notes of specllama's decisions from now on, without llama.cpp's own log."""
    import logging

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(record.getMessage())

    logger, handler = logging.getLogger("specllama"), Notes(logging.INFO)
    handler.addFilter(lambda record: not record.name.startswith("specllama.llama"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def warn(text: str) -> None:
    say(f"warning: {text}", YELLOW)


def require_extra(extra: str, *packages: str) -> None:
    """Raise SpecllamaError if a package of an extra is missing."""
    for needed in packages:
        if importlib.util.find_spec(needed) is None:
            raise SpecllamaError(
                f"{click.get_current_context().info_name} needs {needed}, which is not installed",
                f"install what it needs with: {pip_install(_needs(extra))}",
            )


def _needs(extra: str) -> str:
    """Return the requirements of an extra, for a shell. The name of our own package is not among
    them: an index may not know it, or know it as another's."""
    from importlib import metadata

    marker = re.compile(rf"""extra\s*==\s*['"]{extra}['"]""")
    needed = [one for one in metadata.requires("specllama") or [] if marker.search(one)]
    return " ".join(f'"{one.split(";")[0].strip()}"' for one in needed)


yes_option = click.option("-y", "--yes", is_flag=True, help="Delete without asking.")


def confirm(question: str, *, default: bool = True) -> None:
    """Ask a yes-or-no question on stderr.

    Args:
        default: the answer of a bare Enter.

    Raises:
        UsageError: standard input is no terminal, so no answer can come.
        click.Abort: the answer is no.
    """
    if not sys.stdin.isatty():
        raise UsageError(
            f"{question.rstrip('?')}: there is no terminal to ask on", "add -y to agree"
        )
    if not click.confirm(question, default=default, err=True):
        raise click.Abort


def explain(error: BaseException) -> tuple[int, str, str | None]:
    """Exit code, one-line message and hint for any exception.

    Subclasses stand before their bases: the first match counts.
    """
    if out_of_memory(error):
        error = as_ours(error, "out of memory")
    if isinstance(error, ImportError):
        said = f"a part of specllama needs {error.name or 'a package'}"
        error = cannot_import(error, said, (error.name or "").partition(".")[0], SpecllamaError)
    if isinstance(error, SpecllamaError):
        return error.exit_code, error.message, error.hint
    if isinstance(error, click.UsageError):
        context = error.ctx.command_path if error.ctx is not None else "specllama"
        return Exit.USAGE, error.format_message(), f"see {context} --help"
    if isinstance(error, click.ClickException):
        return error.exit_code, error.format_message(), None
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return Exit.INTERRUPTED, "interrupted", None
    if isinstance(error, Interrupted):
        return error.code, "interrupted", None
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return Exit.FAILED, f"{error.strerror or error}{where}", None
    return (
        Exit.FAILED,
        f"unexpected {type(error).__name__}: {error}",
        f"this is a bug; {DEBUG_VARIABLE}=1 shows where it happened",
    )


def report(error: BaseException) -> int:
    """Print the failure, its reason and the next step; return the exit code."""
    code, message, hint = explain(error)
    if os.environ.get(DEBUG_VARIABLE) not in (None, "", "0"):
        import traceback

        say("".join(traceback.format_exception(error)).rstrip())
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        say(message)
    elif not isinstance(error, (KeyboardInterrupt, click.Abort, Interrupted)):
        say(f"error: {sanitize_line(message)}", RED)
        if hint:
            say(f"  {sanitize_line(hint)}")
    return int(code)

"""Questions before something is deleted or downloaded."""

from __future__ import annotations

import sys

import click

from specllama.errors import UsageError

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

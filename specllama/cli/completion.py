"""``specllama completion``, and what shells complete: models, settings, runs, conversations.

Only the shell asks; an error there completes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem, get_completion_class

from specllama.cli import output
from specllama.cli.output import examples

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _fitting(names: Callable[[], Iterable[str]]) -> Complete:
    """Complete those of some names that begin with what was typed."""

    def complete(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
        try:
            return [CompletionItem(name) for name in names() if name.startswith(begun)]
        except Exception:  # a traceback would land in the middle of a shell prompt
            return []

    return complete


def models(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete models on this machine and pairs of the catalog, else files."""
    return _fitting(_model_names)(ctx, param, begun) or [CompletionItem(begun, type="file")]


def _model_names() -> list[str]:
    from specllama.models import catalog, library

    return ["tiny", *(model.ref for model in library.scan()), *catalog.load()]


@_fitting
def pairs() -> Iterable[str]:
    from specllama.models import catalog

    return catalog.load()


@_fitting
def settings() -> Iterable[str]:
    from specllama.settings.schema import BY_NAME

    return BY_NAME


@_fitting
def runs() -> list[str]:
    from specllama.store.rounds import list_runs

    return ["last", *(path.stem for path in list_runs())]


@_fitting
def conversations() -> list[str]:
    from specllama.store.sessions import SessionStore

    with SessionStore.peek() as store:
        return ["last", *(one.id for one in store.summaries())]


@click.command("completion", epilog=examples()["completion"])
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script for SHELL."""
    kind = get_completion_class(shell)
    assert kind is not None
    output.line(kind(ctx.find_root().command, {}, "specllama", "_SPECLLAMA_COMPLETE").source())

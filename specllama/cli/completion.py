"""``specllama completion``: the script that gives a shell our commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from specllama.cli import output

EPILOG = """\b
Set up (once):
  bash   specllama completion bash > ~/.local/share/bash-completion/completions/specllama
  zsh    specllama completion zsh > "${fpath[1]}/_specllama"
  fish   specllama completion fish > ~/.config/fish/completions/specllama.fish
"""


@click.command("completion", epilog=EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script for SHELL."""
    kind = get_completion_class(shell)
    assert kind is not None
    root = ctx.find_root()
    output.line(kind(root.command, {}, "specllama", "_SPECLLAMA_COMPLETE").source())

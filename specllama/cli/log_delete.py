"""``specllama log rm``: delete what specllama kept."""

from __future__ import annotations

import click

from specllama.cli import completing, diagnostics
from specllama.cli.asking import confirm, yes_option
from specllama.cli.listing import size
from specllama.errors import UsageError
from specllama.paths import rounds_dir
from specllama.store.rounds import delete_run, find_run, list_runs

RM_EPILOG = """\b
Examples:
  specllama log rm last
  specllama log rm 20261121-0152 20261121-0160
  specllama log rm --all --yes
"""


@click.command("rm", epilog=RM_EPILOG)
@click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=completing.runs)
@click.option("--all", "every", is_flag=True, help="Delete the logs of every run.")
@yes_option
def rm(runs: tuple[str, ...], every: bool, yes: bool) -> None:
    """Delete the logs of runs. A file outside the log folder is never touched."""
    if every == bool(runs):
        raise UsageError(
            "give the runs to delete, or --all, not both", "list them: specllama log ls"
        )
    # one run can be named twice: `last` and its name
    paths = list_runs() if every else list(dict.fromkeys(find_run(run) for run in runs))
    folder = rounds_dir().resolve()
    for path in paths:
        if path.resolve().parent != folder:
            raise UsageError(f"{path} is not in the log folder {folder}", "delete it yourself")
    if not paths:
        diagnostics.note("there is no round log to delete")
        return
    what = paths[0].stem if len(paths) == 1 else f"{len(paths)} round logs"
    if not yes:
        total = sum(path.stat().st_size for path in paths if path.exists())
        confirm(f"delete {what} ({size(total)})?", default=False)
    freed = sum(delete_run(path) for path in paths)
    diagnostics.note(f"deleted {what}, {size(freed)} freed")

"""``specllama log rm`` and ``specllama log texts``: delete what specllama kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from specllama.cli import completing, diagnostics
from specllama.cli.asking import confirm, yes_option
from specllama.cli.listing import Column, json_option, listing, number, size, when
from specllama.errors import StoreError, UsageError
from specllama.paths import rounds_dir
from specllama.store.rounds import delete_run, find_run, list_runs

if TYPE_CHECKING:
    from specllama.store.corpus import CorpusFile

RM_EPILOG = """\b
Examples:
  specllama log rm last
  specllama log rm 20261121-0152 20261121-0160
  specllama log rm --all --yes
"""
TEXTS_EPILOG = """\
Texts are kept only with --keep-texts (or `specllama config set keep-texts true`), as token ids, on
this machine. The suffix method copies drafts from them.

\b
Examples:
  specllama log texts                    what is kept, by tokenizer
  specllama log texts --delete           delete all of it, after asking
  specllama log texts 3f9a --delete -y   only the texts of one tokenizer
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


@click.command("texts", epilog=TEXTS_EPILOG)
@click.argument("tokenizers", nargs=-1, metavar="[TOKENIZER]...")
@click.option("--delete", is_flag=True, help="Delete the listed texts.")
@yes_option
@json_option
def texts(tokenizers: tuple[str, ...], delete: bool, yes: bool, as_json: bool) -> None:
    """List or delete the texts kept for suffix decoding.

    TOKENIZER is a name from the list or the start of one. Without it: all.
    """
    from specllama.store.corpus import Corpus  # numpy, which --help does without

    corpus = Corpus()
    found = _chosen(corpus.files(), tokenizers)
    for file in found:
        if file.damaged:
            diagnostics.warn(
                f"the texts of {file.tokenizer} are damaged: behind the first {file.texts} they "
                "cannot be read"
            )
    columns = [
        Column("tokenizer", "tokenizer"),
        number("texts", "texts"),
        number("tokens", "tokens"),
        number("size", lambda file: size(file.file_bytes)),
        Column("last used", lambda file: when(file.modified_s), drop=80),
    ]
    listing(as_json, "texts", found, columns, empty="no texts are kept; --keep-texts keeps them")
    if not delete or not found:
        return
    kept = sum(file.texts for file in found)
    what = f"{kept} kept {'text' if kept == 1 else 'texts'}"
    if not yes:
        confirm(f"delete {what}?", default=False)
    freed = sum(corpus.delete(file.tokenizer) for file in found)
    diagnostics.note(f"deleted {what}, {size(freed)} freed")


def _chosen(files: list[CorpusFile], names: tuple[str, ...]) -> list[CorpusFile]:
    for name in names:
        if not name or not any(file.tokenizer.startswith(name) for file in files):
            raise StoreError(
                f"no texts are kept for a tokenizer {name!r}", "list them: specllama log texts"
            )
    return [f for f in files if not names or f.tokenizer.startswith(names)]

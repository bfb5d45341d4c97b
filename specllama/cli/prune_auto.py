"""``quantize --prune-layers auto``: search the layers to keep, and say what was found."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specllama.bench.layer_choice import Choice
    from specllama.models.gguf import GgufHeader

_STEPS = 1000


def require_layers(source: Path) -> None:
    """Refuse a file from which no layer can be dropped.

    Raises:
        UnsupportedModel: with the reason.
        CannotLoad, ModelUnavailable: it is no model, or not there.
    """
    from specllama.errors import UnsupportedModel
    from specllama.models import pruned
    from specllama.models.gguf import read_header
    from specllama.models.loadable import check_loadable

    header = read_header(source)
    check_loadable(header)
    if reason := pruned.why_not(header):
        raise UnsupportedModel(
            f"{source.name} cannot draft for itself: {reason}",
            "use a separate draft model (specllama pair), or --proposer ngram",
        )


def choose(source: Path, *, threads: int, seconds: float) -> Choice:
    """The layers that make the best draft of a file; the choice is kept for ``--proposer self``.

    Raises:
        CannotLoad, DoesNotFit: it cannot be run here, which the search has to.
    """
    from specllama.bench.layer_choice import choose_layers
    from specllama.bench.layer_search import LONGEST
    from specllama.bench.prompts import half, load_prompts
    from specllama.cli import loading
    from specllama.cli.listing import note
    from specllama.engine.profiles import measured_passes
    from specllama.models import pruned
    from specllama.models.gguf import read_header
    from specllama.settings.config import load_settings

    header = read_header(source)
    options = load_settings().engine_options()
    options = dataclasses.replace(
        options,
        threads=threads or options.threads,
        n_ctx=_context(header),
        heads=(),  # those of the settings belong to another target
    )
    with loading.load(source, None, options) as engine, _Progress() as progress:
        passes = measured_passes(engine.info, LONGEST + 1)
        choice = choose_layers(
            engine,
            header,
            half(load_prompts(), "tune"),
            passes=passes,
            seconds=seconds,
            progress=progress,
        )
    if not pruned.keep_choice(header, choice.to_dict()):
        note(
            "not kept for --proposer self: an earlier search went further, or the cache is not"
            " writable"
        )
    return choice


def _context(header: GgufHeader) -> int:
    """Room for a prompt and its reply; more would only cost memory."""
    return min(header.context_length or 2048, 2048)


class _Progress:
    """A bar on stderr over the time of the search."""

    def __init__(self) -> None:
        from specllama.cli.progress import Bar

        self._bar = Bar("trying layers", _STEPS, transfer=False)

    def __enter__(self) -> _Progress:
        self._bar.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.__exit__(*exception)

    def __call__(self, share: float, label: str) -> None:
        self._bar.at(int(_STEPS * share))


def show(choice: Choice) -> None:
    """The table of what was tried on stdout, the conclusion on stderr."""
    from specllama.cli.listing import Column, note, show_table
    from specllama.models.pruned import layer_list

    columns = [
        Column("without", give=True),
        Column("step", right=True),
        Column("accepted 1-4", give=True),
        Column("best length", right=True),
        Column("speed", right=True),
    ]
    rows = [
        [
            layer_list(trial.drop),
            f"{trial.cost:.0%}",
            " ".join(f"{share:.2f}" for share in trial.survival[:4]),
            str(trial.length),
            f"{trial.speed:.2f}×",
        ]
        for trial in choice.finalists
    ]
    show_table(rows, columns)
    more = "" if choice.complete else " (--search-seconds)"
    how = "" if choice.passes == "measured" else " (specllama tune measures it)"
    note(f"{choice.extent}{more}; cost of wider passes: {choice.passes}{how}")
    note(f"on {choice.checked} further tokens: {choice.words}")

"""Steps of ``specllama hub pull``: the transfer, a check of what arrived, the next command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specllama.cli.listing import context, note, params, size

if TYPE_CHECKING:
    from specllama.models.hub import HubClient
    from specllama.models.pull import PullItem


def fetch(client: HubClient, item: PullItem) -> None:
    """Download the missing parts of one model, with a bar; show how to resume if interrupted."""
    from specllama.cli.progress import Bar
    from specllama.models import pull
    from specllama.signals import Interrupted

    for file in item.missing:
        try:
            with Bar(file.name, file.size) as progress:
                pull.fetch(item, client, progress, name=file.name)
        except (KeyboardInterrupt, Interrupted):
            note("what arrived is kept; run the same command again to resume")
            raise


def check_headers(items: list[PullItem]) -> None:
    """Read the headers of pulled files: one that cannot run is known now, not at the first chat."""
    from specllama.errors import SpecllamaError
    from specllama.models.gguf import read_header
    from specllama.models.loadable import check_loadable
    from specllama.models.sidecars import SIDECARS, advice, kind_of

    for item in items:
        try:
            header = read_header(item.path)
            if kind := kind_of(header):
                note(f"{item.ref}: {SIDECARS[kind]}, {size(header.file_bytes)}")
                note(f"next: {advice(kind).replace('FILE', item.ref)}")
                continue
            check_loadable(header)
        except SpecllamaError as error:
            note(f"warning: {error.message}")
            continue
        note(
            f"{item.ref}: {header.architecture}, {params(header.n_params)} parameters,"
            f" {header.quantization}, context {context(header.context_length)},"
            f" {size(header.file_bytes)}"
        )


def say_next_step(refs: Sequence[str], items: list[PullItem]) -> None:
    """Show the command that uses the pulled files."""
    from specllama.models import catalog
    from specllama.models.heads import HEADS
    from specllama.models.sidecars import SIDECARS

    offered = {
        f"{other.sidecar} {item.listing.repo}": (item, other)
        for item in items
        for other in item.listing.models
        if other.sidecar in HEADS and not item.model.sidecar
    }
    for item, other in offered.values():
        name = f"{item.listing.repo}/{other.name}"
        note(f"also there, {SIDECARS[other.sidecar]}: specllama hub pull {name}")
    if len(refs) == 1 and catalog.find(refs[0]) is not None:
        note(f"next: specllama chat -m {refs[0]}")
        return
    runnable = [item for item in items if not item.model.sidecar]
    if len(runnable) == 2:
        big, small = sorted(runnable, key=lambda item: -item.model.bytes)
        note(f"next: specllama chat -m {big.ref} -d {small.ref}")
    elif runnable:
        note(f"next: specllama chat -m {runnable[0].ref}")
        note(f"      specllama pair {runnable[0].ref}   which drafts fit it")

"""The tables of ``specllama hub``, and the steps of a pull with what they show.

Imported when there is something to show, so that help answers at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from specllama import paths
from specllama.cli.listing import Column, context, note, number, show_facts, show_table
from specllama.cli.progress import Bar
from specllama.errors import SpecllamaError
from specllama.models import catalog, library, pull, refs
from specllama.models.catalog import CatalogPair
from specllama.models.companions import HEADS, SIDECARS, advice, kind_of, kind_of_name
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.hub_client import HubClient
from specllama.models.judgement import Judgement, Listed, figure
from specllama.models.loadable import check_loadable
from specllama.models.nextn_blocks import nextn_blocks
from specllama.models.summaries import FileSummary
from specllama.signals import Interrupted
from specllama.text import count, size

FIT_WORDS = {"yes": "✓", "tight": "tight", "no": "–"}


def quant_words(quants: tuple[str, ...]) -> str:
    """List the usual quants first, four at most."""
    ranked = sorted(quants, key=lambda q: (q not in refs.DEFAULT_QUANTS, quants.index(q)))
    return " ".join(ranked[:4]) + (f" +{len(ranked) - 4}" if len(ranked) > 4 else "")


def show_usable(listed: Sequence[Listed]) -> None:
    """Show the models that can be run, and the drafts for them."""
    columns = [
        Column("model", lambda one: library.from_home(one.model.ref), give=True),
        number("params", lambda one: count(one.summary.n_params)),
        Column("quant", lambda one: one.summary.quantization),
        Column("size", _size, right=True),
        number("context", lambda one: context(one.summary.context_length), drop=70),
        Column("arch", lambda one: one.summary.architecture, drop=110),
        Column("from", lambda one: one.model.source, drop=90),
        Column("used", lambda one: _ago(one.model.used), drop=100),
        Column("drafts that fit", _first_draft, give=True, style="green"),
    ]
    if listed:
        show_table(sorted(listed, key=lambda i: (i.model.source, i.model.ref)), columns)


def _size(one: Listed) -> str:
    return size(one.model.bytes) + ("" if one.model.complete else " (parts missing)")


def _first_draft(one: Listed) -> str:
    more = f" +{len(one.drafts) - 1}" if len(one.drafts) > 1 else ""
    return one.drafts[0] + more if one.drafts else ""


def show_header(header: GgufHeader, summary: FileSummary) -> None:
    """Show the header of one file on disk."""
    kind = summary.sidecar
    facts = {
        "name": header.name,
        "architecture": f"{header.architecture}, {header.block_count} layers",
        "parameters": count(header.n_params),
        "quantization": f"{header.quantization}, {size(header.file_bytes)}",
        "context": f"{header.context_length:,} tokens",
        "tokenizer": f"{header.tokenizer_model}, {header.vocab_size:,} tokens"
        + (f", of which it guesses {header.rows:,}" if header.rows else ""),
        "chat template": "yes" if header.chat_template else "no",
        "NextN layers": nextn_blocks(header) or "",
        "license": header.text("general.license"),
        "what it is": SIDECARS[kind] if kind else "",
    }
    show_facts("file", str(header.path), facts)
    if kind in HEADS:
        note(f"next: specllama chat -m TARGET --head {header.path}")
    elif summary.reason:
        note(f"it cannot be run: {summary.reason}")
    else:
        note(f"next: specllama pair {header.path}   which drafts fit it")


def show_sidecars(listed: Sequence[Listed]) -> None:
    """Show heads, projectors and the like, and the use of each."""
    if not listed:
        return
    note("files that go with a model:")
    columns = [
        Column("file", lambda one: library.from_home(one.model.ref), give=True),
        Column("what it is", lambda one: SIDECARS[one.summary.sidecar]),
        number("size", lambda one: size(one.model.bytes)),
        Column(
            "use", lambda one: "--head" if one.summary.sidecar in HEADS else "not used by specllama"
        ),
    ]
    show_table(listed, columns)


def _ago(when: float) -> str:
    days = (time.time() - when) / 86400
    if days < 1:
        return "today"
    return f"{days:.0f} d ago" if days < 60 else f"{days / 30.4:.0f} mo ago"


def show_pairs(entries: Sequence[tuple[CatalogPair, Judgement]]) -> None:
    """Show the catalog, one line a pair."""
    here = library.scan()

    def is_here(pair: CatalogPair) -> bool:
        return any(refs.matches(model, pair.target.hub) for model in here)

    columns = [
        Column("fits", lambda one: FIT_WORDS[one[1].fits], style="green"),
        Column("name", lambda one: one[0].name, style="bold"),
        number("target", lambda one: count(one[0].target.params)),
        Column("draft with", lambda one: _draft_words(one[0], here)),
        number("size", lambda one: size(one[0].bytes)),
        number("memory", lambda one: f"{one[0].memory_gb:.0f} GB"),
        number("plain tok/s", lambda one: figure(one[1].plain)),
        Column("here", lambda one: "yes" if is_here(one[0]) else "", style="green"),
        Column("why", lambda one: one[0].why, cut=True, drop=100),
    ]
    show_table(entries, columns)


def show_pair(pair: CatalogPair, judged: Judgement) -> None:
    """Show one pair with all known facts."""
    draft = pair.draft
    facts = {
        "why": pair.why,
        "target": f"{pair.target.ref}  {count(pair.target.params)}, {size(pair.target.bytes)}",
        "draft": _draft_words(pair, library.scan())
        if draft is None
        else f"{draft.ref}  {count(draft.params)}, {size(draft.bytes)}",
        "head": f"specllama hub pull {pair.head}" if pair.head else "",
        "not here": pair.cannot,
        "memory": f"{pair.memory_gb:.0f} GB; this machine: {size(judged.free)}, {judged.fits}",
        "speed here": f"{judged.speed}, by its size; with drafting: not measured",
        "license": pair.licence,
        "source": pair.source,
        "checked": f"{'on the hub' if pair.checked else 'no'}, {pair.date}",
    }
    show_facts(pair.name, pair.family, facts, style="bold")


def _draft_words(pair: CatalogPair, here: Sequence[library.LocalModel]) -> str:
    if pair.draft is not None:
        return f"{count(pair.draft.params)} {pair.draft.hub.quant}"
    said = {kind.method: kind.says for kind in HEADS.values()}
    return said.get(method_of(pair, here), "copies of its text")


def method_of(pair: CatalogPair, here: Sequence[library.LocalModel]) -> str:
    """Return the method that drafts for a pair: that of a head which is there for its target, or
    ships under its name where that is not here, else the catalog's."""
    from specllama.engine.target_heads import known_heads

    target = next((one.path for one in here if refs.matches(one, pair.target.hub)), None)
    if target is None:
        shipped = paths.bundled_dir().glob(f"*-{pair.name}-*.gguf")
        kinds = [kind_of_name(head.name) for head in shipped]
    else:
        kinds = [kind_of(head) for head in known_heads(read_header(target))]
    return next((HEADS[kind].method for kind in kinds if kind in HEADS), pair.method)


# ---------------------------------------------------------------------- pulling


def fetch(client: HubClient, item: pull.PullItem) -> None:
    """Download the missing parts of one model, with a bar; show how to resume if interrupted."""
    facts = [item.ref, size(item.model.bytes), item.listing.licence]
    note(", ".join(filter(None, facts)))
    note(f"  from {item.origin}")
    for file in item.missing:
        try:
            with Bar(file.name, file.size, transfer=True) as progress:
                pull.fetch(item, client, progress, name=file.name)
        except (KeyboardInterrupt, Interrupted):
            arrived = item.bytes_here(file)
            kept, again = ("what arrived", "resume") if arrived else ("nothing", "begin anew")
            note(f"{kept} is kept; run the same command again to {again}")
            raise


def check_headers(items: list[pull.PullItem]) -> None:
    """Read the headers of pulled files: one that cannot run is known now, not at the first chat."""
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
            f"{item.ref}: {header.architecture}, {count(header.n_params)} parameters,"
            f" {header.quantization}, context {context(header.context_length)},"
            f" {size(header.file_bytes)}"
        )


def say_next_step(refs: Sequence[str], items: list[pull.PullItem]) -> None:
    """Show the command that uses the pulled files."""
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

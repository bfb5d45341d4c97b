"""The tables of ``specllama hub``."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specllama.cli.listing import (
    Column,
    context,
    note,
    number,
    params,
    show_facts,
    show_table,
    size,
)

if TYPE_CHECKING:
    from specllama.backend.expected import Machine
    from specllama.models.catalog import CatalogPair
    from specllama.models.gguf import GgufHeader
    from specllama.models.library import LocalModel
    from specllama.models.summaries import FileSummary, Listed

FIT_WORDS = {"yes": "✓", "tight": "tight", "no": "–"}


def quant_words(quants: tuple[str, ...]) -> str:
    """List the usual quants first, four at most."""
    from specllama.models.refs import DEFAULT_QUANTS

    ranked = sorted(quants, key=lambda q: (q not in DEFAULT_QUANTS, quants.index(q)))
    return " ".join(ranked[:4]) + (f" +{len(ranked) - 4}" if len(ranked) > 4 else "")


def show_usable(listed: Sequence[Listed]) -> None:
    """Show the models that can be run, and the drafts for them."""
    columns = [
        Column("model", lambda one: short(one.model), give=True),
        number("params", lambda one: params(one.summary.n_params)),
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
    from specllama.models.heads import HEADS
    from specllama.models.nextn import nextn_blocks
    from specllama.models.sidecars import SIDECARS

    kind = summary.sidecar
    facts = {
        "name": header.name,
        "architecture": f"{header.architecture}, {header.block_count} layers",
        "parameters": params(header.n_params),
        "quantization": f"{header.quantization}, {size(header.file_bytes)}",
        "context": f"{header.context_length:,} tokens",
        "tokenizer": f"{header.tokenizer_model}, {header.vocab_size:,} tokens",
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
    from specllama.models.heads import HEADS
    from specllama.models.sidecars import SIDECARS

    if not listed:
        return
    note("files that go with a model:")
    columns = [
        Column("file", lambda one: short(one.model), give=True),
        Column("what it is", lambda one: SIDECARS[one.summary.sidecar]),
        number("size", lambda one: size(one.model.bytes)),
        Column(
            "use",
            lambda one: "--head" if one.summary.sidecar in HEADS else "not used by specllama",
        ),
    ]
    show_table(listed, columns)


def short(model: LocalModel) -> str:
    """Return the reference to type; a path below the home folder is shown from ``~``."""
    home = os.path.expanduser("~")
    if model.ref.startswith(home + os.sep):
        return "~" + model.ref[len(home) :]
    return model.ref


def _ago(when: float) -> str:
    days = (time.time() - when) / 86400
    if days < 1:
        return "today"
    return f"{days:.0f} d ago" if days < 60 else f"{days / 30.4:.0f} mo ago"


def show_pairs(entries: Sequence[tuple[CatalogPair, str]], machine: Machine) -> None:
    """Show the catalog, one line a pair."""
    from specllama.backend.expected import figure
    from specllama.models import library, refs

    here, fits = library.scan(), {pair.name: verdict for pair, verdict in entries}

    def is_here(pair: CatalogPair) -> bool:
        target = refs.HubRef(pair.target.repo, pair.target.quant)
        return any(refs.matches(model, target) for model in here)

    columns = [
        Column("fits", lambda pair: FIT_WORDS[fits[pair.name]], style="green"),
        Column("name", "name", style="bold"),
        number("target", lambda pair: params(pair.target.params)),
        Column("draft with", _draft_words),
        number("size", lambda pair: size(pair.bytes)),
        number("memory", lambda pair: f"{pair.memory_gb:.0f} GB"),
        number("tok/s", lambda pair: figure(machine.speeds(pair)[0])),
        number("drafted", lambda pair: _drafted(pair, machine), drop=90),
        Column("here", lambda pair: "yes" if is_here(pair) else "", style="green"),
        Column("why", "why", cut=True, drop=100),
    ]
    show_table([pair for pair, _ in entries], columns)


def _drafted(pair: CatalogPair, machine: Machine) -> str:
    from specllama.backend.expected import figure

    drafted = machine.speeds(pair)[1]
    return "" if drafted is None else figure(drafted)


def show_pair(pair: CatalogPair, verdict: str, machine: Machine) -> None:
    """Show one pair with all known facts."""
    from specllama.backend.expected import speed_words

    draft = pair.draft
    facts = {
        "why": pair.why,
        "target": f"{pair.target.ref}  {params(pair.target.params)}, {size(pair.target.bytes)}",
        "draft": _draft_words(pair)
        if draft is None
        else f"{draft.ref}  {params(draft.params)}, {size(draft.bytes)}",
        "head": f"specllama hub pull {pair.head}" if pair.head else "",
        "not here": pair.cannot,
        "memory": f"{pair.memory_gb:.0f} GB; this machine: {size(machine.memory)}, {verdict}",
        "speed here": f"{speed_words(pair, machine)}, by its size",
        "license": pair.licence,
        "source": pair.source,
        "checked": f"{'on the hub' if pair.checked else 'no'}, {pair.date}",
    }
    show_facts(pair.name, pair.family, facts, style="bold")


def _draft_words(pair: CatalogPair) -> str:
    if pair.draft is not None:
        return f"{params(pair.draft.params)} {pair.draft.quant}"
    return f"--proposer {pair.method}"

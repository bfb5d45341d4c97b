"""The tables of ``specllama hub``."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specllama.cli.listing import Column, context, params, show_table, size

if TYPE_CHECKING:
    from specllama.models.catalog import CatalogPair
    from specllama.models.gguf import GgufHeader
    from specllama.models.library import LocalModel
    from specllama.models.refs import HubRef
    from specllama.models.summaries import Listed, Summary

FIT_WORDS = {"yes": "✓", "tight": "tight", "no": "–"}


def quant_words(quants: tuple[str, ...]) -> str:
    """The usual quants first, four at most."""
    from specllama.models.refs import DEFAULT_QUANTS

    ranked = sorted(quants, key=lambda q: (q not in DEFAULT_QUANTS, quants.index(q)))
    return " ".join(ranked[:4]) + (f" +{len(ranked) - 4}" if len(ranked) > 4 else "")


def show_usable(listed: Sequence[Listed]) -> None:
    """Models that can be run, and what drafts for them."""
    columns = [
        Column("model", give=True),
        Column("params", "right"),
        Column("quant"),
        Column("size", "right"),
        Column("context", "right", drop=70),
        Column("arch", drop=110),
        Column("from", drop=90),
        Column("used", drop=100),
        Column("drafts that fit", give=True, style="green"),
    ]
    rows = [
        [
            short(item.model),
            params(item.summary.n_params),
            item.summary.quantization,
            size(item.model.bytes) + ("" if item.model.complete else " (parts missing)"),
            context(item.summary.context_length),
            item.summary.architecture,
            item.model.source,
            _ago(item.model.used),
            item.drafts[0] + (f" +{len(item.drafts) - 1}" if len(item.drafts) > 1 else "")
            if item.drafts
            else "",
        ]
        for item in sorted(listed, key=lambda i: (i.model.source, i.model.ref))
    ]
    if rows:
        show_table(columns, rows)


def show_header(header: GgufHeader, summary: Summary) -> None:
    """What one file on disk says of itself."""
    from specllama.cli.listing import note
    from specllama.models.nextn import nextn_blocks
    from specllama.models.sidecars import HEAD_KINDS, SIDECARS

    kind = summary.sidecar
    rows = [
        ["name", header.name],
        ["architecture", f"{header.architecture}, {header.block_count} layers"],
        ["parameters", params(header.n_params)],
        ["quantisation", f"{header.quantization}, {size(header.file_bytes)}"],
        ["context", f"{header.context_length:,} tokens"],
        ["tokenizer", f"{header.tokenizer_model}, {header.vocab_size:,} tokens"],
        ["chat template", "yes" if header.chat_template else "no"],
        ["NextN layers", str(nextn_blocks(header)) if nextn_blocks(header) else ""],
        ["licence", header.text("general.license") or ""],
        ["what it is", SIDECARS[kind] if kind else ""],
    ]
    columns = [Column("file"), Column(str(header.path), give=True)]
    show_table(columns, [row for row in rows if row[1]])
    if kind in HEAD_KINDS:
        note(f"next: specllama chat -m TARGET --head {header.path}")
    elif summary.reason:
        note(f"it cannot be run: {summary.reason}")
    else:
        note(f"next: specllama pair {header.path}   which drafts fit it")


def show_sidecars(listed: Sequence[Listed]) -> None:
    """Heads, projectors and the like: what they are, and what they are for."""
    from specllama.cli.listing import note
    from specllama.models.sidecars import HEAD_KINDS, SIDECARS

    if not listed:
        return
    note("files that go with a model:")
    rows = [
        [
            short(item.model),
            SIDECARS[item.summary.sidecar],
            size(item.model.bytes),
            "--head" if item.summary.sidecar in HEAD_KINDS else "not used by specllama",
        ]
        for item in listed
    ]
    columns = [Column("file", give=True), Column("what it is"), Column("size", "right")]
    show_table([*columns, Column("use")], rows)


def short(model: LocalModel) -> str:
    """The reference to type; a path below the home folder is shown from ``~``."""
    home = os.path.expanduser("~")
    if model.ref.startswith(home + os.sep):
        return "~" + model.ref[len(home) :]
    return model.ref


def _ago(when: float) -> str:
    days = (time.time() - when) / 86400
    if days < 1:
        return "today"
    return f"{days:.0f} d ago" if days < 60 else f"{days / 30.4:.0f} mo ago"


def show_pairs(entries: Sequence[tuple[CatalogPair, str]]) -> None:
    """The catalogue, one line a pair."""
    from specllama.models import library, refs

    here = library.scan()
    columns = [
        Column("fits", style="green"),
        Column("name", style="bold"),
        Column("target", "right"),
        Column("draft with"),
        Column("size", "right"),
        Column("memory", "right"),
        Column("here", style="green"),
        Column("why", cut=True, drop=100),
    ]
    rows = [
        [
            FIT_WORDS[verdict],
            pair.name,
            params(pair.target.params),
            _draft_words(pair),
            size(pair.bytes),
            f"{pair.memory_gb:.0f} GB",
            "yes" if any(refs.matches(model, _target_ref(pair)) for model in here) else "",
            pair.why,
        ]
        for pair, verdict in entries
    ]
    show_table(columns, rows)


def show_pair(pair: CatalogPair, verdict: str, machine: float) -> None:
    """One pair with everything that is known about it."""
    rows = [
        ["why", pair.why],
        ["target", f"{pair.target.ref}  {params(pair.target.params)}, {size(pair.target.bytes)}"],
        [
            "draft",
            f"{pair.draft.ref}  {params(pair.draft.params)}, {size(pair.draft.bytes)}"
            if pair.draft is not None
            else _draft_words(pair),
        ],
        *([["head", f"specllama hub pull {pair.head}"]] if pair.head else []),
        *([["not here", pair.cannot]] if pair.cannot else []),
        ["memory", f"{pair.memory_gb:.0f} GB; this machine: {size(machine)}, {verdict}"],
        ["licence", pair.licence],
        ["source", pair.source],
        ["checked", f"{'on the hub' if pair.checked else 'no'}, {pair.date}"],
    ]
    show_table([Column(pair.name, style="bold"), Column(pair.family, give=True)], rows)


def _target_ref(pair: CatalogPair) -> HubRef:
    from specllama.models.refs import HubRef

    return HubRef(pair.target.repo, pair.target.quant)


def _draft_words(pair: CatalogPair) -> str:
    if pair.draft is not None:
        return f"{params(pair.draft.params)} {pair.draft.quant}"
    return f"--proposer {pair.method}"

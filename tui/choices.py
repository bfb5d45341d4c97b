"""Choices of target and draft model: those that are here, those that fit, those to download.

Rows for the two columns of the picker, made from headers and file names; no widget, no network.
Whatever reads headers may take a while and belongs in a thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from textual.content import Content

from specllama.backend import expected
from specllama.backend.expected import Machine
from specllama.errors import SpecllamaError
from specllama.models import catalog, context, doctor, fit, library, memory, pairing, pull, refs
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.hub import Listing, SearchHit, select
from specllama.models.library import LocalModel
from specllama.models.loadable import check_loadable
from specllama.models.summaries import Summaries
from specllama.settings.params import EngineOptions
from specllama.text import sanitize_line
from specllama.tui import advice
from specllama.tui.downloads import Download, progress_words
from specllama.tui.themes import Glyphs
from specllama.tui.widgets.stats_strip import gigabytes

Does = Literal[
    "choose", "pair", "get", "continue", "stop", "load", "open", "search", "list", "nothing"
]
MOST_COMPLETIONS = 200
MOST_PAIRS = 3  # that were used before
DEAR = 0.4  # of a target's step, from which on a guess hardly gains
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class ChoiceRow:
    """A line of a column.

    Attributes:
        ref: what is chosen, got, opened or looked for.
        name: what is shown; ``size`` beside it.
        does: what Enter does with it.
        fits: ✓ or ✗, None while that is unknown. ``refused``: ✗, and it cannot even be tried.
        reason: why it is ✗, or another remark for the list.
        where: the folder or store.
        detail: in words, for the pane below, of what is not on this machine.
        bold: it is the way of least effort.
        pair: target and draft of such a row.
    """

    ref: str
    name: str
    does: Does = "choose"
    size: str = ""
    path: Path | None = None
    fits: bool | None = None
    refused: bool = False
    reason: str = ""
    where: str = ""
    detail: str = ""
    bold: bool = False
    pair: tuple[str, str] = ("", "")


# ---------------------------------------------------------------------- what is here


def pair_rows(loaded: Path | None) -> list[ChoiceRow]:
    """List the pairs that were used last, each as one entry, except those of the loaded target."""
    pairs = [(target, draft) for target, draft in library.opened() if draft and target != loaded]
    return [
        ChoiceRow(
            f"{target} + {draft}", f"{target.stem} + {draft.stem}", "pair",
            pair=(str(target), str(draft)),
            reason="used before", detail=f"{target.name} with {draft.name}. Enter loads both.",
        )
        for target, draft in pairs[:MOST_PAIRS]
        if not refs.is_bundled(str(target))
    ]  # fmt: skip


def local_rows(models: Iterable[LocalModel], loaded: Path | None = None) -> list[ChoiceRow]:
    """List the targets on this machine without reading them: the loaded one first, then the last
    used. Draft models are no targets; a typed path takes one all the same."""
    rows = []
    found = [model for model in models if not _only_drafts(model)]
    for model in sorted(found, key=lambda m: (m.path != loaded, -(m.used // DAY_S))):
        # In a path, people look for the file's name, so its folder comes last.
        by_path = model.ref == str(model.path)
        rows.append(
            ChoiceRow(
                model.ref,
                model.path.name if by_path else model.ref,
                size=gigabytes(model.bytes),
                path=model.path,
                where=_from_home(model.path.parent) if by_path else model.source,
                fits=None if model.complete else False,
                refused=not model.complete,
                reason="" if model.complete else "parts are missing",
            )
        )
    return rows


def _only_drafts(model: LocalModel) -> bool:
    """True if a model is a draft of the bundled or of a catalog pair, and nothing else."""
    if model.source == "bundled":
        return model.ref == refs.TINY["tiny-draft"]
    pairs = catalog.load().values()
    hubs = [refs.HubRef(p.draft.repo, p.draft.quant) for p in pairs if p.draft is not None]
    targets = {pair.target.repo for pair in pairs}
    return any(refs.matches(model, hub) for hub in hubs if hub.repo not in targets)


def _from_home(folder: Path) -> str:
    home = os.path.expanduser("~") + os.sep
    return f"~/{str(folder).removeprefix(home)}" if str(folder).startswith(home) else str(folder)


def judged_target(row: ChoiceRow, options: EngineOptions, machine: Machine) -> ChoiceRow | None:
    """Return the row with ✓ or ✗ and its expected speed; None for a file that is no model (heads,
    projectors)."""
    if row.path is None or row.fits is not None:
        return row
    known = Summaries()
    summary = known.get(row.path)
    known.save()
    if summary.sidecar:
        return None
    if not summary.usable:
        reason = _without_name(summary.reason, row.path)
        return replace(row, fits=False, refused=True, reason=reason)
    try:
        header = read_header(row.path)
        need = _memory(header, None, options)
    except SpecllamaError as error:
        return replace(row, fits=False, refused=True, reason=error.message)
    speed = expected.headers_words(header, None, machine)
    told = ", ".join(filter(None, (row.size, speed)))
    return replace(row, size=told, fits=memory.fits(need), reason=_short_of(need))


def _without_name(reason: str, path: Path) -> str:
    """Remove the file name, which the row already shows."""
    return reason.removeprefix(path.name).removeprefix(":").removeprefix(" ")


def _memory(
    target: GgufHeader, draft: GgufHeader | None, options: EngineOptions
) -> memory.PairMemory:
    def need(n_ctx: int | None) -> memory.PairMemory:
        return memory.estimate_pair(
            target,
            draft,
            n_ctx=n_ctx,
            parallel=options.parallel,
            type_k=options.kv_type_k,
            type_v=options.kv_type_v,
        )

    if options.n_ctx is not None:
        return need(options.n_ctx)
    return need(context.usual(target, lambda n: need(n).required))


def _short_of(need: memory.PairMemory) -> str:
    free = memory.available_memory()
    if memory.fits(need, free):
        return ""
    return f"does not fit: needs {gigabytes(need.required)}, {gigabytes(free)} are free"


def draft_rows(target: ChoiceRow, options: EngineOptions) -> list[ChoiceRow]:
    """List the drafts for a target on this machine: the best, none at all, then every candidate.

    Raises:
        SpecllamaError: the target cannot be read.
    """
    assert target.path is not None
    head = read_header(target.path)
    check_loadable(head)
    found = doctor.order(
        doctor.examine(head, candidate, n_ctx=options.n_ctx)
        for candidate in doctor.candidates(target.path, target.ref, [])
    )
    rows = [_finding(finding) for finding in found]
    return [*_best(target, rows), none_row(), *rows]


def none_row() -> ChoiceRow:
    return ChoiceRow(refs.NO_DRAFT, "none", reason="repeated text is still guessed")


def _best(target: ChoiceRow, rows: Sequence[ChoiceRow]) -> list[ChoiceRow]:
    """Choose the draft that belongs to the target, or else the first that fits it."""
    belongs = None
    try:
        belongs = refs.resolve_pair(target.ref)[1]
    except SpecllamaError:
        pass
    here = [row for row in rows if row.path is not None and row.fits]
    mine = [row for row in here if belongs is not None and row.path == belongs]
    return [
        replace(row, name=f"best: {row.name}", bold=True, where="") for row in [*mine, *here][:1]
    ]


def _finding(finding: doctor.DraftFinding) -> ChoiceRow:
    candidate = finding.candidate
    path = candidate.path
    name = path.name if path is not None and candidate.ref == str(path) else candidate.ref
    if path is None:
        return ChoiceRow(
            candidate.ref, name, "get", reason="made for it; not here yet",
            detail=f"{candidate.ref} is the draft that the catalog names for this target."
            " Enter downloads it.",
        )  # fmt: skip
    try:
        size = gigabytes(path.stat().st_size)
    except OSError:
        size = ""
    row = ChoiceRow(candidate.typed, name, size=size, path=path)
    if not finding.fits:
        report = finding.report
        reason = _without_name(finding.reason, path)
        if report is not None and not report.compatible:
            reason = f"tokenizer differs: {report.short}"
        return replace(row, fits=False, refused=True, reason=reason)
    if not finding.useful:
        return replace(row, fits=False, reason="not smaller than the target: it cannot pay")
    short = _short_of(finding.memory) if finding.memory is not None else ""
    dear = finding.required or 0.0
    gain = f"hardly gains: a guess costs {dear:.0%} of a step" if dear > DEAR else ""
    return replace(row, fits=not short, reason=short or gain)


def judged_draft(target: ChoiceRow, row: ChoiceRow, options: EngineOptions) -> ChoiceRow:
    """Return the row of a typed file, with ✓ or ✗.

    Raises:
        SpecllamaError: the target cannot be read.
    """
    assert target.path is not None
    candidate = doctor.DraftCandidate(row.ref, row.path)
    return _finding(doctor.examine(read_header(target.path), candidate, n_ctx=options.n_ctx))


def estimate(
    target: ChoiceRow,
    draft: ChoiceRow | None,
    options: EngineOptions,
    machine: Machine,
    muted: str,
    *,
    brief: bool,
) -> Content:
    """Describe the pair: the memory it needs and what is free, its expected speed, and its
    oddities.

    Args:
        brief: in two or three lines of a narrow screen.
    """
    try:
        assert target.path is not None
        head = read_header(target.path)
        file = draft.path if draft is not None else None
        draft_head = read_header(file) if file is not None else None
        report = None if draft_head is None else pairing.compare(head, draft_head)
        if report is not None and not report.compatible:
            return Content.assemble((sanitize_line(report.explanation), "$error"))
        need = _memory(head, draft_head, options)
    except SpecllamaError as error:
        return Content.assemble((sanitize_line(error.message), "$error"))
    free = memory.available_memory()
    fits = memory.fits(need, free)
    parts: list[tuple[str, str]] = []
    if not brief:
        parts += [
            (sanitize_line(head.name), "bold"),
            (f"  {sanitize_line(head.architecture)}, {sanitize_line(head.quantization)}", muted),
        ]
        if draft_head is not None:
            name = sanitize_line(draft_head.name)
            parts += [(" + ", muted), (name, "bold")]
        parts.append(("\n", ""))
    parts.append((f"needs about {gigabytes(need.total)}", "bold"))
    if not brief:
        parts.append((f": {_memory_words(need)}", muted))
    if free:
        parts.append((f"; {gigabytes(free)} free", "$success" if fits else "$error"))
        if not fits:
            parts.append((": it does not fit", "$error"))
    speed = "" if brief else expected.headers_words(head, draft_head, machine)
    if speed:
        parts.append((f"\n{speed}", ""))
    if draft_head is not None and report is not None:
        warnings = report.warnings[:1]
        if not (brief and warnings):
            cost = doctor.step_cost(head, draft_head)
            lead = "; it " if speed else "\n"
            words = f"{lead}should pay if more than {cost:.0%} of guesses are accepted"
            parts.append((words, ""))
        parts += [(f"\n{sanitize_line(warning)}", "$warning") for warning in warnings]
    return Content.assemble(*parts)


def _memory_words(need: memory.PairMemory) -> str:
    weights, repacked = need.target.weights, need.target.repacked
    draft = need.draft.total if need.draft is not None else 0
    rest = need.total - weights - repacked - need.target.kv - draft
    words = [
        f"weights {gigabytes(weights)}",
        *([f"their rearranged copy {gigabytes(repacked)}"] * bool(repacked)),
        f"context ({need.target.n_ctx:,}) {gigabytes(need.target.kv)}",
        *([f"draft {gigabytes(draft)}"] * bool(draft)),
        f"computing {gigabytes(rest)}",
    ]
    return ", ".join(words)


# ---------------------------------------------------------------------- what can be got


def offered_rows(models: Sequence[LocalModel], machine: Machine) -> list[ChoiceRow]:
    """List interrupted downloads, then the catalog's pairs that this machine can run: the
    recommended one, those that are fast enough from the largest on, and the rest from the fastest.
    """
    parts, rows = pull.unfinished(), list[ChoiceRow]()
    best = machine.recommended()

    def place(pair: catalog.CatalogPair) -> tuple[bool, bool, bool, float]:
        plain, _ = machine.speeds(pair)
        slow = plain < expected.FAST_ENOUGH
        tight = fit.judge(pair, machine.memory) != "yes"
        return pair is not best, tight, slow, -plain if slow else -pair.target.params

    for pair in sorted(catalog.load().values(), key=place):
        wanted = [refs.HubRef(model.repo, model.quant) for model in pair.models]
        missing = [ref for ref in wanted if not any(refs.matches(m, ref) for m in models)]
        arrived = _arrived(parts, [model.repo for model in pair.models])
        verdict = fit.judge(pair, machine.memory)
        if missing and (arrived or verdict != "no"):
            rows.append(_offer(pair, arrived, verdict, machine, best=pair is best))
    repos = {model.repo for pair in catalog.load().values() for model in pair.models}
    for file, size in parts.items():
        if "/".join(file.split("/")[:2]) not in repos:
            words = f"{gigabytes(size)} here; Enter continues"
            rows.append(ChoiceRow(file, file, "continue", reason=words, detail=f"{file}: {words}."))
    return sorted(rows, key=lambda row: row.does != "continue")


def _arrived(parts: dict[str, int], repos: Sequence[str]) -> int:
    return sum(size for file, size in parts.items() if "/".join(file.split("/")[:2]) in repos)


def _offer(
    pair: catalog.CatalogPair, arrived: int, verdict: str, machine: Machine, *, best: bool
) -> ChoiceRow:
    plain, drafted = machine.speeds(pair)
    speed = f"about {expected.figure(plain)} tok/s"
    if drafted is not None:
        speed += f", {expected.figure(drafted)} drafted"
    elif pair.draft is None:
        speed += f", drafts by {pair.method}"
    tight = ", tight here" if verdict == "tight" else ""
    here = f"{gigabytes(arrived)} here; Enter continues" if arrived else f"{speed}{tight}"
    names = " + ".join(model.ref for model in pair.models)
    head = f" Its drafting head, for --head: specllama hub pull {pair.head}" if pair.head else ""
    return ChoiceRow(
        pair.name,
        f"{pair.family} {_billions(pair.target)}" + (": best here" if best else ""),
        "continue" if arrived else "get",
        size=f"{pair.bytes / 1e9:.1f} GB",
        reason=here,
        detail=f"{pair.name}: {names}\n{pair.why}. {pair.licence}; {pair.bytes / 1e9:.1f} GB to"
        f" download, {speed} by its size, comfortable with {pair.memory_gb:.0f} GB of memory."
        f" Enter downloads it.{head}",
        bold=best,
    )


def _billions(model: catalog.CatalogModel) -> str:
    """Format a model's size: "8B"; "30B, 3B active"."""
    told = f"{model.params / 1e9:.2g}B" if model.params < 9.5e9 else f"{model.params / 1e9:.0f}B"
    return told if model.active == model.params else f"{told}, {model.active / 1e9:.2g}B active"


def download_row(download: Download, glyphs: Glyphs) -> ChoiceRow:
    """Show a download as a line of the picker."""
    ref, error = download.ref, download.error
    match download.state:
        case "done" if download.target is not None:
            words = "is here; Enter loads it"
            return ChoiceRow(ref, ref, "load", fits=True, reason=words, detail=f"{ref} {words}.")
        case "done":
            return ChoiceRow(ref, ref, "nothing", fits=True, reason="is here")
        case "failed" if error is not None:
            detail = advice.said(error, ". ")
            reason = f"{error.message}; Enter tries again"
            detail = f"{detail}. Enter tries again."
            return ChoiceRow(ref, ref, "continue", fits=False, reason=reason, detail=detail)
        case "stopped" | "failed":
            kept = f"{gigabytes(download.done)} kept" if download.done else "nothing arrived"
            words = f"stopped, {kept}; Enter continues"
            return ChoiceRow(ref, ref, "continue", reason=words, detail=f"{ref}: {words}.")
    words = progress_words(download, glyphs)
    stops = "" if download.state == "stopping" else " Enter stops it; what arrived is kept."
    return ChoiceRow(ref, ref, "stop", reason=words, detail=f"{ref}: {words}.{stops}", bold=True)


def hit_rows(hits: Sequence[SearchHit]) -> list[ChoiceRow]:
    """List the models that a search on the hub found."""
    rows = []
    for hit in hits:
        gated = "; gated: its license must be accepted on the hub" if hit.gated else ""
        words = f"{', '.join(hit.quants[:4])}{' and more' if len(hit.quants) > 4 else ''}"
        size = f"{hit.params / 1e9:.1f}B" if hit.params else ""
        rows.append(
            ChoiceRow(hit.repo, hit.repo, "list", size=size, reason=words,
                detail=f"{hit.repo}: {hit.downloads:,} downloads{gated}. Enter lists its files.")
        )  # fmt: skip
    return rows


def listing_rows(listing: Listing) -> list[ChoiceRow]:
    """List a repository's files, its usual choice first."""
    usual = None
    try:
        usual = select(listing, refs.HubRef(listing.repo))
    except SpecllamaError:
        pass
    free = memory.available_memory()
    rows = []
    for model in sorted(listing.models, key=lambda m: m is not usual):
        if not model.complete or model.sidecar:
            continue
        fits = not free or model.bytes * fit.OVERHEAD <= free * memory.MARGIN
        ref = f"{listing.repo}:{model.quant}" if model.quant else f"{listing.repo}/{model.name}"
        name = model.quant or model.name
        what = "" if fits else f"does not fit: {gigabytes(free)} are free"
        licence = f"; license {listing.licence}" if listing.licence else ""
        rows.append(
            ChoiceRow(
                ref,
                name,
                "get",
                gigabytes(model.bytes),
                fits=None if fits else False,
                reason=what,
                detail=f"{ref}: {gigabytes(model.bytes)} to download{licence}. Enter begins.",
                bold=model is usual,
            )
        )
    return rows


# ---------------------------------------------------------------------- paths


def is_path(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~", ".\\", "..\\")) or text[1:3] == ":\\"


def completions(text: str) -> list[ChoiceRow]:
    """List the folders and GGUF files that a typed path may mean."""
    cut = max(text.rfind("/"), text.rfind(os.sep)) + 1
    typed, start = text[:cut], text[cut:].lower()
    if not cut:  # "~" alone
        return [ChoiceRow(f"{text}/", f"{text}/", "open")]
    folders, files = list[ChoiceRow](), list[ChoiceRow]()
    try:
        with os.scandir(os.path.expanduser(typed)) as entries:
            for entry in sorted(entries, key=lambda e: e.name.lower()):
                name = entry.name
                if not name.lower().startswith(start) or name.startswith(".") > (start[:1] == "."):
                    continue
                if entry.is_dir():
                    folders.append(ChoiceRow(f"{typed}{name}/", f"{name}/", "open"))
                elif library.is_model(name):
                    path, size = Path(entry.path), entry.stat().st_size
                    files.append(ChoiceRow(f"{typed}{name}", name, size=gigabytes(size), path=path))
    except OSError as error:
        reason = error.strerror or "cannot be read"
        return [ChoiceRow(text, typed, "nothing", fits=False, reason=reason)]
    return [*files, *folders][:MOST_COMPLETIONS]

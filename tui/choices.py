"""Choices of target and draft model: those that are here, those that fit, those to download.

Rows for the two columns of the picker, made from headers and file names; no widget, no network.
Whatever reads headers may take a while and belongs in a thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from textual.content import Content

from specllama.engine import fewer_words
from specllama.engine.profiles import remedies_of
from specllama.errors import SpecllamaError
from specllama.models import catalog, judgement, library, memory, pull, refs
from specllama.models.catalog import HubRef
from specllama.models.gguf import read_header
from specllama.models.hub_client import Listing, SearchHit, select
from specllama.models.judgement import Judgement, Machine, judge, without_name
from specllama.models.library import LocalModel
from specllama.models.loadable import check_loadable
from specllama.models.summaries import Summaries
from specllama.settings.params import EngineOptions
from specllama.text import count, sanitize_line, size
from specllama.tui import advice
from specllama.tui.downloads import Download, progress_words
from specllama.verdict import remedy_words

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
                model.ref, model.path.name if by_path else model.ref,
                size=size(model.bytes), path=model.path,
                where=library.from_home(str(model.path.parent)) if by_path else model.source,
                fits=None if model.complete else False, refused=not model.complete,
                reason="" if model.complete else "parts are missing",
            )
        )  # fmt: skip
    return rows


def _only_drafts(model: LocalModel) -> bool:
    """True if a model is a draft of the bundled or of a catalog pair, and nothing else."""
    if model.source == "bundled":
        return model.ref == refs.TINY["tiny-draft"]
    pairs = catalog.load().values()
    hubs = [p.draft.hub for p in pairs if p.draft is not None]
    targets = {pair.target.repo for pair in pairs}
    return any(refs.matches(model, hub) for hub in hubs if hub.repo not in targets)


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
        return replace(row, fits=False, refused=True, reason=without_name(summary.reason, row.path))
    try:
        judged = judge(read_header(row.path), None, options, machine)
    except SpecllamaError as error:
        return replace(row, fits=False, refused=True, reason=error.message)
    told = ", ".join(filter(None, (row.size, judged.speed)))
    return replace(row, size=told, fits=not judged.shortage, reason=judged.shortage)


def draft_rows(
    target: ChoiceRow,
    options: EngineOptions,
    here: str = "",
    tell: Callable[[list[ChoiceRow]], object] = lambda rows: None,
) -> list[ChoiceRow]:
    """List the drafts for a target on this machine: the best, none at all, then every candidate.

    Args:
        here: see ``EngineInfo``; what drafts of a model is told, too.
        tell: takes the list as far as it came, after each candidate.

    Raises:
        SpecllamaError: the target cannot be read.
    """
    assert target.path is not None
    head = read_header(target.path)
    check_loadable(head)
    tell(listed := [none_row()])
    found, rows = list[judgement.DraftFinding](), dict[str, ChoiceRow]()
    for one in judgement.candidates(target.path, target.ref, []):
        found.append(judgement.examine(head, one, options))
        rows[one.ref] = _finding(found[-1], options, here)
        known = [rows[finding.ref] for finding in judgement.order(found)]
        tell(listed := [*_best(target, known), none_row(), *known])
    return listed


def none_row() -> ChoiceRow:
    return ChoiceRow(refs.NO_DRAFT, "none", reason="repeated text is still guessed")


def _best(target: ChoiceRow, rows: Sequence[ChoiceRow]) -> list[ChoiceRow]:
    """Choose the draft that belongs to the target, or else the first that fits it."""
    belongs = None
    with suppress(SpecllamaError):
        belongs = refs.resolve_pair(target.ref)[1]
    here = [row for row in rows if row.path is not None and row.fits]
    mine = [row for row in here if belongs is not None and row.path == belongs]
    return [
        replace(row, name=f"best: {row.name}", bold=True, where="") for row in [*mine, *here][:1]
    ]


def _finding(finding: judgement.DraftFinding, options: EngineOptions, here: str) -> ChoiceRow:
    path, judged = finding.path, finding.judged
    name = path.name if path is not None and finding.ref == str(path) else finding.ref
    if path is None:
        return ChoiceRow(
            finding.ref, name, "get", reason="made for it; not here yet",
            detail=f"{finding.ref} is the draft that the catalog names for this target."
            " Enter downloads it.",
        )  # fmt: skip
    try:
        told = size(path.stat().st_size)
    except OSError:
        told = ""
    if judged.draft is not None and here:
        told = fewer_words.brief(judged.draft, options, here)
    row = ChoiceRow(finding.typed, name, size=told, path=path)
    if judged.why:
        differs = judged.report is not None and not judged.report.compatible
        reason = f"{'tokenizer differs: ' if differs else ''}{finding.refusal}"
        return replace(row, fits=False, refused=True, reason=reason)
    if not judged.useful:
        return replace(row, fits=False, reason="not smaller than the target: it cannot pay")
    dear = judged.pays_above or 0.0
    gain = f"hardly gains: a guess costs {dear:.0%} of a step" if dear > DEAR else ""
    return replace(row, fits=not judged.shortage, reason=judged.shortage or gain)


def judged_draft(
    target: ChoiceRow, row: ChoiceRow, options: EngineOptions, here: str = ""
) -> ChoiceRow:
    """Return the row of a typed file, with ✓ or ✗; see ``draft_rows``.

    Raises:
        SpecllamaError: the target cannot be read.
    """
    assert target.path is not None
    found = judgement.DraftFinding(row.ref, row.path)
    return _finding(judgement.examine(read_header(target.path), found, options), options, here)


def estimate(
    target: ChoiceRow,
    draft: ChoiceRow | None,
    options: EngineOptions,
    machine: Machine,
    muted: str,
    *,
    brief: bool,
    here: str = "",
) -> Content:
    """Describe the pair: the memory it needs and what is free, its expected speed, and its
    oddities.

    Args:
        brief: in two or three lines of a narrow screen.
        here: see ``EngineInfo``; what would be faster is shown, too.
    """
    try:
        assert target.path is not None
        head = read_header(target.path)
        its = None if draft is None or draft.path is None else read_header(draft.path)
        judged = judge(head, its, options, machine)
        why = judged.why
    except SpecllamaError as error:
        why = error.message
    if why or judged.memory is None:
        return Content.assemble((sanitize_line(why), "$error"))
    parts: list[tuple[str, str]] = []
    if not brief:
        parts += [
            (sanitize_line(head.name), "bold"),
            (f"  {sanitize_line(head.architecture)}, {sanitize_line(head.quantization)}", muted),
        ]
        if its is not None:
            parts += [(" + ", muted), (sanitize_line(its.name), "bold")]
        parts.append(("\n", ""))
    parts.append((f"needs about {size(judged.memory.total)}", "bold"))
    if not brief:
        parts.append((f": {_memory_words(judged.memory)}", muted))
    if judged.free:
        fits = judged.fits != "no"
        parts.append((f"; {size(judged.free)} free", "$success" if fits else "$error"))
        if not fits:
            parts.append((": it does not fit", "$error"))
    speed = "" if brief else judged.speed
    if speed:
        parts.append((f"\n{speed}", ""))
    warnings = judged.report.warnings[:1] if judged.report is not None else ()
    if judged.pays_above is not None and not (brief and warnings):
        lead = "; it " if speed else "\n"
        words = f"{lead}should pay if more than {judged.pays_above:.0%} of guesses are accepted"
        parts.append((words, ""))
    for one in (remedies_of(here, head, its) or ())[:1] if here else ():
        parts.append((f"\n{sanitize_line(remedy_words(one))}", "$success"))
    parts += [(f"\n{sanitize_line(warning)}", "$warning") for warning in warnings]
    return Content.assemble(*parts)


def _memory_words(need: memory.PairMemory) -> str:
    weights, repacked = need.target.weights, need.target.repacked
    draft = need.draft.total if need.draft is not None else 0
    rest = need.total - weights - repacked - need.target.kv - draft
    words = [
        f"weights {size(weights)}",
        *([f"their rearranged copy {size(repacked)}"] * bool(repacked)),
        f"context ({need.target.n_ctx:,}) {size(need.target.kv)}",
        *([f"draft {size(draft)}"] * bool(draft)),
        f"computing {size(rest)}",
    ]
    return ", ".join(words)


# ---------------------------------------------------------------------- what can be got


def offered_rows(models: Sequence[LocalModel], machine: Machine) -> list[ChoiceRow]:
    """List interrupted downloads, then the catalog's pairs that this machine can run: the
    recommended one, those that are fast enough from the largest on, and the rest from the fastest.
    """
    parts, best = pull.unfinished(), machine.recommended()
    judged = [(pair, machine.judge(pair)) for pair in catalog.load().values()]

    def place(entry: tuple[catalog.CatalogPair, Judgement]) -> tuple[bool, bool, bool, float]:
        pair, one = entry
        plain = one.plain or 0.0
        slow = plain < judgement.FAST_ENOUGH
        return pair is not best, one.fits != "yes", slow, -plain if slow else -pair.target.params

    rows = list[ChoiceRow]()
    arrived = dict[str, int]()  # by repository
    for file, n_bytes in parts.items():
        repo = "/".join(file.split("/")[:2])
        arrived[repo] = arrived.get(repo, 0) + n_bytes
    for pair, one in sorted(judged, key=place):
        wanted = [model.hub for model in pair.models]
        missing = [ref for ref in wanted if not any(refs.matches(m, ref) for m in models)]
        here = sum(arrived.get(model.repo, 0) for model in pair.models)
        if missing and (here or one.fits != "no"):
            rows.append(_offer(pair, here, one, best=pair is best))
    repos = {model.repo for pair, _ in judged for model in pair.models}
    for file, n_bytes in parts.items():
        if "/".join(file.split("/")[:2]) not in repos:
            words = f"{size(n_bytes)} here; Enter continues"
            rows.append(ChoiceRow(file, file, "continue", reason=words, detail=f"{file}: {words}."))
    return sorted(rows, key=lambda row: row.does != "continue")


def _offer(pair: catalog.CatalogPair, arrived: int, judged: Judgement, *, best: bool) -> ChoiceRow:
    speed = judged.speed
    tight = ", tight here" if judged.fits == "tight" else ""
    here = f"{size(arrived)} here; Enter continues" if arrived else f"{speed}{tight}"
    names = " + ".join(model.ref for model in pair.models)
    head = f" Its drafting head, for --head: specllama hub pull {pair.head}" if pair.head else ""
    params, active = pair.target.params, pair.target.active
    told = count(params) + ("" if active == params else f", {count(active)} active")
    told = told.replace(".0 ", " ").replace(" B", "B").replace(" M", "M")  # as models are called
    return ChoiceRow(
        pair.name,
        f"{pair.family} {told}" + (": best here" if best else ""),
        "continue" if arrived else "get",
        size=size(pair.bytes),
        reason=here,
        detail=f"{pair.name}: {names}\n{pair.why}. {pair.licence}; {size(pair.bytes)} to"
        f" download, {speed} by its size, comfortable with {pair.memory_gb:.0f} GB of memory."
        f" Enter downloads it.{head}",
        bold=best,
    )


def download_row(download: Download) -> ChoiceRow:
    """Show a download as a line of the picker."""
    ref, error = download.ref, download.error
    match download.state:
        case "done" if download.target is not None:
            words = "is here; Enter loads it"
            return ChoiceRow(ref, ref, "load", fits=True, reason=words, detail=f"{ref} {words}.")
        case "done":
            return ChoiceRow(ref, ref, "nothing", fits=True, reason="is here")
        case "failed" if error is not None:
            reason = f"{error.message}; Enter tries again"
            detail = f"{advice.said(error, '. ')}. Enter tries again."
            return ChoiceRow(ref, ref, "continue", fits=False, reason=reason, detail=detail)
        case "stopped" | "failed":
            kept = f"{size(download.done)} kept" if download.done else "nothing arrived"
            words = f"stopped, {kept}; Enter continues"
            return ChoiceRow(ref, ref, "continue", reason=words, detail=f"{ref}: {words}.")
    words = progress_words(download)
    stops = "" if download.state == "stopping" else " Enter stops it; what arrived is kept."
    return ChoiceRow(ref, ref, "stop", reason=words, detail=f"{ref}: {words}.{stops}", bold=True)


def hit_rows(hits: Sequence[SearchHit]) -> list[ChoiceRow]:
    """List the models that a search on the hub found."""
    rows = []
    for hit in hits:
        gated = "; gated: its license must be accepted on the hub" if hit.gated else ""
        words = f"{', '.join(hit.quants[:4])}{' and more' if len(hit.quants) > 4 else ''}"
        told = count(hit.params) if hit.params else ""
        rows.append(
            ChoiceRow(hit.repo, hit.repo, "list", size=told, reason=words,
                detail=f"{hit.repo}: {hit.downloads:,} downloads{gated}. Enter lists its files.")
        )  # fmt: skip
    return rows


def listing_rows(listing: Listing) -> list[ChoiceRow]:
    """List a repository's files, its usual choice first."""
    usual = None
    with suppress(SpecllamaError):
        usual = select(listing, HubRef(listing.repo))
    rows = []
    for model in sorted(listing.models, key=lambda m: m is not usual):
        if not model.complete or model.sidecar:
            continue
        shortage = judgement.judge_size(model.bytes).shortage
        ref = library.hub_ref(listing.repo, model.name)
        name = model.quant or model.name
        licence = f"; license {listing.licence}" if listing.licence else ""
        rows.append(
            ChoiceRow(
                ref, name, "get", size(model.bytes), fits=False if shortage else None,
                reason=shortage, bold=model is usual,
                detail=f"{ref}: {size(model.bytes)} to download{licence}. Enter begins.",
            )
        )  # fmt: skip
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
                    path, told = Path(entry.path), size(entry.stat().st_size)
                    files.append(ChoiceRow(f"{typed}{name}", name, size=told, path=path))
    except OSError as error:
        reason = error.strerror or "cannot be read"
        return [ChoiceRow(text, typed, "nothing", fits=False, reason=reason)]
    return [*files, *folders][:MOST_COMPLETIONS]

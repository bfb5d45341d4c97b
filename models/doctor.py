"""The pair doctor: the drafts that fit a target, their cost, and whether drafting can pay.

It reads headers only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specllama.errors import SpecllamaError
from specllama.models import catalog, context, library, memory, refs
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.loadable import VocabularyOnly, check_loadable
from specllama.models.pairing import PairReport, active_params, compare
from specllama.models.summaries import Summaries


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A draft to consider: its place, here or on the hub."""

    ref: str
    path: Path | None
    note: str = ""

    @property
    def typed(self) -> str:
        """The reference to type: files from a folder are shown by name, but used by path."""
        return str(self.path) if self.path is not None and self.ref == self.path.name else self.ref


@dataclass(frozen=True, slots=True)
class DraftFinding:
    """The doctor's finding on one draft.

    Attributes:
        reason: why it does not fit, "" if it does.
        report: None when its header could not be compared.
        memory: of the pair, None when unknown.
        required: the acceptance rate above which drafting with it pays, estimated from sizes: the
            cost of a draft step relative to a target step, memory-bound. A lower bound.
    """

    candidate: DraftCandidate
    reason: str
    report: PairReport | None = None
    memory: memory.PairMemory | None = None
    required: float | None = None
    params: int = 0
    quantization: str = ""

    @property
    def fits(self) -> bool:
        return not self.reason and self.candidate.path is not None

    @property
    def useful(self) -> bool:
        """True if it fits and is smaller than the target."""
        return self.fits and (self.report is None or self.report.ratio < 1)

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.report.warnings if self.report else ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "ref": self.candidate.ref,
            "path": None if self.candidate.path is None else str(self.candidate.path),
            "fits": self.fits,
            "reason": self.reason,
            "note": self.candidate.note,
            "params": self.params,
            "quantization": self.quantization,
            "required_acceptance": self.required,
            "memory": None if self.memory is None else self.memory.to_dict(),
            "report": None if self.report is None else self.report.to_dict(),
        }


def candidates(target: Path, target_ref: str, drafts: Sequence[str]) -> list[DraftCandidate]:
    """List the drafts to consider: those named (a folder stands for its files), else all known
    ones.

    Raises:
        ModelUnavailable: a draft that was named is not here.
    """
    known = Summaries()
    if drafts:
        found: list[DraftCandidate] = []
        for draft in drafts:
            folder = refs.existing(draft)
            if draft not in refs.TINY and folder is not None and folder.is_dir():
                found += [
                    DraftCandidate(model.path.name, model.path)
                    for model in library.scan_folder(folder)
                    if model.path.resolve() != target.resolve()
                    and not known.get(model.path).sidecar
                ]
            else:
                path = refs.resolve("tiny-draft" if draft == "tiny" else draft)
                found.append(DraftCandidate(draft, path))
        return found
    found = [
        DraftCandidate(model.ref, model.path)
        for model in library.scan(near=target)
        if model.path.resolve() != target.resolve() and not known.get(model.path).sidecar
    ]
    known.save()
    return found + _from_catalogue(target_ref, found)


def _from_catalogue(target_ref: str, here: Iterable[DraftCandidate]) -> list[DraftCandidate]:
    """Return the catalog's draft for this target, if it is not on disk yet."""
    hub = refs.parse_hub(target_ref)
    pair = catalog.find(target_ref) or (catalog.find_target(hub.repo) if hub else None)
    if pair is None or pair.draft is None:
        return []
    repo = pair.draft.repo.casefold()
    if any(candidate.ref.casefold().startswith(repo) for candidate in here):
        return []
    return [DraftCandidate(pair.draft.ref, None, f"specllama hub pull {pair.draft.ref}")]


def examine(
    target: GgufHeader,
    candidate: DraftCandidate,
    *,
    heads: Sequence[GgufHeader] = (),
    n_ctx: int | None = None,
) -> DraftFinding:
    """Compare one draft with the target. Never raises for a draft that does not fit.

    Args:
        heads: drafting heads that would be loaded alongside the pair, for the memory it needs.
    """
    if candidate.path is None:
        return DraftFinding(candidate, "not on this machine yet")
    try:
        draft = read_header(candidate.path)
    except SpecllamaError as error:
        return DraftFinding(candidate, error.message)
    facts: dict[str, Any] = {"params": draft.n_params, "quantization": draft.quantization}
    refusal = ""
    try:
        check_loadable(draft, "draft")
    except VocabularyOnly as error:
        refusal = error.message
    except SpecllamaError as error:
        return DraftFinding(candidate, error.message, **facts)
    if "tokenizer.ggml.tokens" not in draft.arrays:
        return DraftFinding(candidate, refusal or "it has no tokenizer", **facts)
    report = compare(target, draft)
    if refusal or not report.compatible:
        # a file without weights can still be judged by its tokenizer: say both
        reason = report.explanation or f"the tokenizer fits, but {refusal}"
        return DraftFinding(candidate, reason, report, **facts)

    def need(n_ctx: int) -> memory.PairMemory:
        return memory.estimate_pair(target, draft, heads=heads, n_ctx=n_ctx)

    length = context.usual(target, lambda n: need(n).required) if n_ctx is None else n_ctx
    return DraftFinding(
        candidate,
        "",
        report,
        need(length),
        step_cost(target, draft),
        draft.n_params,
        draft.quantization,
    )


def step_cost(target: GgufHeader, draft: GgufHeader) -> float:
    """Return the cost of a draft step over a target step, both bound by reading their active
    weights once."""

    def read(header: GgufHeader) -> float:
        share = active_params(header) / max(header.n_params, 1)
        return max(header.tensor_bytes * share, 1.0)

    return read(draft) / read(target)


def order(findings: Iterable[DraftFinding]) -> list[DraftFinding]:
    """Sort fitting drafts first, and among them those of a good size."""

    def key(finding: DraftFinding) -> tuple[bool, bool, bool, float, str]:
        report = finding.report
        distance = abs((report.ratio if report else 1.0) - 1 / 16)
        return (
            not finding.fits,
            not finding.useful,
            not (report is not None and report.good_size),
            distance,
            finding.candidate.ref,
        )

    return sorted(findings, key=key)

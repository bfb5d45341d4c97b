"""The judgement of a pair before it is loaded: its fit, its needs, its speed, and when it pays.

``judge`` reads headers, ``Machine.judge`` the sizes of a catalog's entry, ``judge_size`` that of a
file. Every list of models and pairs shows what they return. Speeds are rules of thumb (a step reads
the active weights once, wherever they lie), good for choosing between models on one machine, and
for plain decoding only: nothing but a run here tells what drafting gains.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from specllama.errors import SpecllamaError
from specllama.models import catalog, context, library, memory, refs
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.loadable import VocabularyOnly, check_loadable
from specllama.models.pairing import PairReport, active_params, compare
from specllama.models.summaries import FileSummary, Summaries, loadable
from specllama.rates import pays_above
from specllama.settings.params import EngineOptions
from specllama.text import size

Fits = Literal["yes", "tight", "no"]

# bytes a second, read by a device of the last years
SHARED_BANDWIDTH = 200e9  # memory that GPU and CPU share
RAM_BANDWIDTH = 50e9
CORE_BANDWIDTH = 7e9  # quantized weights that one core computes with, whatever its memory gives
LEAST_BYTES = 100e6  # a smaller model does not wait for memory: nothing is foretold of it
FAST_ENOUGH = 8.0  # plain tokens a second: one reads 5, and thoughts and code are skimmed

# added to the files: KV caches at 8k context, buffers, tokenizer, Python; a rule of thumb, until
# there is a header to compute it from
OVERHEAD = 1.15
FIXED_BYTES = 1.0e9


@dataclass(frozen=True, slots=True)
class Weights:
    """The bytes of a model's weights, and the share of them that a token uses."""

    bytes: float
    used: float = 1.0

    @staticmethod
    def of(header: GgufHeader) -> Weights:
        return Weights(header.tensor_bytes, active_params(header) / max(header.n_params, 1))

    @property
    def read(self) -> float:
        """The bytes that a step reads, at least one."""
        return max(self.bytes * self.used, 1.0)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A forecast for a pair before it is loaded.

    Attributes:
        why: why the draft cannot draft for the target, "" if it can.
        fits: in memory: "yes", "tight" (with little else open), or "no".
        needs: bytes that have to fit. free: bytes that are, 0 if unknown.
        plain: expected tokens a second without drafting, None if nothing is foretold.
        pays_above: the share of guesses to be kept for any gain, by sizes. A lower bound.
        draft, report, memory: of files: the draft's header, how its tokens compare, and the parts
            of what is needed; None where that is not known.
    """

    why: str = ""
    fits: Fits = "yes"
    needs: float = 0
    free: float = 0
    plain: float | None = None
    pays_above: float | None = None
    draft: GgufHeader | None = None
    report: PairReport | None = None
    memory: memory.PairMemory | None = None

    @property
    def useful(self) -> bool:
        """True if the draft can draft, and is smaller than the target."""
        return not self.why and (self.report is None or self.report.ratio < 1)

    @property
    def shortage(self) -> str:
        """Words for what does not fit into memory."""
        if self.fits != "no":
            return ""
        return f"does not fit: needs {size(self.needs)}, {size(self.free)} are free"

    @property
    def speed(self) -> str:
        """Words such as "about 12 tok/s plain"; "" if nothing is foretold."""
        return "" if self.plain is None else f"about {figure(self.plain)} tok/s plain"


def figure(speed: float | None) -> str:
    """Format an estimated speed with two digits at most."""
    return "" if speed is None else f"{speed:.{0 if speed >= 9.5 else 1}f}"


def without_name(reason: str, path: Path) -> str:
    """Remove from a refusal the file name that its row already shows."""
    return reason.removeprefix(path.name).removeprefix(":").removeprefix(" ")


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about a machine before a model is loaded: bytes of memory, cores, and the use of a
    GPU."""

    memory: float
    cores: int
    on_gpu: bool = False

    def speed(self, target: Weights) -> float:
        """Estimate the tokens a second of plain decoding."""
        cpu = min(RAM_BANDWIDTH, self.cores * CORE_BANDWIDTH)
        return (SHARED_BANDWIDTH if self.on_gpu else cpu) / target.read

    def judge(self, pair: catalog.CatalogPair) -> Judgement:
        """Judge a pair that is not here, from its sizes alone, at 8k context."""
        needs = pair.bytes * OVERHEAD + FIXED_BYTES
        fits: Fits = "tight" if needs <= self.memory * 0.9 or self.memory <= 0 else "no"
        if 0 < pair.memory_gb * 1e9 <= self.memory * 1.05:
            fits = "yes"
        model = pair.target
        speed = self.speed(Weights(model.bytes, model.active / model.params))
        return Judgement("", fits, needs, self.memory, speed)

    def recommended(
        self, pairs: Iterable[catalog.CatalogPair] | None = None
    ) -> catalog.CatalogPair | None:
        """Return the largest pair of the catalogue that has a draft model, runs comfortably here
        and is fast enough to chat with; None if there is none."""

        def comfortable(pair: catalog.CatalogPair) -> bool:
            one = self.judge(pair)
            fast = one.fits == "yes" and (one.plain or 0.0) >= FAST_ENOUGH
            # who begins wants to chat
            return fast and pair.draft is not None and "coder" not in pair.name

        found = filter(comfortable, pairs or catalog.load().values())
        return max(found, key=lambda p: (p.target.params, -p.bytes), default=None)


def pair_memory(
    target: GgufHeader,
    draft: GgufHeader | None,
    options: EngineOptions,
    n_ctx: int | None,
    *,
    heads: Sequence[GgufHeader] = (),
    on_gpu: bool = False,
) -> memory.PairMemory:
    """Estimate the memory of a pair with these options, as if all of it lay in one place.

    Args:
        n_ctx: as for ``estimate_model``.
        heads: drafting heads that are loaded alongside.

    Raises:
        UsageError: an unknown cache type.
        PairIncompatible, BadGguf: one of ``heads`` is no head.
    """
    kv = {"type_k": options.kv_type_k, "type_v": options.kv_type_v}
    passes: dict[str, Any] = {
        "n_ubatch": options.batch(on_gpu=on_gpu),
        "flash_attn": options.flash_attn != "off",
        "lanes": options.parallel,
        **kv,
    }
    rows = options.max_rows
    first = memory.estimate_model(target, n_ctx=n_ctx, n_outputs=rows, reads_apart=True, **passes)
    second = None
    if draft is not None:
        its = min(first.n_ctx, memory.padded_ctx(draft.context_length or first.n_ctx))
        rows = max(options.parallel, options.max_leaves)
        second = memory.estimate_model(draft, n_ctx=its, n_outputs=rows, **passes)
    if not options.swa_full:
        saved = memory.window_bytes(target, first.n_ctx, n_ubatch=options.batch(on_gpu=False), **kv)
        first = replace(first, kv=max(first.kv - saved, 0))
    beside = tuple(memory.estimate_head(head, target, n_ctx=first.n_ctx) for head in heads)
    return memory.PairMemory(first, second, beside)


def judge(
    target: GgufHeader,
    draft: GgufHeader | None,
    options: EngineOptions,
    machine: Machine | None = None,
    *,
    heads: Sequence[GgufHeader] = (),
) -> Judgement:
    """Judge a pair of files as they would be loaded into RAM.

    Args:
        machine: foretells the speed.
        heads: drafting heads that would be loaded alongside the pair, for the memory it needs.
    """
    why, report = ("", None) if draft is None else _compared(target, draft)
    if why:
        return Judgement(why, draft=draft, report=report)

    def need(n_ctx: int) -> memory.PairMemory:
        return pair_memory(target, draft, options, n_ctx, heads=heads)

    length = options.n_ctx
    if length is None:
        length = context.usual(target, lambda n: need(n).required)
    whole, free = need(length), memory.available_memory()
    ours, its = Weights.of(target), None if draft is None else Weights.of(draft)
    plain = None
    if machine is not None and target.tensor_bytes >= LEAST_BYTES:
        plain = machine.speed(ours)
    return Judgement(
        fits="yes" if memory.fits(whole) else "no", needs=whole.required, free=free,
        plain=plain, pays_above=None if its is None else pays_above(its.read, ours.read),
        draft=draft, report=report, memory=whole,
    )  # fmt: skip


def judge_size(n_bytes: float) -> Judgement:
    """Judge a model that is not here, from the size of its file alone."""
    needs, free = n_bytes * OVERHEAD, memory.available_memory()
    fits: Fits = "yes" if not free or needs <= free * memory.MARGIN else "no"
    return Judgement(fits=fits, needs=needs, free=free)


def _compared(target: GgufHeader, draft: GgufHeader) -> tuple[str, PairReport | None]:
    """Return why a file cannot draft for the target, "" if it can, and how their tokens compare."""
    refusal = ""
    try:
        check_loadable(draft, "draft")
    except VocabularyOnly as error:
        refusal = error.message
    except SpecllamaError as error:
        return error.message, None
    if "tokenizer.ggml.tokens" not in draft.arrays:
        return refusal or "it has no tokenizer", None
    report = compare(target, draft)
    # a file without weights can still be judged by its tokenizer: say both
    alone = f"the tokenizer fits, but {refusal}" if refusal else ""
    return report.explanation or alone, report


# ---------------------------------------------------------------------- drafts for a target


@dataclass(frozen=True, slots=True)
class DraftFinding:
    """A draft to consider: its place, here or on the hub, and how it is judged."""

    ref: str
    path: Path | None
    note: str = ""
    judged: Judgement = Judgement()

    @property
    def typed(self) -> str:
        """The reference to type: files from a folder are shown by name, but used by path."""
        return str(self.path) if self.path is not None and self.ref == self.path.name else self.ref

    @property
    def refusal(self) -> str:
        """The reason why it cannot draft, in few words for a table; "" if it can."""
        report = self.judged.report
        if report is not None and report.problems:
            return report.short
        return without_name(self.judged.why, self.path) if self.path else self.judged.why

    def to_dict(self) -> dict[str, Any]:
        one = self.judged
        return {
            "ref": self.ref, "path": None if self.path is None else str(self.path),
            "fits": not one.why, "reason": one.why, "note": self.note,
            "params": one.draft.n_params if one.draft else 0,
            "quantization": one.draft.quantization if one.draft else "",
            "required_acceptance": one.pays_above,
            "memory": None if one.memory is None else one.memory.to_dict(),
            "report": None if one.report is None else one.report.to_dict(),
        }  # fmt: skip


def candidates(target: Path, target_ref: str, drafts: Sequence[str]) -> list[DraftFinding]:
    """List the drafts to consider: those named (a folder stands for its files), else all known
    ones.

    Raises:
        ModelUnavailable: a draft that was named is not here.
    """
    known = Summaries()

    def others(models: Iterable[library.LocalModel]) -> list[library.LocalModel]:
        there = [model for model in models if model.path.resolve() != target.resolve()]
        return [model for model in there if not known.get(model.path).sidecar]

    found: list[DraftFinding] = []
    for draft in drafts:
        folder = refs.existing(draft)
        if draft not in refs.TINY and folder is not None and folder.is_dir():
            models = others(library.scan_folder(folder))
            found += [DraftFinding(model.path.name, model.path) for model in models]
        else:
            path = refs.resolve("tiny-draft" if draft == "tiny" else draft)
            found.append(DraftFinding(draft, path))
    if not drafts:
        models = others(library.scan(near=target))
        found = [DraftFinding(model.ref, model.path) for model in models]
        pair = refs.catalog_pair(target_ref)
        named = pair.draft if pair else None
        if named and not any(f.ref.casefold().startswith(named.repo.casefold()) for f in found):
            found.append(DraftFinding(named.ref, None, f"specllama hub pull {named.ref}"))
    known.save()
    return found


def examine(
    target: GgufHeader,
    found: DraftFinding,
    options: EngineOptions,
    heads: Sequence[GgufHeader] = (),
) -> DraftFinding:
    """Judge one draft for the target. Never raises for a draft that does not fit."""
    if found.path is None:
        return replace(found, judged=Judgement("not on this machine yet"))
    try:
        draft = read_header(found.path)
    except SpecllamaError as error:
        return replace(found, judged=Judgement(error.message))
    return replace(found, judged=judge(target, draft, options, heads=heads))


def order(findings: Iterable[DraftFinding]) -> list[DraftFinding]:
    """Sort fitting drafts first, and among them those of a good size."""

    def key(one: DraftFinding) -> tuple[bool, bool, bool, float, str]:
        report = one.judged.report
        ratio, good = (report.ratio, report.good_size) if report else (1.0, False)
        refused = bool(one.judged.why)
        return refused, not one.judged.useful, not good, abs(ratio - 1 / 16), one.ref

    return sorted(findings, key=key)


# ---------------------------------------------------------------------- models of this machine


def first_here() -> str | None:
    """Return the model to begin with among those that are here and fit into memory: one that
    specllama pulled before those of other programs, a target of the catalog before others, and the
    newest of these. None if there is none."""

    def rank(model: library.LocalModel) -> tuple[bool, bool, float]:
        known = model.repo is not None and catalog.find_target(model.repo) is not None
        return model.owned, known, model.used

    here = loadable(library.scan(include_bundled=False))
    own = [model for model in here if not refs.is_bundled(str(model.path))]
    fitting = [model for model in own if judge_size(model.bytes).fits != "no"]
    return max(fitting, key=rank).ref if fitting else None


@dataclass(frozen=True, slots=True)
class Listed:
    """A model on disk, its summary, and the drafts on disk that fit it."""

    model: library.LocalModel
    summary: FileSummary
    drafts: tuple[str, ...] = ()


def list_models(models: Iterable[library.LocalModel]) -> list[Listed]:
    """Summarize models, each with the other models that could draft for it."""
    cache = Summaries()
    listed = [Listed(model, cache.get(model.path)) for model in models]
    cache.save()
    fitting: dict[tuple[str, str], bool] = {}  # by token lists and architectures

    def can_draft(target: Listed, draft: Listed) -> bool:
        a, b = target.summary, draft.summary
        if not (a.usable and b.usable) or b.active_params >= a.active_params:
            return False
        key = (a.fingerprint + a.architecture, b.fingerprint + b.architecture)
        if a.tokenizer == b.tokenizer and key not in fitting:
            try:
                ours, its = (read_header(one.model.path) for one in (target, draft))
            except SpecllamaError:
                return False
            fitting[key] = not _compared(ours, its)[0]
        return fitting.get(key, False)

    by_size = sorted(listed, key=lambda one: one.summary.active_params)
    return [
        replace(one, drafts=tuple(other.model.ref for other in by_size if can_draft(one, other)))
        for one in listed
    ]

"""``specllama pair``: which drafts fit a target, why not, and whether they can pay here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specllama.cli import completing, loading, output
from specllama.cli.listing import (
    Column,
    context,
    json_option,
    note,
    number,
    params,
    picked,
    show_facts,
    show_table,
    size,
    without_name,
)
from specllama.cli.options import LOADING, GroupedCommand, resolve, settings_options
from specllama.errors import PairIncompatible

if TYPE_CHECKING:
    from specllama.bench.experiment import Run
    from specllama.engine.engine import Engine
    from specllama.interface import MethodInfo
    from specllama.models.doctor import DraftFinding, Measured
    from specllama.models.gguf import GgufHeader
    from specllama.settings.params import EngineOptions

EPILOG = """\b
Examples:
  specllama pair tiny                          the bundled pair
  specllama pair qwen3-8b                      every known draft, on disk or to pull
  specllama pair target.gguf draft.gguf        one draft in detail
  specllama pair target.gguf drafts/ --json    every file below a folder
  specllama pair tiny tiny-draft --measure     also run both for a few seconds
"""
MEASURE_TOKENS = 96
MEASURE_SECONDS = 3.0  # for each of four runs
MEASURE_PROMPTS = (
    "Explain in a few sentences what a draft model does.",
    "Write a Python function that returns the largest of three numbers.",
)


@click.command("pair", cls=GroupedCommand, epilog=EPILOG)
@click.argument("target", shell_complete=completing.models)
@click.argument("drafts", nargs=-1, shell_complete=completing.models)
@click.option("--measure", is_flag=True, help="Run the best draft and see whether it pays.")
@json_option
@settings_options(only=[name for name in LOADING if name not in ("model", "draft-model")])
def command(
    target: str,
    drafts: tuple[str, ...],
    measure: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Show which DRAFTS fit TARGET and why the others do not, then every other method.

    Only headers are read; no weights are loaded without --measure. Without DRAFTS, every model on
    this machine and the catalog's draft are considered. A folder stands for the files below it.
    """
    from specllama.engine.heads import survey
    from specllama.models import doctor, memory, refs
    from specllama.models.gguf import read_header
    from specllama.models.loadable import check_loadable

    options = resolve(flags).engine_options()
    heads, n_ctx = options.heads, options.n_ctx
    path = refs.resolve(target)
    header = read_header(path)
    check_loadable(header)
    tried = doctor.candidates(path, target, drafts)
    beside = _heads(header, heads)
    findings = doctor.order(doctor.examine(header, one, heads=beside, n_ctx=n_ctx) for one in tried)
    best = next((finding for finding in findings if finding.useful), None)
    ways = survey(header, heads, draft=any(finding.fits for finding in findings))
    ways = _with_heads_here(ways, header, path, drafts)
    measured = _measure(path, best.candidate.path, options) if measure and best else None
    if as_json:
        output.document(
            {
                "target": header.to_dict(),
                "memory_available": memory.available_memory(),
                "gpus": [gpu.to_dict() for gpu in _gpus()],
                "drafts": [finding.to_dict() for finding in findings],
                "methods": [picked(way, "name available reason") for way in ways],
                "measured": None if measured is None else measured.to_dict(),
            }
        )
    elif len(findings) == 1:
        _show_one(header, findings[0])
    else:
        _show_table(header, target, findings)
    if not as_json:
        _show_ways(ways)
    if measured is not None and best is not None and not as_json:
        _show_measured(best, measured)
    if drafts and not any(finding.fits for finding in findings):
        first = findings[0] if findings else None
        raise PairIncompatible(
            f"no draft fits {target}"
            if first is None or len(findings) > 1
            else f"{first.candidate.ref} cannot draft for {target}: {first.reason}",
            "to see which drafts do: specllama pair " + target,
        )


def _heads(target: GgufHeader, files: Sequence[str]) -> list[GgufHeader]:
    """The heads that a run would load: those named, and those in the target's folder.

    Raises:
        ModelUnavailable, PairIncompatible, CannotLoad: a named file is no head of this target.
    """
    from specllama.engine.heads import bundled_heads, survey
    from specllama.models.gguf import read_header
    from specllama.models.refs import resolve

    fits = {way.name for way in survey(target, files) if way.available}
    found: dict[str, GgufHeader] = {}
    for path in [*bundled_heads(target.path), *(resolve(ref) for ref in files)]:
        head = read_header(path)
        if head.architecture in fits:
            found[head.architecture] = head
    return list(found.values())


def _with_heads_here(
    ways: tuple[MethodInfo, ...],
    target: GgufHeader,
    path: Path,
    drafts: Sequence[str],
) -> tuple[MethodInfo, ...]:
    """The methods, with the head files on this machine that belong to the target."""
    import dataclasses

    from specllama.engine.heads import fitting
    from specllama.models import library

    missing = {way.name for way in ways if not way.available}
    near = [Path(draft).expanduser() for draft in drafts]
    models = [
        *library.beside(path),
        *(model for folder in near if folder.is_dir() for model in library.scan_folder(folder)),
        *library.scan(),
    ]
    found = fitting(target, models)
    return tuple(
        dataclasses.replace(way, available=True, reason=f"with --head {found[way.name]}")
        if way.name in missing & set(found)
        else way
        for way in ways
    )


def _show_table(header: GgufHeader, target: str, findings: list[DraftFinding]) -> None:

    note(
        f"target {target}: {header.architecture}, {params(header.n_params)} parameters,"
        f" {header.quantization}, {header.vocab_size:,} tokens ({header.tokenizer_model})"
    )
    if not findings:
        note("no other model is on this machine; to find one: specllama hub pairs")
        return
    columns = [
        Column("fits", _mark, style="green"),
        Column("draft", lambda one: one.candidate.ref, give=True),
        number("params", lambda one: params(one.params) if one.params else ""),
        number("ratio", _ratio, drop=60),
        number("same", lambda one: f"{100 * one.report.shared:.0f} %" if one.report else ""),
        number("needs", _needs, drop=90),
        number("memory", lambda one: size(one.memory.required) if one.memory else "", drop=90),
        Column("notes", _verdict, give=True),
    ]
    show_table(findings, columns)
    note("same: ids with the same text · needs: the share of guesses to be kept for any gain")
    _show_next(target, findings)


def _show_ways(ways: tuple[MethodInfo, ...]) -> None:

    columns = [
        Column("", lambda way: "✓" if way.available else "·"),
        Column("--proposer", "name"),
        Column("what is missing", "reason", give=True),
    ]
    show_table(ways, columns)


def _show_next(target: str, findings: list[DraftFinding]) -> None:

    best = next((finding for finding in findings if finding.useful), None)
    pullable = next((f for f in findings if f.candidate.path is None), None)
    if best is not None:
        note(f"next: specllama chat -m {target} -d {best.candidate.typed}")
    elif pullable is not None:
        note(f"next: {pullable.candidate.note}")
    else:
        note("none fits; speculation works without a draft model, too: --proposer ngram")


def _needs(finding: DraftFinding) -> str:
    return "" if finding.required is None else f"> {finding.required:.0%}"


def _mark(finding: DraftFinding) -> str:
    if finding.candidate.path is None:
        return "↓"
    return "✗" if not finding.fits else "✓" if finding.useful else "·"


def _verdict(finding: DraftFinding) -> str:

    if finding.candidate.path is None:
        return finding.candidate.note
    if finding.report is not None and finding.report.problems:
        return finding.report.short
    if finding.reason:
        return without_name(finding.reason)
    return "; ".join(finding.warnings) or "fits"


def _ratio(finding: DraftFinding) -> str:
    report = finding.report
    if report is None or not finding.params or report.ratio <= 0:
        return ""
    return f"1/{1 / report.ratio:.0f}" if report.ratio < 1 else f"{report.ratio:.1f}×"


def _show_one(header: GgufHeader, finding: DraftFinding) -> None:
    """One draft: every check with its outcome."""

    report = finding.report
    rows: list[list[str]] = [["", "draft", f"{finding.candidate.ref}"]]
    if report is None:
        rows.append(["✗", "file", finding.reason])
    else:
        kinds: dict[str, str] = {p.kind: p.message for p in report.problems}

        def check(kind: str, title: str, fine: str) -> None:
            rows.append(["✗" if kind in kinds else "✓", title, kinds.get(kind, fine)])

        check("tokenizer", "tokenizer", f"{header.tokenizer_model}, the same")
        check("vocabulary", "vocabulary", f"{report.target_vocab:,} and {report.draft_vocab:,}")
        check("token", "token texts", f"{report.shared:.1%} of the ids mean the same text")
        for difference in report.differences[1:]:
            rows.append(["", "", str(difference)])
        check("bos", "BOS", "the same")
        check("eos", "EOS", "the same")
        check("rollback", "rollback", f"target {report.target_rollback},"
              f" draft {report.draft_rollback}")  # fmt: skip
        templates = {True: "the same", False: "different", None: "one has none"}
        rows.append(["·", "chat template", templates[report.same_template]])
        if finding.params:
            sizes = f"{params(finding.params)} of {params(header.n_params)}, {_ratio(finding)}"
            mark = "✓" if report.good_size else "·"
            rows.append([mark, "size", f"{sizes} (1/10 to 1/30 is best)"])
        contexts = f"{context(report.target_context)} and {context(report.draft_context)}"
        rows.append(["·", "context", contexts])
        if finding.reason and not report.problems:
            rows.append(["✗", "file", finding.reason])
    rows += _memory_rows(finding)
    if finding.required is not None:
        above = f"if more than {finding.required:.0%} of guesses are kept; wider passes raise that"
        rows.append(["·", "pays", f"{above} (--measure finds out)"])
    rows += [["!", "", warning] for warning in finding.warnings]
    columns = [Column(""), Column("check"), Column(f"for {header.path.name}", give=True)]
    show_table(rows, columns)


def _memory_rows(finding: DraftFinding) -> list[list[str]]:
    from specllama.models import memory

    need = finding.memory
    if need is None:
        return []
    parts = need.parts
    free = memory.available_memory()
    rows = [
        [
            "✓" if memory.fits(need, free) else "✗",
            "memory",
            f"{size(need.required)} at {need.target.n_ctx:,} tokens: weights"
            f" {size(sum(p.weights for p in parts))}, KV {size(sum(p.kv for p in parts))}, buffers"
            f" {size(sum(p.compute + p.output + p.reading for p in parts))}"
            + (f", heads {size(sum(h.required for h in need.heads))} of it" if need.heads else "")
            + f"; {size(free)} of RAM are free",
        ]
    ]
    for gpu in _gpus():
        # Medusa heads, which keep no cache, stay on the CPU
        on_gpu = sum(p.weights + p.kv + p.compute for p in parts if p.kv)
        rows.append(
            [
                "✓" if on_gpu <= gpu.free else "·",
                gpu.name,
                f"{size(on_gpu)} if offloaded entirely; {size(gpu.free)} are free on"
                f" {gpu.description}",
            ]
        )
    return rows


def _gpus() -> list[Any]:
    """GPUs that the installed build can use; none when it is not installed."""
    try:
        from specllama.backend.devices import devices, gpus

        return list(gpus(devices()))
    except (ImportError, OSError):
        return []


def _measure(target: Path, draft: Path | None, options: EngineOptions) -> Measured:
    """Run target and draft for a few seconds, plain and speculative in turn, at temperature 0."""
    from statistics import median

    from specllama.bench.experiment import plain_and
    from specllama.models.doctor import Measured
    from specllama.settings.params import GenerateParams, SamplingParams

    note("measuring …")
    plain = GenerateParams(
        sampling=SamplingParams(temperature=0.0), max_tokens=MEASURE_TOKENS, seed=1, ignore_eos=True
    )
    ways = [("draft", plain.replace(proposer="draft", draft_max=1, window="fixed"))]
    runs = [run for prompt in MEASURE_PROMPTS for run in plain_and(prompt, plain, ways)]
    with loading.load(target, draft, options) as engine:
        for run in runs[:2]:  # warm up: page cache, threads
            for _ in engine.generate(run.prompt, run.params.replace(max_tokens=8)):
                pass
        for run in runs:
            _ask_a_while(engine, run)
    passes = [one for run in runs for one in run.passes]
    singles, drafted = [p for p in passes if not p.drafted], [p for p in passes if p.drafted]
    guesses = sum(one.drafted for one in drafted)
    return Measured(
        step_ms=median([one.pass_ms for one in singles] or [0.0]),
        draft_ms=median([one.draft_ms / one.drafted for one in drafted] or [0.0]),
        pass_ms=median([one.pass_ms for one in drafted] or [0.0]),
        drafted=guesses,
        acceptance=sum(one.accepted for one in drafted) / guesses if guesses else None,
        plain=_speed(runs[::2]),
        speculative=_speed(runs[1::2]),
    )


def _ask_a_while(engine: Engine, run: Run) -> None:
    from specllama.bench.experiment import ask
    from specllama.cancel import Cancel

    cancel = Cancel()

    def moved(run: Run) -> None:
        if run.end_s > MEASURE_SECONDS:
            cancel.set()

    ask(engine, run, cancel=cancel, moved=moved)


def _speed(runs: Sequence[Run]) -> float:
    """Tokens a second after the first."""
    passes = [one for run in runs for one in run.passes]
    seconds = sum(one.took_ms for one in passes) / 1e3
    return sum(one.tokens for one in passes) / max(seconds, 1e-9)


def _show_measured(best: DraftFinding, measured: Measured) -> None:

    verdicts = {
        True: "it pays here",
        False: "it does not pay here",
        None: "too few drafts to tell: the machine is slow, or busy with something else",
    }
    accepted = "none was drafted" if measured.acceptance is None else f"{measured.acceptance:.0%}"
    facts = {
        "target step": f"{measured.step_ms:.2f} ms",
        "draft step": f"{measured.draft_ms:.2f} ms ({measured.draft_cost:.0%} of a target step)",
        "verifying one more row": f"{measured.marginal:.0%} of a target step",
        "acceptance needed": f"{measured.required:.0%}",
        "acceptance seen": f"{accepted} of {measured.drafted} drafts, temperature 0",
        "speed": f"{measured.plain:.0f} tok/s plain, {measured.speculative:.0f} with one draft",
        "verdict": verdicts[measured.pays],
    }
    show_facts(f"measured with {best.candidate.ref}", "", facts)

"""``specllama pair``: the drafts that fit a target, why others do not, and if they can pay here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specllama.cli import completion, output
from specllama.cli.listing import Column, context, json_option, note, number, picked, show_table
from specllama.cli.options import LOADING, GroupedCommand, grouped, resolve, settings_options
from specllama.cli.output import examples
from specllama.errors import CannotLoad, PairIncompatible, SpecllamaError, UsageError
from specllama.text import count, size

if TYPE_CHECKING:
    from specllama.interface import MethodInfo
    from specllama.models.gguf import GgufHeader
    from specllama.models.judgement import DraftFinding, Judgement
    from specllama.settings.params import EngineOptions


@click.command("pair", cls=GroupedCommand, epilog=examples()["pair"])
@click.argument("target", required=False, shell_complete=completion.models)
@click.argument("drafts", nargs=-1, shell_complete=completion.models)
@json_option
@settings_options(only=[name for name in LOADING if name not in ("model", "draft-model")])
@grouped("-d", "--draft-model", "named", multiple=True, metavar="REF", group="Model",
         shell_complete=completion.models, help="A draft; repeatable.")  # fmt: skip
@grouped("-m", "--model", metavar="REF", group="Model", shell_complete=completion.models,
         help="The target.")  # fmt: skip
def command(
    target: str | None,
    drafts: tuple[str, ...],
    model: str | None,
    named: tuple[str, ...],
    as_json: bool,
    **flags: Any,
) -> None:
    """Show which DRAFTS fit TARGET and why the others do not, then every other method.

    Only headers are read. Without DRAFTS, every model on this machine and the catalog's draft are
    considered. A folder stands for the files below it.
    """
    from specllama.engine.target_heads import read_heads, survey
    from specllama.models import judgement, memory, refs
    from specllama.models.gguf import read_header
    from specllama.models.loadable import check_loadable

    first, *others = [*([model] if model else []), *([target] if target else []), *drafts, ""]
    if not first:
        raise UsageError("which target is meant is not said", "for example: specllama pair tiny")
    target, drafts = first, (*others[:-1], *named)
    options = resolve(flags).engine_options()
    path = refs.resolve(target)
    header = read_header(path)
    check_loadable(header)
    tried = judgement.candidates(path, target, drafts)
    beside = list(read_heads(header, options.heads)[0].values())
    findings = judgement.order(judgement.examine(header, one, options, beside) for one in tried)
    fits = any(not finding.judged.why for finding in findings)
    ways = _with_heads_here(survey(header, options.heads, draft=fits), header, path, drafts)
    if as_json:
        output.json_line(
            {
                "target": header.to_dict(),
                "memory_available": memory.available_memory(),
                "gpus": [gpu.to_dict() for gpu in _gpus()],
                "drafts": [finding.to_dict() for finding in findings],
                "methods": [picked(way, "name available reason") for way in ways],
            }
        )
    elif len(findings) == 1:
        _show_one(header, findings[0], options)
    else:
        _show_table(header, target, findings, beside)
    if not as_json:
        _show_ways(ways)
        _show_trained(header, target, beside)
    if drafts and not fits:
        said = f"no draft fits {target}"
        if len(findings) == 1:
            said = f"{findings[0].ref} cannot draft for {target}: {findings[0].judged.why}"
        raise PairIncompatible(said, "to see which drafts do: specllama pair " + target)


def _with_heads_here(
    ways: tuple[MethodInfo, ...], target: GgufHeader, path: Path, drafts: Sequence[str]
) -> tuple[MethodInfo, ...]:
    """Return the methods, with the head files on this machine that belong to the target."""
    import dataclasses

    from specllama.engine.target_heads import fitting
    from specllama.models import library, refs

    missing = {way.name for way in ways if not way.available}
    near = [folder for draft in drafts if (folder := refs.existing(draft)) is not None]
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


def _show_table(
    header: GgufHeader, target: str, findings: list[DraftFinding], heads: list[GgufHeader]
) -> None:
    note(
        f"target {target}: {header.architecture}, {count(header.n_params)} parameters,"
        f" {header.quantization}, {header.vocab_size:,} tokens ({header.tokenizer_model})"
    )
    if not findings:
        note("no other model is on this machine; to find one: specllama hub pairs")
        return
    columns = [
        Column("fits", _mark, style="green"),
        Column("draft", "ref", give=True),
        number("params", lambda one: count(one.judged.draft.n_params) if one.judged.draft else ""),
        number("ratio", lambda one: _ratio(one.judged), drop=60),
        number("same", _same),
        number("needs", lambda one: _needs(one.judged), drop=90),
        number("memory", lambda one: size(one.judged.needs) if one.judged.needs else "", drop=90),
        Column("notes", _verdict, give=True),
    ]
    show_table(findings, columns)
    note("same: ids with the same text · needs: the share of guesses to be kept for any gain")
    _show_next(target, findings, heads)


def _show_ways(ways: tuple[MethodInfo, ...]) -> None:
    columns = [
        Column("", lambda way: "✓" if way.available else "·"),
        Column("--proposer", "name"),
        Column("what is missing", "reason", give=True),
    ]
    show_table(ways, columns)


def _show_trained(header: GgufHeader, target: str, heads: list[GgufHeader]) -> None:
    """Show how well heads guess that were trained here; without any, how to train one."""
    from specllama.training import training_card
    from specllama.training.training_folder import require_trainable

    if not heads:
        with suppress(SpecllamaError):
            require_trainable(header)
            note(f"to train a head for it: specllama train-draft {target}")
    for head in heads:
        card = training_card.read_training_card(training_card.beside(head.path))
        if card is not None and card.best is not None:
            note(f"{head.path.name}, trained for {card.spent_s / 60:.0f} min: {card.best.words}")
            note(card.pays)


def _show_next(target: str, findings: list[DraftFinding], heads: list[GgufHeader]) -> None:
    best = next((finding for finding in findings if finding.judged.useful), None)
    pullable = next((finding for finding in findings if finding.path is None), None)
    if best is not None:
        note(f"next: specllama chat -m {target} -d {best.typed}")
    elif pullable is not None:
        note(f"next: {pullable.note}")
    elif heads:
        note(f"next: specllama chat -m {target}, which drafts with its head")
    else:
        note("none fits; speculation works without a draft model, too: --proposer ngram")


def _needs(judged: Judgement) -> str:
    return "" if judged.pays_above is None else f"> {judged.pays_above:.0%}"


def _mark(finding: DraftFinding) -> str:
    if finding.path is None:
        return "↓"
    return "✗" if finding.judged.why else "✓" if finding.judged.useful else "·"


def _same(finding: DraftFinding) -> str:
    report = finding.judged.report
    return "" if report is None else f"{int(100 * report.shared)} %"


def _verdict(finding: DraftFinding) -> str:
    report = finding.judged.report
    words = finding.refusal or "; ".join(report.warnings if report else ())
    return finding.note if finding.path is None else words or "fits"


def _ratio(judged: Judgement) -> str:
    ratio = judged.report.ratio if judged.report and judged.draft and judged.draft.n_params else 0
    return "" if ratio <= 0 else f"1/{1 / ratio:.0f}" if ratio < 1 else f"{ratio:.1f}×"


def _show_one(header: GgufHeader, finding: DraftFinding, options: EngineOptions) -> None:
    """Show one draft: every check with its outcome."""
    from specllama.engine import fewer_words

    judged, report = finding.judged, finding.judged.report
    rows: list[list[str]] = [["", "draft", finding.ref]]
    if report is None:
        rows.append(["✗", "file", judged.why])
    else:
        kinds: dict[str, str] = {p.kind: p.message for p in report.problems}

        def check(kind: str, title: str, fine: str) -> None:
            rows.append(["✗" if kind in kinds else "✓", title, kinds.get(kind, fine)])

        check("tokenizer", "tokenizer", f"{header.tokenizer_model}, the same")
        sizes = f"{report.target_vocab:,} and {report.draft_vocab:,}"
        if judged.draft and judged.draft.rows:
            sizes += f", of which it guesses {judged.draft.rows:,}"
        check("vocabulary", "vocabulary", sizes)
        fine = "the same" if report.shared == 1 else f"{report.shared:.1%} of the ids are the same"
        check("token", "token texts", fine)
        rows += [["", "", str(difference)] for difference in report.differences[1:]]
        check("bos", "BOS of prompts", "the same")
        check("eos", "EOS of prompts", "the same")
        undone = f"target {report.target_rollback}, draft {report.draft_rollback}"
        check("rollback", "rollback", undone)
        templates = {True: "the same", False: "different", None: "one has none"}
        rows.append(["·", "chat template", templates[report.same_template]])
        if judged.draft and judged.draft.n_params:
            sizes = f"{count(judged.draft.n_params)} of {count(header.n_params)}, {_ratio(judged)}"
            mark = "✓" if report.good_size else "·"
            rows.append([mark, "size", f"{sizes} (1/10 to 1/30 is best)"])
        contexts = f"{context(report.target_context)} and {context(report.draft_context)}"
        rows.append(["·", "context", contexts])
        if judged.why and not report.problems:
            rows.append(["✗", "file", judged.why])
    if judged.draft and (made := fewer_words.words(judged.draft, options)):
        rows.append(["·", "words", made])
    rows += _memory_rows(judged)
    if judged.pays_above is not None:
        above = f"if more than {judged.pays_above:.0%} of guesses are kept; wider passes raise that"
        rows.append(["·", "pays", f"{above} (specllama tune finds out)"])
    rows += [["!", "", warning] for warning in (report.warnings if report else ())]
    show_table(rows, [Column(""), Column("check"), Column(f"for {header.path.name}", give=True)])


def _memory_rows(judged: Judgement) -> list[list[str]]:
    need = judged.memory
    if need is None:
        return []
    parts = need.parts
    words = (
        f"{size(judged.needs)} at {need.target.n_ctx:,} tokens: weights"
        f" {size(sum(p.weights for p in parts))}, KV {size(sum(p.kv for p in parts))}, buffers"
        f" {size(sum(p.compute + p.output + p.reading for p in parts))}"
        + (f", heads {size(sum(h.required for h in need.heads))} of it" if need.heads else "")
        + f"; {size(judged.free)} of RAM are free"
    )
    rows = [["✗" if judged.fits == "no" else "✓", "memory", words]]
    # Medusa heads, which keep no cache, stay on the CPU
    on_gpu = sum(p.weights + p.kv + p.compute for p in parts if p.kv)
    for gpu in _gpus():
        words = f"{size(on_gpu)} if offloaded entirely; {size(gpu.free)} are free on"
        rows.append(["✓" if on_gpu <= gpu.free else "·", gpu.name, f"{words} {gpu.description}"])
    return rows


def _gpus() -> list[Any]:
    """List the GPUs that the installed build can use; none if no build is installed."""
    from specllama.backend import trial
    from specllama.backend.devices import devices, gpus

    try:
        trial.require()
        return list(gpus(devices()))
    except (CannotLoad, OSError):
        return []

"""Documents of a reply or a logged run: text, verdict, rounds, settings and machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from specllama.events import Finished, RoundDone
from specllama.figures import Figures
from specllama.settings.params import GenerateParams
from specllama.store.codec import params_to_dict
from specllama.store.document import (
    Raw,
    fact_list,
    folded,
    heading,
    page,
    paragraph,
    quote,
    table,
)
from specllama.store.rounds import LoggedTurn, RunRecord
from specllama.verdict import words

ROUNDS = 400  # of a reply that are shown: an issue holds 65,536 characters
ROUND_HEADS = ("round", "drafted by", "guesses", "kept", "wrote", "took", "plain steps would take")
USUAL = params_to_dict(GenerateParams())
ALWAYS = ("temperature", "seed", "proposer", "verify", "window")  # of the settings


def run_document(record: RunRecord, names: Mapping[str, str]) -> str:
    """Return a document with every reply of a run; ``names``: of the methods, for people."""
    parts: list[str] = []
    several = len(record.turns) > 1
    for turn in record.turns:
        if several:
            parts.append(heading(f"Reply {turn.index + 1}"))
        parts += reply_parts(turn, names)
    begun = [turn.started for turn in record.turns if turn.started is not None]
    seeds = [started.seed for started in begun if "seed" not in started.unknown]
    parts += [*provenance(record.header), settings(record.header.get("params"), seeds)]
    return page(f"Run {record.run}", parts)


def reply_parts(turn: LoggedTurn, names: Mapping[str, str], text: str = "") -> list[str]:
    """Return the verdict and figures, the reply, and its rounds; show ``text`` for a reply without
    known rounds."""
    end, figures = turn.finished, turn.figures
    parts: list[str] = []
    if figures is not None:
        verdict = figures.verdict
        told = "Plain decoding" if verdict is None else words(verdict, "too few rounds", both=True)
        parts += [paragraph(f"{told}.")] if not figures.engine else []
        parts.append(paragraph(_figures(figures, end)))
    if not turn.rounds:
        return [*parts, quote(text or (end.text if end else ""))]
    wrote = "".join(text for done in turn.rounds for text in done.emitted_text)
    parts.append(quote(wrote.removesuffix(_stop_text(turn))))
    shown = turn.rounds[:ROUNDS]
    inside = [table(ROUND_HEADS, [_row(done, names) for done in shown])]
    if rest := len(turn.rounds) - len(shown):
        inside.append(paragraph(f"{rest} more rounds: specllama log export has them all."))
    return [*parts, folded(f"{len(turn.rounds)} rounds", inside)]


def _stop_text(turn: LoggedTurn) -> str:
    """Return the text of the last token if the reply does not show it."""
    texts = [text for done in turn.rounds for text in done.emitted_text]
    if turn.finished is None or turn.finished.reason != "stop_token" or not texts:
        return ""
    return "" if turn.finished.text.endswith(texts[-1]) else texts[-1]


def _row(done: RoundDone, names: Mapping[str, str]) -> list[str]:
    n = len(done.emitted)
    sources = [names.get(part) or part for part in done.source.split("+")]
    plain = f"{n * done.plain_ms:.1f} ms" if done.plain_ms else ""
    return [
        str(done.index + 1),
        " + ".join(sources) if done.drafted else "",
        Raw("".join(done.drafted_text)),
        f"{done.accepted} of {len(done.drafted)}" if done.drafted else "",
        Raw("".join(done.emitted_text)),
        f"{done.took_ms:.1f} ms",
        plain,
    ]


def _figures(found: Figures, end: Finished | None) -> str:
    speed = f", {found.tok_per_s:.1f} tokens a second" if found.tok_per_s else ""
    first = f", first token after {found.first.total:.0f} ms" if found.first else ""
    if found.engine:
        count = "–" if found.tokens is None else found.tokens
        told = f"{found.engine}: {count} tokens{speed}{first}; guesses kept: {found.kept_words}."
        return told if end is None else f"{told} Ended by {end.reason.replace('_', ' ')}."
    told = (
        f"{found.tokens} tokens in {found.rounds} rounds{speed}{first}; "
        f"{found.kept_words} guesses kept. Behind the first token: drafting "
        f"{found.draft_ms:.0f} ms, target {found.verify_ms:.0f} ms, "
        f"waiting {found.waiting_ms:.0f} ms."
    )
    if end is None:
        return told
    return (
        f"{told} Prompt {end.prompt_n} tokens, context {end.n_ctx}. "
        f"Ended by {end.reason.replace('_', ' ')}."
    )


# ---- what a figure was measured with


def provenance(header: Mapping[str, Any]) -> list[str]:
    """Describe a run from the first line of its log; name files without their folder."""
    lines: list[list[str]] = []
    versions = header.get("versions")
    if isinstance(versions, dict):
        lines.append([", ".join(f"{name} {v}" for name, v in versions.items())])
    device = [f"{header.get('threads', '?')} threads, flash attention "]
    device.append("on, " if header.get("flash_attn") else "off, ")
    lines.append([Raw(str(header.get("device", "?"))), ", ", *device, str(header.get("platform"))])
    lines.append([f"exactness: {header.get('exactness', '?')}"])
    for role in ("target", "draft"):
        model = header.get(role)
        if isinstance(model, dict):
            lines.append(_model(role, model))
    return [heading("What it ran on"), fact_list(lines)]


def _model(role: str, model: Mapping[str, Any]) -> list[str]:
    name = PurePosixPath(str(model.get("path", "?")).replace("\\", "/")).name
    size = model.get("file_bytes")
    facts = [f", {size:,} bytes"] if isinstance(size, int) else []
    digest = model.get("sha256")
    facts += [f", sha256 {str(digest)[:16]}…"] if digest else []
    quant = Raw(str(model.get("quantization", "?")))
    return [f"{'target' if role == 'target' else 'draft model'}: ", Raw(name), ", ", quant, *facts]


def settings(params: Any, seeds: Sequence[int] = ()) -> str:
    """List the settings that differ from the usual ones, and a few that people always want; show
    ``seeds`` of the replies if no seed was set."""
    if not isinstance(params, dict):
        return ""
    flat = {**params, **_dict(params.get("sampling"))}
    if flat.get("seed") is None and seeds:
        flat["seed"] = f"drawn, {', '.join(map(str, seeds))}"
    usual = {**USUAL, **_dict(USUAL["sampling"])}
    lines = [
        [f"{name}: ", Raw(str(value))]
        for name, value in flat.items()
        if name not in ("sampling", "from_card") and (name in ALWAYS or value != usual.get(name))
    ]
    return folded("Settings", [fact_list(lines)])


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}

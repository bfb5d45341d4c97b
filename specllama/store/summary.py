"""Summaries of a round log: its runs, over time, and documents for other people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from specllama.events import Finished, RoundDone
from specllama.figures import Figures, SpecStats
from specllama.rates import share
from specllama.settings.params import GenerateParams
from specllama.store.codec import params_to_dict
from specllama.store.document import Raw, fact_list, folded, heading, paragraph, quote, table
from specllama.store.rounds import LoggedTurn, RunRecord
from specllama.verdict import judge, passes_of, words


@dataclass(frozen=True, slots=True)
class Slice:
    """Rounds that ended in [begin_s, end_s)."""

    begin_s: float
    end_s: float
    stats: SpecStats = field(default_factory=SpecStats)

    @property
    def tok_per_s(self) -> float | None:
        written = self.stats.emitted if self.stats.rounds else None
        return share(written, max(self.end_s - self.begin_s, 0.0))


def _ends(record: RunRecord) -> Iterator[tuple[RoundDone, float]]:
    """Yield every round with its end in seconds, on one time axis: the requests of a run one after
    another, without the time between turns."""
    offset = 0.0
    for turn in record.turns:
        before = offset
        for done in turn.rounds:
            # A clock that jumps, or a damaged line, must not make time run backwards.
            before = max(before, offset + done.t_s)
            yield done, before
        offset = before


def replies_of(records: Iterable[RunRecord]) -> list[Figures]:
    """Return the figures of every reply."""
    turns = (turn for record in records for turn in record.turns)
    return [found for turn in turns if (found := turn.figures) is not None]


def generated(records: Iterable[RunRecord]) -> Figures:
    """Sum the figures of the replies that wrote more than one token."""
    return Figures.together([one for one in replies_of(records) if one.tok_per_s])


def by_time(record: RunRecord, n: int) -> list[Slice]:
    """Cut the run into at most ``n`` slices of equal length; those without a round hold zeros."""
    rounds = list(_ends(record))
    if not rounds or n < 1:
        return []
    first, began = rounds[0]
    begin, end = max(0.0, began - first.took_ms / 1000), rounds[-1][1]
    if (length := (end - begin) / n) <= 0:
        return [Slice(begin, end, SpecStats.of(record.rounds))]
    slices = [Slice(begin + i * length, begin + (i + 1) * length) for i in range(n)]
    for done, at in rounds:
        slices[min(int((at - begin) / length), n - 1)].stats.observe(done)
    return slices


def stats_dict(stats: SpecStats) -> dict[str, Any]:
    """Return counters and rates of one group, for ``--json``."""
    names = ("rounds", "drafted", "accepted", "emitted", "cut", "near_ties", "acceptance_rate",
             "mean_acceptance_length", "draft_ms", "verify_ms", "other_ms", "wait_ms")  # fmt: skip
    return {name: getattr(stats, name) for name in names}


def run_dict(record: RunRecord) -> dict[str, Any]:
    """Return one run in a line: its pair, its amount and its rates."""
    wrote, header = generated([record]), record.header
    figures = stats_dict(SpecStats.of(record.rounds))
    if elsewhere := [one for one in replies_of([record]) if one.engine]:
        told = Figures.together(elsewhere)
        figures = {
            **dict.fromkeys(figures),
            "emitted": told.tokens,
            "drafted": told.drafted,
            "accepted": told.accepted,
            "acceptance_rate": None if told.at_most else told.acceptance_rate or None,
        }
    return {
        "run": record.run,
        "path": str(record.path),
        "started": header.get("started"),
        "command": header.get("command"),
        "target": _model_name(header.get("target")),
        "draft": _model_name(header.get("draft")),
        "turns": len(record.turns),
        "complete": bool(record.turns) and all(turn.finished for turn in record.turns),
        "skipped_lines": record.skipped,
        "generation_s": wrote.decode_ms / 1e3,
        "tok_per_s": wrote.tok_per_s,
        "verdict": judge(passes_of(record.rounds)).to_dict(),
        **figures,
    }


def _model_name(model: Any) -> str | None:
    if not isinstance(model, dict):
        return None
    name, quantization = model.get("name"), model.get("quantization")
    return f"{name} {quantization}" if quantization else str(name)


ROUNDS = 400  # of a reply that are shown: an issue holds 65,536 characters
ROUND_HEADS = ("round", "drafted by", "guesses", "kept", "wrote", "took", "plain steps would take")
USUAL = params_to_dict(GenerateParams())
ALWAYS = ("temperature", "seed", "proposer", "verify", "window")  # of the settings


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
        inside.append(paragraph(f"{rest} more rounds: specllama log show has them all."))
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


def settings(params: Any) -> str:
    """List the settings that differ from the usual ones, and a few that people always want."""
    if not isinstance(params, dict):
        return ""
    flat = {**params, **_dict(params.get("sampling"))}
    usual = {**USUAL, **_dict(USUAL["sampling"])}
    lines = [
        [f"{name}: ", Raw(str(value))]
        for name, value in flat.items()
        if name not in ("sampling", "from_card") and (name in ALWAYS or value != usual.get(name))
    ]
    return folded("Settings", [fact_list(lines)])


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}

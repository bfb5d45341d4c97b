"""One comparison as JSON and as Markdown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from specllama.bench import load
from specllama.bench.paired import between
from specllama.bench.runner import Comparison, Summary
from specllama.store.document import (
    fact_list,
    heading,
    page,
    table,
)

SCHEMA = "specllama.bench.v2"


def _show(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else format(value, form) + unit


def _accepted(s: Summary) -> str:
    return "" if s.acceptance_rate is None else f"{s.accepted} ({s.acceptance_rate:.0%})"


COLUMNS: dict[str, Callable[[Summary], str]] = {
    "arm": lambda s: s.arm,
    "group": lambda s: s.group,
    "tok/s": lambda s: _show(s.tok_per_s, ".1f"),
    "ratio": lambda s: _show(s.ratio, ".2f", "×"),
    "range": between,
    "p50 s": lambda s: _show(s.latency_p50_s, ".2f"),
    "p95 s": lambda s: _show(s.latency_p95_s, ".2f"),
    "TTFT ms": lambda s: _show(s.ttft_p50_s and s.ttft_p50_s * 1e3, ".0f"),
    "TTFT ratio": lambda s: _show(s.ttft_ratio, ".2f"),
    "accepted": _accepted,
    "rejected": lambda s: str(s.rejected) if s.drafted else "",
    "rounds": lambda s: str(s.rounds or ""),
    "same text": lambda s: "" if s.equal is None else f"{s.equal}/{s.compared}",
    "own time": lambda s: _show(s.other_share, ".1%"),
    "slowest 500": lambda s: _show(s.slowest_500, ".2f", "×"),
    "in run": lambda s: _show(s.in_run, ".2f", "×"),
    "in run, slowest 500": lambda s: _show(s.in_run_500, ".2f", "×"),
}
"""The columns of a report; an empty cell is a figure that was not measured."""


def cells(s: Summary) -> list[str]:
    """Return a row of the table."""
    return [cell(s) for cell in COLUMNS.values()]


def to_json(comparison: Comparison, *, texts: bool = False) -> dict[str, Any]:
    """Return the whole comparison as plain data; ``texts`` adds the replies and their token ids."""
    return {
        "schema": SCHEMA,
        "provenance": comparison.provenance,
        "baseline": comparison.baseline,
        "summaries": [s.to_dict() for s in comparison.summaries()],
        "load": [row.to_dict() for row in comparison.load],
        "runs": [run.to_dict(texts=texts) for run in comparison.runs],
    }


def provenance_lines(data: dict[str, Any]) -> list[str]:
    """Describe the provenance block in words, one fact a line."""
    machine, engine = data.get("machine", {}), data.get("engine", {})
    lines = [
        f"measured {data.get('when', '?')}",
        ", ".join(f"{name} {v}" for name, v in data.get("versions", {}).items()),
        f"{machine.get('cpu', '?')}, {machine.get('cores', '?')} cores, "
        f"{machine.get('system', '?')}",
        f"{engine.get('device', '?')}, {engine.get('threads', '?')} threads, "
        f"flash attention {'on' if engine.get('flash_attn') else 'off'}, "
        f"{engine.get('exactness', '?')}",
    ]
    for role in ("target", "draft"):
        model = data.get(role)
        if model:
            digest = (model.get("sha256") or "")[:16]
            lines.append(
                f"{role}: {model.get('file')} ({model.get('quantization')}, "
                f"{(model.get('n_params') or 0) / 1e6:.0f} M parameters"
                + (f", sha256 {digest}…)" if digest else ")")
            )
    if "tuned" in data:
        lines.append(
            f"warm: tuned {data['tuned']}" if data["tuned"] else "warm: learnt from use, untuned"
        )
    for one in data.get("against", ()):
        flags = f", started with {one['flags']}" if one["flags"] else ""
        model = f", model {one['model']}" if one["model"] else ""
        lines.append(f"{one['arm']}: {one['engine']} at {one['url']}{model}{flags}")
    if data.get("arguments"):
        lines.append("specllama " + " ".join(data["arguments"]))
    return lines


def load_rows(comparison: Comparison) -> list[list[str]]:
    """Return the cells below ``load.COLUMNS``."""
    return [[cell(row) for cell in load.COLUMNS.values()] for row in comparison.load]


def report_document(comparison: Comparison) -> str:
    """Return the table of all summaries, with the circumstances of the measurement."""
    summaries = comparison.summaries()
    parts: list[str] = [table(tuple(COLUMNS), list(map(cells, summaries)))]
    if comparison.load:
        parts += [heading(load.LOADED), table(tuple(load.COLUMNS), load_rows(comparison))]
    facts = [[line] for line in provenance_lines(comparison.provenance)]
    parts += [heading("How this was measured"), fact_list(facts)]
    return page("specllama bench", parts)


def write_reports(comparison: Comparison, out: Path) -> list[Path]:
    """Write ``OUT.json`` and ``OUT.md``; return their paths."""
    stem = out.with_suffix("") if out.suffix in (".json", ".md") else out
    stem.parent.mkdir(parents=True, exist_ok=True)
    written, document = [], report_document(comparison)
    for suffix, data in (
        (".json", msgspec.json.format(msgspec.json.encode(to_json(comparison)), indent=1)),
        (".md", document.encode()),
    ):
        path = stem.with_name(stem.name + suffix)
        path.write_bytes(data)
        written.append(path)
    return written

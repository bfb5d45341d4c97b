"""Comparisons of arms with a baseline, run by run: in figures and as JSON.

Every run is paired with the baseline's of the same prompt in the same repetition: machines drift,
and only neighbours in time compare. ``outcome`` says what the pairs of a group are worth together.
"""

from __future__ import annotations

import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from specllama.backend.cores import usable_cores
from specllama.backend.devices import cpu_name
from specllama.bench.experiment import Arm, RunFigures, Task, compare
from specllama.bench.outcome import Pairs, as_one, between, pairs
from specllama.interface import EngineInfo, ModelInfo
from specllama.models.contents import of_model
from specllama.paths import package_versions
from specllama.rates import GuessShares, Payoff, share, total
from specllama.text import figure
from specllama.verdict import judge, payoff

Beside = Sequence[tuple[RunFigures, RunFigures]]
"""Runs of the baseline, each with the arm's of the same task in the same repetition."""


class Summary(GuessShares):
    """One arm over a set of runs, against the baseline in the same repetitions.

    ``tok_per_s``, ``ratio``, ``low`` and ``high`` are ``outcome``'s; ``ttft_ratio`` as well. A
    figure is None where a run did not tell, or where it was not measured.

    Args:
        beside: these runs. table: all of the arm, which say how much repetitions differ.
    """

    def __init__(
        self, arm: str, group: str, runs: Sequence[RunFigures], beside: Beside, table: Beside
    ) -> None:
        speed = as_one(_rows(beside, lambda r: r.speed), _rows(table, lambda r: r.speed))
        waiting = as_one(_rows(beside, lambda r: r.ttft_s))
        same = [one for plain, run in beside if (one := plain.same(run)) is not None]
        busy = sum(r.draft_s + r.verify_s + r.other_s for r in runs)
        self.arm, self.group, self.runs = arm, group, len(runs)
        self.tokens = sum(r.tokens for r in runs)
        self.tok_per_s = speed.speed if speed else None
        self.ratio = speed.ratio if speed else None
        self.low = speed.low if speed else None
        self.high = speed.high if speed else None
        self.latency_p50_s = percentile([r.total_s for r in runs], 0.5)
        self.latency_p95_s = percentile([r.total_s for r in runs], 0.95)
        self.ttft_p50_s = percentile([r.ttft_s for r in runs if r.ttft_s > 0], 0.5)
        self.ttft_ratio = waiting.ratio if waiting else None
        self.drafted = total([r.drafted for r in runs])
        self.accepted = total([r.accepted for r in runs])
        self.rounds = sum(r.rounds for r in runs)
        self.draft_share = share(sum(r.draft_s for r in runs), busy)
        self.other_share = share(sum(r.other_s for r in runs), busy)
        # the speed over the plain passes of the same run
        self.in_run = judge([one for run in runs for one in run.passes]).ratio
        # runs that wrote the baseline's tokens, None if that is not promised
        self.equal = sum(same) if same else None
        self.compared = len(same)

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"acceptance_rate": self.acceptance_rate, "rejected": self.rejected}


@dataclass(slots=True)
class Comparison:
    """All runs of a comparison; the other arms are divided by the arm named ``baseline``."""

    baseline: str
    runs: list[RunFigures] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, arms: Sequence[Arm], tasks: Iterable[Task], **how: Any) -> Comparison:
        """Compare arms over tasks, see ``compare``; the first arm is the baseline."""
        rows = compare([arm.run for arm in arms], tasks, warm_up=1, **how)
        return cls(arms[0].name, [run for row in rows for run in row])

    @property
    def slices(self) -> list[str]:
        return list(dict.fromkeys(run.slice for run in self.runs))

    @property
    def temperatures(self) -> list[float]:
        return sorted({run.temperature for run in self.runs})

    def summaries(self) -> list[Summary]:
        """Summarize every arm: over everything, per temperature, and per slice and temperature."""
        out: list[Summary] = []
        for arm in dict.fromkeys(run.arm for run in self.runs):
            out.append(self.summary(arm, "all"))
            for t in self.temperatures:
                if len(self.temperatures) > 1:
                    out.append(self.summary(arm, f"T={t:g}", temperature=t))
                for s in self.slices:
                    out.append(self.summary(arm, f"{s} T={t:g}", temperature=t, slice=s))
        return out

    def _runs(self, temperature: float | None, slice: str | None, arm: str) -> list[RunFigures]:
        return [
            r
            for r in self.runs
            if r.arm == arm and temperature in (None, r.temperature) and slice in (None, r.slice)
        ]

    def _beside(self, runs: Sequence[RunFigures]) -> Beside:
        plain = {run.task: run for run in self._runs(None, None, self.baseline)}
        return [(plain[run.task], run) for run in runs if run.task in plain]

    def summary(
        self, arm: str, group: str, *, temperature: float | None = None, slice: str | None = None
    ) -> Summary:
        """Summarize one arm over the runs of a temperature and a slice (None: of all)."""
        mine, every = self._runs(temperature, slice, arm), self._runs(None, None, arm)
        return Summary(arm, group, mine, self._beside(mine), self._beside(every))

    def verdict(self, arm: str, temperature: float | None = None) -> Payoff:
        """Judge one arm over the runs of a temperature (None: of all). Where nothing was repeated,
        prompts tell how much runs differ: the verdict is on texts of these kinds then."""
        runs = self._runs(temperature, None, arm)
        rows, table = (
            _rows(self._beside(some), lambda r: r.speed)
            for some in (runs, self._runs(None, None, arm))
        )
        if all(len(row) < 2 for row in table):
            table = [[pair for row in table for pair in row]]
        passes = [one for run in runs for one in run.passes]
        return payoff(passes, as_one(rows, table), newest=())


def _rows(beside: Beside, figure: Callable[[RunFigures], float | None]) -> list[Pairs]:
    """Return a figure of both runs; a row for each prompt at each temperature."""
    rows: dict[object, list[tuple[RunFigures, RunFigures]]] = defaultdict(list)
    for plain, run in beside:
        rows[run.prompt, run.temperature].append((plain, run))
    return [pairs(row, figure) for row in rows.values()]


def percentile(values: Sequence[float], at: float) -> float | None:
    """Interpolate linearly between closest ranks; return None without values."""
    return float(np.quantile(values, at)) if values else None


SCHEMA = "specllama.bench.v2"


_show = partial(figure, unknown="")


def _accepted(s: Summary) -> str:
    return "" if s.acceptance_rate is None else f"{s.accepted} ({s.acceptance_rate:.0%})"


COLUMNS: dict[str, Callable[[Summary], str]] = {
    "arm": lambda s: s.arm,
    "group": lambda s: s.group,
    "tok/s": lambda s: _show(s.tok_per_s, ".1f"),
    "ratio": lambda s: _show(s.ratio, ".2f", "×"),
    "range": lambda s: between(s.low, s.high),
    "p50 s": lambda s: _show(s.latency_p50_s, ".2f"),
    "p95 s": lambda s: _show(s.latency_p95_s, ".2f"),
    "TTFT ms": lambda s: _show(s.ttft_p50_s and s.ttft_p50_s * 1e3, ".0f"),
    "TTFT ratio": lambda s: _show(s.ttft_ratio, ".2f"),
    "accepted": _accepted,
    "same text": lambda s: "" if s.equal is None else f"{s.equal}/{s.compared}",
    "own time": lambda s: _show(s.other_share, ".1%"),
    "in run": lambda s: _show(s.in_run, ".2f", "×"),
}
"""The columns of a report; an empty cell is a figure that was not measured."""


def to_json(comparison: Comparison, *, texts: bool = False) -> dict[str, Any]:
    """Return the whole comparison as plain data; ``texts`` adds the replies and their token ids."""
    return {
        "schema": SCHEMA,
        "provenance": comparison.provenance,
        "baseline": comparison.baseline,
        "summaries": [s.to_dict() for s in comparison.summaries()],
        "runs": [run.to_dict(texts=texts) for run in comparison.runs],
    }


# ---- how it was measured


def provenance(info: EngineInfo, *, hashes: bool = True) -> dict[str, Any]:
    """Return a block for JSON. Files are named without their folder; hashing reads each once."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": package_versions(),
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "cpu": cpu_name(),
            "cores": usable_cores()[1],
        },
        "engine": {
            "device": info.device,
            "threads": info.threads,
            "flash_attn": info.flash_attn,
            "exactness": info.exactness,
        },
        "target": _model(info.target, hashes),
        "draft": None if info.draft is None else _model(info.draft, hashes),
        "arguments": sys.argv[1:],
    }


def _model(model: ModelInfo, hashes: bool) -> dict[str, Any]:
    path = Path(model.path)
    return {
        "file": path.name,
        "name": model.name,
        "quantization": model.quantization,
        "n_params": model.n_params,
        "bytes": model.file_bytes,
        "repacked": model.repacked,
        "sha256": model.sha256 or (of_model(path) if hashes else None),
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
        learnt = f"tuned {data['tuned']}" if data["tuned"] else "learnt from use, untuned"
        lines.append(f"warm: {learnt}")
    for one in data.get("against", ()):
        flags = f", started with {one['flags']}" if one["flags"] else ""
        model = f", model {one['model']}" if one["model"] else ""
        lines.append(f"{one['arm']}: {one['engine']} at {one['url']}{model}{flags}")
    if data.get("arguments"):
        lines.append("specllama " + " ".join(data["arguments"]))
    return lines

"""The tables of ``beside_llama.py``: by prompt, README's, of several clients, and why."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from markdown_table import table_of

from specllama.bench.experiment import RunFigures
from specllama.bench.outcome import Compared, as_one, between, pairs
from specllama.bench.prompts import load_prompts
from specllama.rates import fixed_speeds
from specllama.text import number_of

PROMPTS = Path(__file__).parent / "beside_prompts"
SETS = ("known", "unseen")  # nobody tuned on the second
LONGEST = 8
UNKNOWN = "–"
PLAIN, AUTO, REPACKED, EIGHT, THEIRS = "plain", "auto", "repacked", "eight", "llama.cpp"
STORED = "as stored"  # llama.cpp in the layout of plain, where it does not repack
SPEC = "--spec-type"
MODES = {
    **{f"draft {n}": (SPEC, "draft-simple", "--spec-draft-n-max", str(n)) for n in (2, 3, 4)},
    **{name: (SPEC, name) for name in ("ngram-simple", "ngram-mod", "ngram-map-k")},
}
ARMS = (PLAIN, AUTO, REPACKED, EIGHT, THEIRS, STORED, *MODES)
NAMED = {AUTO: "`auto`", REPACKED: "`--repack on`", THEIRS: THEIRS, STORED: "as stored"}
Groups = dict[str, list[str]]
"""Prompts by the title of their column."""


class Beside:
    """What was measured at one temperature.

    Args:
        found: what is kept besides the runs.
    """

    def __init__(self, runs: Sequence[RunFigures], found: dict[str, Any]) -> None:
        self.runs, self.found = runs, found
        self.temperature = f"T = {runs[0].temperature:g}"
        self.arms = list(dict.fromkeys(run.arm for run in runs))
        self.prompts = list(dict.fromkeys(run.prompt for run in runs))

    def of(self, arm: str, prompts: Sequence[str]) -> list[RunFigures]:
        return [run for run in self.runs if run.arm == arm and run.prompt in prompts]

    def rate(self, arm: str, prompts: Sequence[str]) -> float:
        """Tokens a second, in the geometric mean; 0 where replies were too short for a speed."""
        speeds = [run.speed for run in self.of(arm, prompts) if run.speed]
        return geometric_mean(speeds) if speeds else 0.0

    def ratio(self, arm: str, prompts: Sequence[str], base: str = PLAIN) -> Compared | None:
        plain = {run.task: run for run in self.of(base, prompts)}
        beside = [[(plain[run.task], run) for run in self.of(arm, [p])] for p in prompts]
        return as_one([pairs(row, lambda run: run.speed) for row in beside])

    def ratios(self, arm: str) -> dict[str, float]:
        """An arm over plain decoding, by prompt."""
        found = {p: self.ratio(arm, [p]) for p in self.prompts}
        return {p: one.ratio for p, one in found.items() if one}

    def best(self, prompt: str, start: str = "") -> str:
        """The fastest of llama.cpp's modes on a prompt, "" without any."""
        theirs = [arm for arm in self.arms if arm in (THEIRS, *MODES) and arm.startswith(start)]
        return max(theirs, key=lambda arm: self.rate(arm, [prompt]), default="")

    def mode(self) -> str:
        """llama.cpp's best way to draft on all prompts."""
        modes = [arm for arm in self.arms if arm in MODES]
        usual = "ngram-simple" if self.found["about"]["draft"] is None else "draft 3"
        return max(modes, key=lambda arm: self.rate(arm, self.prompts), default=usual)

    def oracle(self, prompt: str) -> tuple[int, float] | None:
        return best_fixed(self.found["costs auto"], self.of(EIGHT, [prompt])[:1])

    def copies(self, prompts: Sequence[str]) -> dict[str, float]:
        """What copies can gain, by prompt."""
        costs = self.found["costs auto"]
        texts = {p: self.of(PLAIN, [p])[0].token_ids for p in prompts if p in costs["ids"]}
        return {
            p: best_copies(costs, costs["ids"][p], text)
            for p, text in texts.items()
            if len(text) > 2
        }

    def over_best(self, arm: str) -> dict[str, float]:
        """An arm over the best of llama.cpp's modes, by prompt."""
        found = {p: self.ratio(arm, [p], best) for p in self.prompts if (best := self.best(p))}
        return {p: one.ratio for p, one in found.items() if one}

    def whole(self) -> Iterator[str]:
        """By prompt, in a table of the known and one of the others: plain in tokens a second, all
        else over it; the oracle's length in brackets."""
        for group in self.sets():
            groups = {**{p: [p] for p in group}, "all": group}
            oracles = {p: found for p in group if (found := self.oracle(p))}
            rows = [self.plain(groups)]
            rows += [self.row(groups, arm, self.ratios(arm)) for arm in self.arms if arm != PLAIN]
            rows.append(self.row(groups, "oracle", {p: speed for p, (_, speed) in oracles.items()}))
            for at, prompt in enumerate(group, 1):
                rows[-1][at] += f" ({oracles[prompt][0]})" if prompt in oracles else ""
            rows.append(self.row(groups, "oracle, copies", self.copies(group)))
            for arm in (AUTO, REPACKED):
                rows.append(self.row(groups, f"{arm} ÷ best", self.over_best(arm)))
            yield from [*table(groups, rows), ""]

    def readme(self) -> Iterator[str]:
        """README's table: the known prompts, the others together, all."""
        known, *others = self.sets()
        groups = {p: [p] for p in known} | {f"{len(some)} others": some for some in others}
        groups["all"] = self.prompts

        def best_of(start: str) -> dict[str, float]:
            """The best way of each prompt."""
            bests = {p: self.ratio(self.best(p, start), [p]) for p in self.prompts}
            return {p: one.ratio for p, one in bests.items() if one}

        rows = [self.plain(groups)]
        for arm, title in NAMED.items():
            rows.append(self.row(groups, title, self.ratios(arm)))
            if whole := self.ratio(arm, self.prompts):
                rows[-1][-1] = words(whole)
        rows += [
            self.row(groups, "its draft, best length", best_of("draft")),
            self.row(groups, "its n-grams, best way", best_of("ngram")),
        ]
        for arm in (AUTO, REPACKED):
            rows.append(self.row(groups, f"{NAMED[arm]} ÷ its best", self.over_best(arm)))
        yield from table(groups, rows)

    def sets(self) -> list[list[str]]:
        """The prompts that were known, and those that nobody tuned on, as far as they ran."""
        known = [p.id for p in load_prompts(PROMPTS / "known.jsonl")]
        parts = [[p for p in self.prompts if (p in known) == first] for first in (True, False)]
        return [part for part in parts if part]

    def plain(self, groups: Groups) -> list[str]:
        rates = (f"{self.rate(PLAIN, group):.1f}" for group in groups.values())
        return [f"{self.temperature}: plain, tok/s", *rates]

    def row(self, groups: Groups, title: str, found: dict[str, float]) -> list[str]:
        """A row of geometric means."""
        some = [[found[p] for p in group if p in found] for group in groups.values()]
        return [title, *(cell(geometric_mean(one) if one else None) for one in some)]

    def why(self, arm: str) -> list[str]:
        """Where an arm's time went, in that of plain decoding of the same tokens, by prompt."""
        rows = []
        for prompt in self.prompts:
            runs, plain = self.of(arm, [prompt]), self.rate(PLAIN, [prompt])
            tokens, drafted = (
                sum(getattr(r, name) or 0 for r in runs) for name in ("tokens", "drafted")
            )
            if not tokens or not plain:
                continue
            shares = [
                sum(getattr(r, f"{name}_s") for r in runs) for name in ("draft", "verify", "other")
            ]
            passes = [one for run in runs for one in run.passes]
            rows.append(
                [
                    prompt,
                    cell(self.ratios(arm).get(prompt)),
                    cell(tokens / sum(run.rounds for run in runs)),
                    f"{sum(run.accepted or 0 for run in runs)} of {drafted}",
                    *(cell(seconds * plain / tokens) for seconds in shares),
                    f"{sum(one.declined for one in passes)} of {len(passes)}",
                    ", ".join(sorted({one.source for one in passes if one.drafted})),
                ]
            )
        heads = ("speed", "tokens a pass", "kept", "draft", "passes", "own", "declined", "sources")
        return [f"{arm}, {self.temperature}", "", *table(heads, rows)]

    def sentences(self) -> Iterator[str]:
        """What ran where, and the extremes."""
        about = self.found["about"]
        files = " with ".join(f"`{about[name]}`" for name in ("target", "draft") if about[name])
        versions = {**about["versions"], "llama-server": about["llama-server"]}
        builds = ", ".join(f"{name} {v}" for name, v in versions.items())
        yield (
            f"{files}; {about['processor']}, {about['threads']} threads, {about['date']}; "
            f"{builds}. {len(self.prompts)} prompts, replies of up to {about['tokens']} tokens, "
            f"{number_of(1 + max(run.repetition for run in self.runs), 'round')}, arms in turn."
        )
        told = [one for name, one in self.found.items() if " | T=" in name]
        if crowded := sum(one["crowded"] for one in told):
            yield f"{crowded} of {len(told)} answers came from a crowded machine."
        if auto := self.ratios(AUTO):
            worst = min(auto, key=auto.__getitem__)
            plain = {run.task: run for run in self.of(PLAIN, self.prompts)}
            same = [plain[run.task].same(run) for run in self.of(AUTO, self.prompts)]
            yield f"Worst of `auto`: {worst}, {auto[worst]:.2f} of plain."
            yield f"Texts of `auto` that are plain's: {sum(map(bool, same))} of {len(same)}."
        for arm in (AUTO, REPACKED):
            if over := self.over_best(arm):
                least = min(over, key=over.__getitem__)
                yield (
                    f"{arm} over llama.cpp's best mode of each prompt: "
                    f"{geometric_mean(over.values()):.2f}; least {least}, {over[least]:.2f} of "
                    f"{self.best(least)}."
                )


def cell(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


def words(one: Compared) -> str:
    """A ratio with its interval, where one is known."""
    interval = between(one.low, one.high)
    return f"{one.ratio:.2f}" + (f" ({interval})" if interval else "")


def table(heads: Iterable[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, but for rows without a figure."""
    some = [row for row in rows if set(row[1:]) != {UNKNOWN}]
    return table_of(["", *heads], some).splitlines()


def load_table(rows: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """Tokens a second of all clients together, and ours over the better of theirs."""
    cells = []
    for some in rows:
        rates = {row["arm"]: row["tok_per_s"] for row in some}
        plain, *ours = (rates.pop(arm) for arm in (PLAIN, AUTO, REPACKED))
        cells.append([number_of(some[0]["clients"], "client"), f"{plain:.1f}"])
        cells[-1] += [f"{rate / plain:.2f}" for rate in (*ours, *rates.values())]
        cells[-1] += [f"{rate / max(rates.values()):.2f}" for rate in ours]
    arms = [row["arm"] for row in rows[0]] if rows else [PLAIN, AUTO, REPACKED]
    over = [f"{arm} ÷ better" for arm in (AUTO, REPACKED)]
    return table(["serve plain, tok/s", *arms[1:], *over], cells)


def in_steps(costs: dict[str, Any]) -> tuple[list[float], float, float]:
    """What passes of 0, 1, … rows take, in plain steps; then a step of the draft, and two tokens
    that it reads."""
    from specllama.bench.tuning import PassCosts
    from specllama.speculative.policy.costs import Costs

    target, draft = (
        {int(n): ms for n, ms in costs[name].items()} for name in ("target_ms", "draft_ms")
    )
    known = Costs()
    PassCosts(0, target, draft).store(known)
    v = [ms / target[1] for ms in known.target.upto(max(target))]
    return v, *(draft.get(n, 0.0) / target[1] for n in (1, 2))


def best_fixed(costs: dict[str, Any], runs: Sequence[RunFigures]) -> tuple[int, float] | None:
    """The best draft length for a prompt, and its speed over plain steps.

    Args:
        runs: of eight guesses in every round.
    """
    if not runs or not costs["draft_ms"]:
        return None
    v, step, two = in_steps(costs)
    late = min(max(two - step, 0.0), step)  # read together or in turn
    speeds = {0: 1.0} | fixed_speeds(survival(runs), step, v[: LONGEST + 2], late)
    return max(speeds.items(), key=lambda one: one[1])


def survival(runs: Sequence[RunFigures]) -> list[float]:
    """How likely a guess at each position is kept, of drafts that reached it."""
    drafts = [one for run in runs for one in run.passes if one.drafted]
    reached = [
        [one.accepted > i for one in drafts if len(one.drafted) > i]
        for i in range(max((len(one.drafted) for one in drafts), default=0))
    ]
    return list(accumulate(map(fmean, reached), min))


def best_copies(costs: dict[str, Any], prompt: Sequence[int], reply: Sequence[int]) -> float:
    """The speed of a reply, over plain steps, by a window that knows what passes cost and how often
    copies of this text are right, and drafts nothing else."""
    from best_window import Known, Text, best
    from replay import Spot
    from window_figures import copiers

    v, *_ = in_steps(costs)
    spots = [Spot(False, 0.5, truth=token, guess=int(not token)) for token in reply]
    text = Text(prompt, spots)
    known = Known.of([text], peek=True, copiers=copiers)
    return max(best([text], known, v, 1.0, copiers=copiers).speed, 1.0)

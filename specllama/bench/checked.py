"""What a comparison or a tuning says for the list of what was checked of a pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specllama.bench.arms import Arm
from specllama.bench.outcome import finding
from specllama.bench.paired import ratio_words
from specllama.bench.runner import Comparison
from specllama.bench.tune import Tuning
from specllama.store.checks import Finding


def of_comparison(result: Comparison, tried: Mapping[str, Sequence[Arm]]) -> dict[str, Finding]:
    """Findings by what was checked.

    Args:
        tried: our own arms that answer "speed" (the last one counts), "length" and "methods" (the
            fastest does).
    """
    found: dict[str, Finding] = {}
    for what, arms in tried.items():
        known = [s for s in (result.summary(arm.name, "all") for arm in arms) if s.ratio]
        if known:
            best = known[-1] if what == "speed" else max(known, key=lambda s: s.ratio or 0.0)
            named = "" if what == "speed" else f"{best.arm} is the fastest: "
            found[what] = finding([best], named + ratio_words(best))
    every = [result.summary(arm.name, "all") for arms in tried.values() for arm in arms]
    same, of = sum(s.equal or 0 for s in every), sum(s.compared for s in every)
    if of:
        found["text"] = Finding(same == of, f"{same} of {of} replies identical")
    if tried["speed"] and len(result.slices) > 1:
        arm = tried["speed"][-1].name
        kinds = [s for s in (result.summary(arm, s, slice=s) for s in result.slices) if s.ratio]
        words = [f"{s.group} {ratio_words(s)}" for s in kinds]
        found["kinds"] = finding(kinds, ", ".join(words))
    return found


def of_tuning(result: Tuning) -> dict[str, Finding]:
    """The best fixed length, as far as costs and acceptance predict it."""
    if not result.groups:
        return {}
    lengths = sorted({group.best for group in result.groups})
    words = " or ".join(str(k) for k in lengths if k) or "0"
    top = max(group.best_speed for group in result.groups)
    kinds = "by kind of text" if len(lengths) > 1 else "for every kind of text"
    return {"length": Finding(top >= 1.0, f"k = {words} {kinds}, up to {top:.2f}× predicted")}

"""The drafting methods of a pair, and the reasons why it lacks the others."""

from __future__ import annotations

from specllama.interface import MethodInfo
from specllama.speculative.drafting import method
from specllama.speculative.drafting.method import Facts


def methods(facts: Facts) -> tuple[MethodInfo, ...]:
    """List all methods in the order of a menu, each with the reason if this pair lacks it."""
    return tuple(
        MethodInfo(
            entry.name,
            entry.label,
            entry.blurb,
            not (reason := entry.why_not(facts)),
            reason,
            entry.short,
            entry.letter,
        )
        for entry in method.methods()
    )

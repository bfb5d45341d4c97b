"""The ways to draft of a pair: which of them it has, and why not the others."""

from __future__ import annotations

from specllama.interface import MethodInfo
from specllama.speculative.drafting import method
from specllama.speculative.drafting.method import Facts


def methods(facts: Facts) -> tuple[MethodInfo, ...]:
    """All methods that people know, in the order of a menu, and what keeps a pair from each."""
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
